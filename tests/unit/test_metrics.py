"""The head's metrics: names, labels and numbers are those of DESIGN 10, from one snapshot a scrape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pomona.cluster import exporter, metrics
from pomona.cluster.capacity import Limits
from pomona.cluster.cluster import Cluster
from pomona.cluster.membership import Identity, Load, Memory, OwnerKey
from pomona.cluster.topology import resolve
from pomona.cluster.view import ReplicaView
from pomona.workers.engine.pools import PoolView

OWNER = {"model", "replica", "owner"}
LABELS = {
    "pomona_max_running_requests": {"model"},
    "pomona_max_mamba_cache_size": {"model"},
    "pomona_attn_dp_size": {"model"},
    "pomona_owner_max_running_requests": OWNER,
    "pomona_running_requests": OWNER,
    "pomona_waiting_requests": OWNER,
    "pomona_preempted_requests_total": OWNER,
    "pomona_memory_bytes": OWNER | {"state"},
    "pomona_kv_tokens": OWNER | {"state"},
    "pomona_kv_capacity_tokens": OWNER,
    "pomona_aux_state_slots": OWNER | {"state"},
    "pomona_aux_state_capacity_slots": OWNER,
    "pomona_capacity_bound": OWNER | {"bound"},
    "pomona_report_age_seconds": OWNER,
    "pomona_unallocated_running_requests": {"model"},
    "pomona_replicas": {"model", "state"},
    "pomona_desired_replicas": {"model"},
    "pomona_hosts": {"state"},
    "pomona_epoch": set(),
    "pomona_build_info": {"version"},
}
Samples = dict[str, dict[tuple[str, ...], float]]


@dataclass
class Bench:
    """A hybrid replica of two attention-DP owners on a cluster whose clock the test moves."""

    now: float = 50.0
    views: int = 0
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        topology = resolve(tp_size=2, dp_size=2, enable_dp_attention=True)
        self.cluster = Cluster("M", topology, Limits(9, 16), lambda: self.now)
        self.cluster.hosts = ("mac1", "mac2")
        self.cluster.replica_views[0] = ReplicaView(0, "ready", "mac1")
        for owner in (0, 1):
            self.join(owner)

    def join(self, owner: int, life: str = "a") -> None:
        who = Identity("M", OwnerKey(0, owner), f"{life * 8}{owner}", f"mac{owner + 1}", "127.0.0.1:1")
        self.cluster.register(who, Memory(kv_tokens=1000, hybrid=True, aux_slots=100))

    def report(self, owner: int, seq: int = 1, **load: Any) -> None:
        member = self.cluster.members.at(OwnerKey(0, owner))
        assert member is not None
        self.cluster.report(
            member.worker_id, member.identity.incarnation, Load(epoch=self.cluster.epoch, seq=seq, **load)
        )

    def view(self):
        self.views += 1
        return self.cluster.view()

    def scrape(self) -> Samples:
        return parse(metrics.exposition(metrics.registry(self.view)).decode())


def parse(text: str) -> Samples:
    """name -> label values in the order of the label names -> value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[values] = sample.value
    return found


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    memory = {"active_bytes": 600, "cache_bytes": 50, "limit_bytes": 1000}
    pools = {"kv": PoolView(1000, 300, 200), "aux": PoolView(8, 4, 4)}
    made.report(0, running=2, waiting=3, max_running=2, preempted=7, **pools, **memory)
    made.report(1, running=1, waiting=0, max_running=2, kv=PoolView(1000, 10, 0), aux=PoolView(8, 4, 0))
    return made


def test_names_and_labels_are_those_of_the_contract(bench):
    text = metrics.exposition(metrics.registry(bench.view)).decode()
    found = {s.name: set(s.labels) for family in text_string_to_metric_families(text) for s in family.samples}
    assert found == LABELS
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name for name, kind in types.items() if kind == "counter"} == {"pomona_preempted_requests"}
    assert set(types.values()) == {"gauge", "counter"}


def test_label_values_come_from_closed_sets(bench):
    text = metrics.exposition(metrics.registry(bench.view)).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def values(name: str, label: str) -> set[str]:
        return {s.labels[label] for s in samples if s.name == name}

    assert values("pomona_kv_tokens", "state") == {"used", "evictable", "free"}
    assert values("pomona_aux_state_slots", "state") == {"used", "evictable", "free"}
    assert values("pomona_memory_bytes", "state") == {"active", "cache", "limit"}
    assert values("pomona_capacity_bound", "bound") == {"requested", "kv", "aux"}
    assert values("pomona_replicas", "state") == {"starting", "ready", "failed"}
    assert values("pomona_running_requests", "owner") == {"0", "1"}


def test_configured_limits_and_shares_are_told_apart(bench):
    found = bench.scrape()
    assert found["pomona_max_running_requests"] == {("M",): 9}
    assert found["pomona_max_mamba_cache_size"] == {("M",): 16}
    assert found["pomona_attn_dp_size"] == {("M",): 2}
    assert found["pomona_owner_max_running_requests"] == {("M", "0", "0"): 2, ("M", "1", "0"): 2}
    assert found["pomona_unallocated_running_requests"] == {("M",): 5}


def test_the_limit_that_binds_is_one_and_the_others_zero(bench):
    bound = bench.scrape()["pomona_capacity_bound"]
    assert {key: value for key, value in bound.items() if value} == {
        ("aux", "M", "0", "0"): 1,
        ("aux", "M", "1", "0"): 1,
    }
    assert len(bound) == 6


@pytest.mark.parametrize(
    ("states", "capacity"),
    [
        ("pomona_kv_tokens", "pomona_kv_capacity_tokens"),
        ("pomona_aux_state_slots", "pomona_aux_state_capacity_slots"),
    ],
)
def test_used_evictable_and_free_make_up_the_capacity_in_one_scrape(bench, states, capacity):
    found = bench.scrape()
    assert bench.views == 1
    for (model, owner, replica), whole in found[capacity].items():
        parts = {s: v for (m, o, r, s), v in found[states].items() if (m, o, r) == (model, owner, replica)}
        assert parts.keys() == {"used", "evictable", "free"}
        assert sum(parts.values()) == whole
        assert min(parts.values()) >= 0


def test_occupancy_is_what_the_owner_said(bench):
    found = bench.scrape()
    assert found["pomona_running_requests"] == {("M", "0", "0"): 2, ("M", "1", "0"): 1}
    assert found["pomona_waiting_requests"] == {("M", "0", "0"): 3, ("M", "1", "0"): 0}
    assert found["pomona_kv_tokens"][("M", "0", "0", "evictable")] == 200
    assert found["pomona_kv_tokens"][("M", "0", "0", "free")] == 500


def test_memory_and_preemptions_are_what_each_owner_said(bench):
    found = bench.scrape()
    memory = {state: value for (_, owner, _, state), value in found["pomona_memory_bytes"].items() if owner == "0"}
    assert memory == {"active": 600, "cache": 50, "limit": 1000}
    assert found["pomona_memory_bytes"][("M", "1", "0", "active")] == 0
    assert found["pomona_preempted_requests_total"] == {("M", "0", "0"): 7, ("M", "1", "0"): 0}


def test_the_age_of_a_report_grows_with_time_alone(bench):
    bench.now += 2.5
    assert bench.scrape()["pomona_report_age_seconds"] == {("M", "0", "0"): 2.5, ("M", "1", "0"): 2.5}


def test_a_member_that_leaves_takes_its_series_with_it_at_the_next_scrape(bench):
    registry = metrics.registry(bench.view)
    assert "pomona_kv_capacity_tokens{" in metrics.exposition(registry).decode()
    bench.cluster.lost(OwnerKey(0, 0))
    text = metrics.exposition(registry).decode()
    assert 'owner="' not in text
    assert parse(text)["pomona_max_running_requests"] == {("M",): 9}  # what is configured stays


def test_one_replica_that_leaves_takes_nothing_of_another_along():
    cluster = Cluster("M", resolve(dp_size=2), Limits(8), lambda: 0.0)
    for replica in (0, 1):
        who = Identity("M", OwnerKey(replica, 0), f"life{replica}", "mac1", "127.0.0.1:1")
        member = cluster.register(who, Memory(kv_tokens=100))
        cluster.report(member.worker_id, f"life{replica}", Load(cluster.epoch, 1, kv=PoolView(100)))
    registry = metrics.registry(cluster.view)
    cluster.lost(OwnerKey(0, 0))
    found = parse(metrics.exposition(registry).decode())
    assert found["pomona_kv_capacity_tokens"] == {("M", "0", "1"): 100}
    assert found["pomona_owner_max_running_requests"] == {("M", "0", "1"): 8}


def test_an_owner_that_has_not_confirmed_its_share_has_no_series_yet():
    found = Bench().scrape()
    assert "pomona_owner_max_running_requests" not in found
    assert "pomona_kv_tokens" not in found


def test_limits_that_are_not_set_have_no_series():
    cluster = Cluster("M", resolve(), Limits(), lambda: 0.0)
    found = parse(metrics.exposition(metrics.registry(cluster.view)).decode())
    assert "pomona_max_running_requests" not in found
    assert "pomona_max_mamba_cache_size" not in found
    assert found["pomona_unallocated_running_requests"] == {("M",): 0}


def test_replicas_are_counted_by_state_and_hosts_as_alive(bench):
    bench.cluster.replica_views |= {
        1: ReplicaView(1, "reading weights", "mac2"),
        2: ReplicaView(2, "failed", None, problem="no host has room"),
    }
    found = bench.scrape()
    assert found["pomona_replicas"] == {("M", "ready"): 1, ("M", "starting"): 1, ("M", "failed"): 1}
    assert found["pomona_desired_replicas"] == {("M",): 3}
    assert found["pomona_hosts"] == {("alive",): 2}


def test_the_epoch_is_the_one_in_force(bench):
    before = bench.scrape()["pomona_epoch"][()]
    bench.join(1, life="b")
    assert bench.scrape()["pomona_epoch"][()] == before + 1


def test_a_model_name_with_quotes_and_newlines_survives_the_text_format():
    cluster = Cluster('my "M"\\\n7', resolve(), Limits(8), lambda: 0.0)
    found = parse(metrics.exposition(metrics.registry(cluster.view)).decode())
    assert list(found["pomona_max_running_requests"]) == [('my "M"\\\n7',)]


async def test_the_exporter_serves_the_text_format_and_the_targets(bench):
    app = exporter.app(bench.view, lambda: [("head", "127.0.0.1:9400"), ("gateway", "127.0.0.1:8000")])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://head") as client:
        scrape = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        targets = await client.get("/sd/prometheus")
    assert scrape.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert parse(scrape.text).keys() == LABELS.keys()
    assert targets.json() == [
        {"targets": ["127.0.0.1:9400"], "labels": {"role": "head"}},
        {"targets": ["127.0.0.1:8000"], "labels": {"role": "gateway"}},
    ]
