"""The plan as one value: what `plan`, `status` and pages print."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.cluster.capacity import Limits, OwnerMemory, divide
from pomona.cluster.membership import Memory
from pomona.cluster.plan import assemble, foresee
from pomona.cluster.topology import resolve
from pomona.workers.errors import CapacityError

ROOMY = Memory(kv_tokens=100_000, kv_bytes_per_token=512, weights_bytes=7, reserve_bytes=5, budget_bytes=10**9)
HYBRID = Memory(kv_tokens=100_000, hybrid=True, aux_slots=400, aux_bytes_per_slot=4096)
DP_ATTENTION = resolve(tp_size=4, dp_size=4, enable_dp_attention=True)


def column(plan: object, key: str) -> list[object]:
    return [owner[key] for owner in plan.to_json()["owners"]]  # type: ignore[attr-defined]


def test_pure_dp_of_four_replicas_gives_four_owners_the_full_limit():
    plan = foresee("M", resolve(dp_size=4), Limits(8), ROOMY)
    assert column(plan, "max_running_requests") == [8, 8, 8, 8]
    assert column(plan, "replica") == [0, 1, 2, 3]
    assert column(plan, "owner") == [0, 0, 0, 0]
    assert plan.to_json()["attn_dp_size"] == 1
    assert plan.to_json()["replicas"] == 4
    assert plan.unallocated == 0


def test_dp_attention_splits_the_limit_among_four_owners_of_one_replica():
    plan = foresee("M", DP_ATTENTION, Limits(8), ROOMY)
    assert column(plan, "max_running_requests") == [2, 2, 2, 2]
    assert column(plan, "replica") == [0, 0, 0, 0]
    assert column(plan, "owner") == [0, 1, 2, 3]
    assert plan.to_json()["attn_dp_size"] == 4
    assert plan.to_json()["replicas"] == 1
    assert plan.warnings == ()


def test_the_json_has_the_keys_that_are_promised_and_is_json():
    plan = json.loads(json.dumps(foresee("M", DP_ATTENTION, Limits(8, 32, hybrid=True), HYBRID).to_json()))
    promised = {
        "model", "epoch", "tp_size", "dp_size", "pp_size", "enable_dp_attention", "attn_dp_size", "attn_tp_size",
        "replicas", "ranks_per_replica", "hybrid", "context_tokens", "max_running_requests", "max_mamba_cache_size",
        "aux_slots_per_request", "unallocated_running_requests", "owners", "warnings",
    }  # fmt: skip
    assert promised <= plan.keys()
    of_an_owner = {"replica", "owner", "host", "max_running_requests", "aux_slots", "kv_tokens", "bound", "why"}
    for owner in plan["owners"]:
        assert of_an_owner <= owner.keys()
        assert owner["bound"] in ("requested", "kv", "aux")
    assert plan["max_running_requests"] == 8
    assert plan["max_mamba_cache_size"] == 32


def test_memory_is_shown_as_the_bytes_that_shares_take():
    plan = foresee("M", DP_ATTENTION, Limits(8, 16, hybrid=True), HYBRID)
    memory = plan.to_json()["owners"][0]["memory"]
    assert memory["aux_bytes"] == 4 * 4096
    dense = foresee("M", resolve(), Limits(), ROOMY).to_json()["owners"][0]["memory"]
    assert dense["kv_bytes"] == 100_000 * 512
    assert dense["aux_bytes"] == 0


def test_a_hybrid_bound_by_its_slots_says_so_and_leaves_the_rest_unallocated():
    plan = foresee("M", DP_ATTENTION, Limits(8, 16, hybrid=True), HYBRID)
    assert column(plan, "max_running_requests") == [1, 1, 1, 1]
    assert column(plan, "aux_slots") == [4, 4, 4, 4]
    assert column(plan, "bound") == ["aux"] * 4
    assert plan.to_json()["unallocated_running_requests"] == 4


def test_reductions_become_warnings_from_and_to_with_the_binding_limit():
    plan = foresee("M", DP_ATTENTION, Limits(8, 16, hybrid=True), HYBRID)
    assert len(plan.warnings) == 4
    for owner, line in enumerate(plan.warnings):
        assert f"replica 0, attention-DP owner {owner}" in line
        assert "reduced from 2 to 1 by aux" in line


def test_kv_that_binds_is_a_warning_of_its_replica():
    plan = foresee("M", resolve(dp_size=2), Limits(8), Memory(kv_tokens=10))
    assert column(plan, "bound") == ["kv", "kv"]
    assert [line.partition(":")[0] for line in plan.warnings] == [
        "replica 0, attention-DP owner 0",
        "replica 1, attention-DP owner 0",
    ]
    assert all("from 8 to 5 by kv" in line for line in plan.warnings)


def test_the_topologys_own_warnings_come_first():
    plan = foresee("M", resolve(enable_dp_attention=True), Limits(8), Memory(kv_tokens=10))
    assert "--enable-dp-attention does nothing" in plan.warnings[0]
    assert len(plan.warnings) == 2


def test_an_explicit_slot_limit_is_not_lowered_by_what_memory_holds_beside_it():
    plan = foresee("M", resolve(), Limits(None, 40, hybrid=True), Memory(kv_tokens=1000, hybrid=True, aux_slots=4))
    assert column(plan, "max_running_requests") == [10]
    assert column(plan, "aux_slots") == [40]


def test_a_dense_model_ignores_the_slot_limit_and_shows_no_slots():
    plan = foresee("M", resolve(), Limits(8, 1), ROOMY)
    assert column(plan, "aux_slots") == [0]
    assert plan.to_json()["aux_slots_per_request"] == 0


def test_an_owner_that_would_get_nothing_is_refused_in_units_of_the_command_line():
    with pytest.raises(CapacityError) as caught:
        foresee("M", DP_ATTENTION, Limits(8, 15, hybrid=True), HYBRID)
    assert caught.value.at_least == 16


def test_hosts_and_unequal_memory_stay_with_their_owner():
    memories = [Memory(kv_tokens=1000, context_tokens=64), Memory(kv_tokens=4, context_tokens=64)]
    limits = Limits(8)
    capacity = divide(limits, [OwnerMemory(m.kv_tokens) for m in memories])
    topology = resolve(tp_size=2, dp_size=2, enable_dp_attention=True)
    plan = assemble("M", topology, limits, {0: (capacity, memories, ["mac1", "mac2"])}, epoch=7)
    assert column(plan, "host") == ["mac1", "mac2"]
    assert column(plan, "kv_tokens") == [1000, 4]
    assert column(plan, "max_running_requests") == [6, 2]
    assert plan.epoch == 7
    assert plan.context_tokens == 64


def test_a_plan_without_whole_replicas_has_no_owners_and_nothing_unallocated():
    plan = assemble("M", DP_ATTENTION, Limits(8), {})
    assert plan.owners == ()
    assert plan.to_json()["unallocated_running_requests"] == 0


@st.composite
def replica(draw):
    owners = draw(st.integers(1, 6))
    memories = draw(st.lists(st.integers(2, 200), min_size=owners, max_size=owners))
    requests = draw(st.integers(owners, 300))
    aux = draw(st.one_of(st.none(), st.integers(4 * owners, 400)))
    return Limits(requests, aux, hybrid=draw(st.booleans())), [Memory(kv_tokens=t) for t in memories]


@given(replica())
def test_what_owners_admit_and_what_is_unallocated_make_up_the_limit(given_):
    limits, memories = given_
    owners = len(memories)
    topology = resolve(tp_size=owners, dp_size=owners, enable_dp_attention=owners > 1)
    capacity = divide(limits, [OwnerMemory(m.kv_tokens) for m in memories])
    plan = assemble("M", topology, limits, {0: (capacity, memories, [None] * owners)}).to_json()
    admitted = sum(owner["max_running_requests"] for owner in plan["owners"])
    assert admitted + plan["unallocated_running_requests"] == limits.max_running_requests
    if limits.aux_limit is not None:
        assert sum(owner["aux_slots"] for owner in plan["owners"]) == limits.aux_limit
    less = [o for o in plan["owners"] if o["max_running_requests"] < o["wanted_running_requests"]]
    assert len(plan["warnings"]) == len(less)


@given(st.integers(1, 6), st.integers(1, 100), st.integers(2, 100))
def test_pure_dp_gives_every_replica_the_same_and_the_sum_is_that_of_all_limits(replicas, requests, kv_tokens):
    plan = foresee("M", resolve(dp_size=replicas), Limits(requests), Memory(kv_tokens=kv_tokens))
    assert {o.share.max_running_requests for o in plan.owners} == {min(requests, kv_tokens // 2)}
    assert len(plan.owners) == replicas
    assert sum(o.share.max_running_requests for o in plan.owners) + plan.unallocated == replicas * requests
