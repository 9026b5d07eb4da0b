"""What people see in a terminal of 120 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pomona.cluster import tables
from pomona.cluster.capacity import Limits
from pomona.cluster.cluster import Cluster
from pomona.cluster.membership import Identity, Load, Memory, OwnerKey
from pomona.cluster.plan import foresee
from pomona.cluster.topology import resolve
from pomona.cluster.view import ReplicaView
from pomona.workers.engine.pools import PoolView

DP_ATTENTION = resolve(tp_size=4, dp_size=4, enable_dp_attention=True)
HYBRID = Memory(kv_tokens=123_456, hybrid=True, aux_slots=400)


def shown(renderable: object) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def rows(text: str) -> list[list[str]]:
    """The lines of the owners' table, in words."""
    return [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]


@pytest.fixture
def live() -> dict:
    """The view of a hybrid replica of one owner that is in use."""
    cluster = Cluster("M", resolve(), Limits(8, 32), lambda: 0.0)
    member = cluster.register(Identity("M", OwnerKey(0, 0), "life", "mac1", "127.0.0.1:1"), HYBRID)
    load = Load(cluster.epoch, 1, running=3, max_running=8, kv=PoolView(123_456, 2_000, 500), aux=PoolView(32, 12, 4))
    cluster.report(member.worker_id, "life", load)
    cluster.replica_views[0] = ReplicaView(0, "ready", "mac1")
    return cluster.view().to_json()


def test_the_headline_says_the_topology_and_what_limits_are_divided_by():
    line = tables.headline(foresee("M", DP_ATTENTION, Limits(8), Memory(kv_tokens=1000)).to_json())
    assert "M: 1 replica(s) of 4 rank(s)" in line
    assert "attn_dp_size 4" in line
    assert "a replica admits 8 running requests" in line
    assert "split among its 4 attention-DP owners" in line


def test_the_headline_says_when_no_limit_is_set():
    line = tables.headline(foresee("M", resolve(), Limits(), Memory(kv_tokens=10)).to_json())
    assert "as many requests as memory holds, undivided" in line


def test_a_plan_shows_every_owners_capacity_and_why():
    text = shown(tables.plan_view(foresee("M", DP_ATTENTION, Limits(8), Memory(kv_tokens=123_456)).to_json()))
    assert [row[:5] for row in rows(text)] == [["0", str(owner), "-", "2", "123,456"] for owner in range(4)]
    assert "the requested limit gives this owner 2" in text
    assert "aux slots" not in text
    assert "unallocated" not in text
    assert "warning" not in text


def test_live_pools_are_shown_as_used_of_capacity_with_the_phase(live):
    text = shown(tables.plan_view(live))
    assert rows(text) == [["0", "0", "mac1", "3/8", "2,000/123,456", "12/32", "requested", "ready"]]
    assert "phase" in text


def test_what_found_no_room_is_shown_with_its_warnings():
    text = shown(tables.plan_view(foresee("M", DP_ATTENTION, Limits(8, 16, hybrid=True), HYBRID).to_json()))
    assert "unallocated: 4 of --max-running-requests found no room" in text
    assert text.count("warning: replica 0, attention-DP owner") == 4
    assert [row[3:7] for row in rows(text)] == [["1", "123,456", "4", "aux"]] * 4


def test_a_replica_with_a_problem_is_shown_and_one_without_is_not(live):
    failed = replace(ReplicaView(1, "failed", None), problem="no host has room").to_json()
    text = shown(tables.plan_view(live | {"replica_states": [*live["replica_states"], failed]}))
    assert "replica 1: failed: no host has room" in text
    assert "replica 0: ready" not in text


def test_a_cluster_without_owners_has_a_headline_and_an_empty_table():
    text = shown(tables.plan_view(Cluster("M", resolve(), Limits(8), lambda: 0.0).view().to_json()))
    assert text.startswith("M: 1 replica(s)")
    assert rows(text) == []


def test_names_with_square_brackets_are_shown_as_they_are():
    plan = foresee("[red]M[/red]", resolve(), Limits(8), Memory(kv_tokens=1000)).to_json()
    plan["warnings"] = ["[bold]careful"]
    text = shown(tables.plan_view(plan))
    assert "[red]M[/red]" in text
    assert "[bold]careful" in text


def test_a_host_name_with_square_brackets_is_shown_as_it_is(live):
    live["owners"][0]["host"] = "mac[1]/[b]"
    assert "mac[1]/[b]" in shown(tables.plan_view(live))


def test_nothing_is_cut_off_at_120_columns(live):
    for plan in (live, foresee("M", DP_ATTENTION, Limits(8, 16, hybrid=True), HYBRID).to_json()):
        assert "…" not in shown(tables.plan_view(plan))


def test_addresses_are_a_line_each():
    text = shown(tables.addresses({"api": "http://127.0.0.1:8000/v1", "metrics": "http://127.0.0.1:9400/metrics"}))
    assert [line.split() for line in text.splitlines()] == [
        ["api", "http://127.0.0.1:8000/v1"],
        ["metrics", "http://127.0.0.1:9400/metrics"],
    ]
