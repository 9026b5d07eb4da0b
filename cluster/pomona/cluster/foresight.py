"""What can be known before anything is started: the checks and the plan that `serve` and `plan` share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pomona.workers.errors import OperatorError
from pomona.workers.models import source
from pomona.workers.models.peek import Sizes, peek
from pomona.workers.models.profile import kv_pool
from pomona.workers.models.source import ModelSource

from .capacity import Limits, check_limits
from .config import ServeConfig
from .membership import Memory
from .plan import Plan, foresee
from .topology import Topology, check_model


@dataclass(frozen=True, slots=True)
class Foresight:
    """`plan` is None for a model that is not on this machine yet: its sizes are unknown."""

    topology: Topology
    model: ModelSource
    served_name: str
    weights_bytes: int = 0
    plan: Plan | None = None


def look(config: ServeConfig) -> Foresight:
    """Check everything that needs neither Ray nor weights, in the order of cost. Raises OperatorError."""
    topology = config.topology()
    check_limits(replace(config.limits, hybrid=False), topology.attn_dp_size)
    config.check_exposure()
    model = source.resolve(config.model)
    name = config.served_model_name or model.served_name
    if model.config is not None:
        check_model(topology, model.config)
    if model.path is None:
        return Foresight(topology, model, name)
    sizes = peek(model.path, dtype=config.dtype, trust_remote_code=config.trust_remote_code, kv_bits=config.kv_bits)
    _check_context(config, sizes)
    limits = replace(config.limits, hybrid=sizes.shape.hybrid)
    check_limits(limits, topology.attn_dp_size)
    memory = _memory(config, topology, limits, sizes)
    return Foresight(topology, model, name, sizes.weights_bytes, foresee(name, topology, limits, memory))


def _check_context(config: ServeConfig, sizes: Sizes) -> None:
    if config.context_length is not None and config.context_length > sizes.context_tokens:
        raise OperatorError(
            f"--context-length {config.context_length} is more than the model's {sizes.context_tokens}: "
            f"use at most {sizes.context_tokens}"
        )


def _memory(config: ServeConfig, topology: Topology, limits: Limits, sizes: Sizes) -> Memory:
    """One owner's memory on a machine like this one, before the reserve for activations is measured.

    Replicas of one rank share this machine; ranks of a larger replica have a host each.
    """
    sharing = topology.replicas if topology.ranks_per_replica == 1 and config.address is None else 1
    owners = topology.attn_dp_size
    held = kv_pool(
        int(sizes.working_set_bytes * config.mem_fraction_static) // sharing,
        sizes.weights_bytes // topology.tp_size,
        0,
        replace(sizes.shape, kv_bytes_per_token=-(-sizes.kv_bytes_per_token // topology.attn_tp_size)),
        ranks_on_host=sharing,
        aux_slots=None if limits.aux_limit is None else limits.aux_limit // owners,
        mamba_full_memory_ratio=config.mamba_full_memory_ratio,
        max_total_tokens=config.max_total_tokens,
        context_tokens=config.context_length or sizes.context_tokens,
    )
    return Memory(**_fields(held))


def _fields(held: Any) -> dict[str, Any]:
    return {name: getattr(held, name) for name in Memory.__dataclass_fields__}
