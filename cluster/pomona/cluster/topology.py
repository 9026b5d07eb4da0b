"""Topology: how ranks, replicas and attention-DP owners follow from the sizes on the command line (DESIGN 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pomona.workers.errors import OperatorError


@dataclass(frozen=True, slots=True)
class Topology:
    """The sizes of one model's deployment. Made by `resolve`, which checks every rule."""

    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_dp_attention: bool = False
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def attn_dp_size(self) -> int:
        """Owners of one replica. Under pure data parallelism a replica is one owner: nothing is divided by dp_size."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def attn_tp_size(self) -> int:
        """Ranks of one owner, in each pipeline stage."""
        return self.tp_size // self.attn_dp_size

    @property
    def ranks_per_replica(self) -> int:
        """With DP attention, dp_size lies inside tp_size."""
        return self.tp_size * self.pp_size

    @property
    def replicas(self) -> int:
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_replica

    def attn_ranks(self, tp_rank: int) -> tuple[int, int]:
        """(attn_dp_rank, attn_tp_rank) of a rank inside its replica."""
        return tp_rank // self.attn_tp_size, tp_rank % self.attn_tp_size


def resolve(*, tp_size: int = 1, dp_size: int = 1, pp_size: int = 1, enable_dp_attention: bool = False) -> Topology:
    """Check every rule that needs neither a model nor hosts. Raises OperatorError naming flag, rule and fix."""
    sizes = {"--tp-size": tp_size, "--dp-size": dp_size, "--pp-size": pp_size}
    for flag, size in sizes.items():
        if size < 1:
            raise OperatorError(f"{flag} {size} must be a positive integer: use {flag} 1 or more")
    if enable_dp_attention and dp_size == 1:
        note = "--enable-dp-attention does nothing with --dp-size 1 and is off: give --dp-size the number of owners"
        return Topology(tp_size, dp_size, pp_size, False, (note,))
    if enable_dp_attention and tp_size % dp_size:
        larger = (tp_size // dp_size + 1) * dp_size
        smaller = max(d for d in range(1, min(dp_size, tp_size) + 1) if tp_size % d == 0)
        raise OperatorError(
            f"--tp-size {tp_size} does not divide among --dp-size {dp_size} attention-DP owners "
            f"(DP attention needs tp_size % dp_size == 0): use --tp-size {larger} or --dp-size {smaller}"
        )
    return Topology(tp_size, dp_size, pp_size, enable_dp_attention)


def check_model(topology: Topology, config: Mapping[str, Any]) -> None:
    """Refuse sizes that the model's own shapes do not divide into. `config` is the model's config.json."""
    text = config.get("text_config") or config
    rules = (
        ("num_attention_heads", topology.attn_tp_size, "attention heads", "attn_tp_size"),
        ("num_key_value_heads", topology.attn_tp_size, "key-value heads", "attn_tp_size"),
        ("intermediate_size", topology.tp_size, "MLP width", "tp_size"),
        ("moe_intermediate_size", topology.tp_size, "expert width", "tp_size"),
    )
    for key, parts, what, size_name in rules:
        width = text.get(key)
        if isinstance(width, int) and width % parts:
            _refuse_split(topology, what, width, parts, size_name)
    group = (config.get("quantization") or {}).get("group_size")
    for key in ("intermediate_size", "moe_intermediate_size"):
        width = text.get(key)
        if group and isinstance(width, int) and (width // topology.tp_size) % group:
            fits = _largest_divisor(width // group, topology.tp_size)
            raise OperatorError(
                f"--tp-size {topology.tp_size} cuts the model's {key} {width} across quantisation groups of {group}: "
                f"use a size that divides {width // group}, such as --tp-size {fits}"
            )


def _refuse_split(topology: Topology, what: str, width: int, parts: int, size_name: str) -> None:
    fits = _largest_divisor(width, parts)
    if size_name == "attn_tp_size" and not topology.enable_dp_attention:
        fix = f"use --tp-size {fits}, or --enable-dp-attention --dp-size {topology.tp_size}"
    elif size_name == "attn_tp_size":
        fix = f"use --dp-size {topology.tp_size // fits}, so that each owner has {fits} rank(s)"
    else:
        fix = f"use --tp-size {fits}"
    raise OperatorError(
        f"--tp-size {topology.tp_size} asks for {size_name} {parts}, "
        f"but the model's {width} {what} do not divide by it: {fix}"
    )


def _largest_divisor(width: int, at_most: int) -> int:
    return max(d for d in range(1, at_most + 1) if width % d == 0)
