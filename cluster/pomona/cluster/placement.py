"""Placement: which host gets which replica. Spread first, then the roomier host; never a silent wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pomona.workers.errors import OperatorError


@dataclass(frozen=True, slots=True)
class Host:
    """A live Ray node. `host_id` is Ray's node id: addresses repeat, ids do not."""

    host_id: str
    name: str
    address: str
    memory_bytes: int
    cpus: int


def unique_names(hosts: Sequence[Host]) -> list[Host]:
    """Hosts whose names tell them apart: a name that repeats gets the start of the node id."""
    counts = Counter(h.name for h in hosts)
    return [
        h if counts[h.name] == 1 else Host(h.host_id, f"{h.name}#{h.host_id[:6]}", h.address, h.memory_bytes, h.cpus)
        for h in hosts
    ]


def bind_host(host: Host, hosts: Sequence[Host]) -> str:
    """Where a worker on `host` listens: its cluster address, loopback when the cluster is one machine."""
    return "127.0.0.1" if len({h.address for h in hosts}) == 1 else host.address


def choose(hosts: Sequence[Host], ranks_on: Mapping[str, int], *, need_bytes: int = 0) -> Host:
    """The host for one more rank: fewest ranks, then most memory, then name.

    `need_bytes` is the least a rank needs (weights). Raises OperatorError that says which host lacks what.
    """
    if not hosts:
        raise OperatorError("no host is alive to place a replica on: start one with `ray start`")

    def room(host: Host) -> int:
        return host.memory_bytes // (ranks_on.get(host.host_id, 0) + 1)

    fitting = [h for h in hosts if room(h) >= need_bytes]
    if not fitting:
        lacks = "; ".join(f"{h.name} has {room(h) / 2**30:.1f} GiB for it" for h in hosts)
        raise OperatorError(
            f"no host has room for a replica that needs {need_bytes / 2**30:.1f} GiB for its weights: {lacks}; "
            "lower --dp-size, add a host, or serve a smaller model"
        )
    return min(fitting, key=lambda h: (ranks_on.get(h.host_id, 0), -h.memory_bytes, h.name))
