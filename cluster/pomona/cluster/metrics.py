"""The head's metrics (DESIGN 10): a custom Collector over one snapshot, so that who leaves takes its series along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pomona.workers.engine.pools import PoolView

from .capacity import Bound
from .membership import Load
from .view import ClusterView, OwnerView

# Text format 0.0.4, always: newer negotiated formats rename compat metrics (FACTS).
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OWNER = ("model", "replica", "owner")
REPLICA_STATES = ("starting", "ready", "failed")

Family = GaugeMetricFamily | CounterMetricFamily
Rows = Iterable[tuple[Sequence[str], float]]


class CapacityCollector(Collector):
    """Turns the current view into metric families at each scrape."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        view = self._view()
        yield from _model_families(view)
        yield from _owner_families(view)
        yield from _state_families(view)


def registry(view: Callable[[], ClusterView]) -> CollectorRegistry:
    """A registry of its own: nothing of the process is mixed in."""
    made = CollectorRegistry(auto_describe=False)
    made.register(CapacityCollector(view))
    return made


def exposition(made: CollectorRegistry) -> bytes:
    return generate_latest(made)


def _family(name: str, what: str, labels: Sequence[str], rows: Rows) -> Family:
    """A counter where the name ends as counters' names do, else a gauge."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, what, labels=labels)
    for values, value in rows:
        family.add_metric(list(values), value)
    return family


def _model_families(view: ClusterView) -> Iterator[Family]:
    plan, model = view.plan, (view.plan.model,)
    limits = plan.limits
    one = ("model",)
    if limits.max_running_requests is not None:
        yield _family(
            "pomona_max_running_requests", "Configured request limit of one replica", one,
            [(model, limits.max_running_requests)],
        )  # fmt: skip
    if limits.max_mamba_cache_size is not None:
        yield _family(
            "pomona_max_mamba_cache_size", "Configured auxiliary-state slots of one replica", one,
            [(model, limits.max_mamba_cache_size)],
        )  # fmt: skip
    yield _family(
        "pomona_attn_dp_size", "Attention-DP owners of one replica", one, [(model, plan.topology.attn_dp_size)]
    )
    yield _family(
        "pomona_unallocated_running_requests", "Of the configured limit, what no owner could take", one,
        [(model, plan.unallocated)],
    )  # fmt: skip
    states = Counter(replica_state(r.stage, r.problem) for r in view.replicas)
    yield _family(
        "pomona_replicas", "Replicas by state", ("model", "state"), [((*model, s), states[s]) for s in REPLICA_STATES]
    )
    yield _family("pomona_desired_replicas", "Replicas that are wanted", one, [(model, len(view.replicas))])
    yield _family("pomona_hosts", "Hosts of the cluster by state", ("state",), [(("alive",), len(view.hosts))])
    yield _family("pomona_epoch", "Number of the plan in force", (), [((), plan.epoch)])
    yield _family("pomona_build_info", "Version of the head", ("version",), [((version("pomona"),), 1)])


def replica_state(stage: str, problem: str | None) -> str:
    """One of REPLICA_STATES."""
    if problem is not None:
        return "failed"
    return "ready" if stage == "ready" else "starting"


def _owner_families(view: ClusterView) -> Iterator[Family]:
    def rows(value: Callable[[OwnerView], float]) -> Rows:
        return [(_labels(view, o), value(o)) for o in view.owners]

    values: tuple[tuple[str, str, Callable[[OwnerView], float]], ...] = (
        ("pomona_owner_max_running_requests", "The owner's share of request slots", _share),
        ("pomona_running_requests", "Requests that hold a slot", lambda o: o.load.running),
        ("pomona_waiting_requests", "Requests in the owner's queue", lambda o: o.load.waiting),
        ("pomona_preempted_requests_total", "Requests that made room and waited again", lambda o: o.load.preempted),
        ("pomona_kv_capacity_tokens", "KV tokens the owner holds", lambda o: o.load.kv.capacity),
        ("pomona_aux_state_capacity_slots", "Auxiliary-state slots the owner holds", lambda o: o.load.aux.capacity),
        ("pomona_report_age_seconds", "Seconds since the owner's last report", lambda o: o.report_age_s),
    )
    for name, what, value in values:
        yield _family(name, what, OWNER, rows(value))
    yield _family(
        "pomona_capacity_bound",
        "1 for the limit that binds the owner",
        (*OWNER, "bound"),
        [((*_labels(view, o), b.value), float(o.plan.share.bound is b)) for o in view.owners for b in Bound],
    )


def _state_families(view: ClusterView) -> Iterator[Family]:
    def rows(amounts: Callable[[Load], Mapping[str, int]]) -> Rows:
        for owner in view.owners:
            for state, amount in amounts(owner.load).items():
                yield (*_labels(view, owner), state), amount

    by_state = (*OWNER, "state")
    yield _family("pomona_kv_tokens", "KV tokens by state", by_state, rows(lambda load: _pool(load.kv)))
    yield _family("pomona_aux_state_slots", "Auxiliary slots by state", by_state, rows(lambda load: _pool(load.aux)))
    yield _family(
        "pomona_memory_bytes", "What MLX uses, what it keeps of freed buffers, and the limit of both", by_state,
        rows(_memory),
    )  # fmt: skip


def _pool(pool: PoolView) -> dict[str, int]:
    return {"used": pool.used, "evictable": pool.evictable, "free": pool.free}


def _memory(load: Load) -> dict[str, int]:
    return {"active": load.active_bytes, "cache": load.cache_bytes, "limit": load.limit_bytes}


def _share(owner: OwnerView) -> float:
    return owner.plan.share.max_running_requests


def _labels(view: ClusterView, owner: OwnerView) -> tuple[str, str, str]:
    return view.plan.model, str(owner.plan.replica), str(owner.plan.share.owner)


def service_discovery(targets: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Prometheus' HTTP service discovery: one group a (role, host:port)."""
    return [{"targets": [address], "labels": {"role": role}} for role, address in targets]
