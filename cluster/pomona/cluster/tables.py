"""What people look at in a terminal: one renderer for the plan's JSON object, before and while it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]

_BOUND_STYLE = {"requested": "green", "kv": "yellow", "aux": "yellow"}


def plan_view(plan: Json) -> RenderableType:
    """Headline, owners, warnings."""
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), owners_table(plan)]
    unallocated = plan["unallocated_running_requests"]
    if unallocated:
        parts.append(Text(f"unallocated: {unallocated} of --max-running-requests found no room", style="yellow"))
    parts += [Text(f"warning: {line}", style="yellow") for line in plan["warnings"]]
    parts += [
        Text(f"replica {r['replica']}: {r['stage']}: {r['problem']}", style="red")
        for r in plan.get("replica_states", ())
        if r["problem"]
    ]
    return Group(*parts)


def headline(plan: Json) -> str:
    """The topology in one line, and what that does to limits."""
    limit, owners = plan["max_running_requests"], plan["attn_dp_size"]
    asked = f"{limit} running requests" if limit else "as many requests as memory holds"
    split = f"split among its {owners} attention-DP owners" if owners > 1 else "undivided"
    return (
        f"{plan['model']}: {plan['replicas']} replica(s) of {plan['ranks_per_replica']} rank(s), "
        f"attn_dp_size {owners}, attn_tp_size {plan['attn_tp_size']}; a replica admits {asked}, {split}"
    )


def owners_table(plan: Json) -> Table:
    """A row an owner; live columns when there are live pools."""
    live = any("pools" in owner for owner in plan["owners"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "owner", "host", "request slots", "KV tokens"):
        table.add_column(name, justify="left" if name == "host" else "right")
    if plan["hybrid"]:
        table.add_column("aux slots", justify="right")
    table.add_column("binds")
    table.add_column("phase" if live else "why")
    for owner in plan["owners"]:
        table.add_row(*_owner_row(owner, hybrid=plan["hybrid"], live=live))
    return table


def _owner_row(owner: Json, *, hybrid: bool, live: bool) -> list[str | Text]:
    pools = owner.get("pools", {})
    row: list[str | Text] = [
        str(owner["replica"]),
        str(owner["owner"]),
        Text(owner["host"] or "-"),
        _used(pools.get("request_slots"), owner["max_running_requests"]),
        _used(pools.get("kv_tokens"), owner["kv_tokens"]),
    ]
    if hybrid:
        row.append(_used(pools.get("aux_state_slots"), owner["aux_slots"]))
    row.append(Text(owner["bound"], style=_BOUND_STYLE[owner["bound"]]))
    row.append(owner["phase"] if live else owner["why"])
    return row


def _used(pool: Json | None, capacity: int) -> str:
    """`used/capacity` where the pool is live, else the capacity."""
    return f"{capacity:,}" if pool is None else f"{pool['used']:,}/{pool['capacity']:,}"


def addresses(names: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, url in names.items():
        table.add_row(Text(name, style="bold"), Text(url))
    return table
