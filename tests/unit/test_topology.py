"""Topology: sizes, ranks and the rules that refuse them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.cluster.topology import Topology, check_model, resolve
from pomona.workers.errors import OperatorError

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}


def test_pure_dp_has_one_owner_a_replica():
    topology = resolve(dp_size=4)
    assert (topology.attn_dp_size, topology.attn_tp_size, topology.replicas, topology.ranks) == (1, 1, 4, 4)


def test_dp_attention_lies_inside_tp():
    topology = resolve(tp_size=8, dp_size=4, enable_dp_attention=True)
    assert (topology.attn_dp_size, topology.attn_tp_size, topology.replicas, topology.ranks) == (4, 2, 1, 8)
    assert [topology.attn_ranks(r) for r in range(8)] == [(r // 2, r % 2) for r in range(8)]


def test_dp_attention_with_one_owner_is_a_warning_and_off():
    topology = resolve(tp_size=2, dp_size=1, enable_dp_attention=True)
    assert not topology.enable_dp_attention
    assert "--enable-dp-attention" in topology.warnings[0]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 0}, ["--tp-size 0", "positive", "--tp-size 1"]),
        ({"dp_size": -2}, ["--dp-size -2", "positive"]),
        ({"pp_size": 0}, ["--pp-size 0"]),
        (
            {"tp_size": 6, "dp_size": 4, "enable_dp_attention": True},
            ["--tp-size 6", "--dp-size 4", "tp_size % dp_size", "--tp-size 8", "--dp-size 3"],
        ),
    ],
)
def test_an_impossible_size_names_flag_value_rule_and_fix(sizes, words):
    with pytest.raises(OperatorError) as caught:
        resolve(**sizes)
    assert all(word in str(caught.value) for word in words)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_every_accepted_topology_accounts_for_every_rank(tp, dp, pp, attention):
    try:
        t = resolve(tp_size=tp, dp_size=dp, pp_size=pp, enable_dp_attention=attention)
    except OperatorError:
        assert attention
        assert tp % dp
        return
    assert t.attn_dp_size * t.attn_tp_size == t.tp_size
    assert t.ranks == t.replicas * t.ranks_per_replica
    assert sorted({t.attn_ranks(r) for r in range(tp)}) == [
        (o, a) for o in range(t.attn_dp_size) for a in range(t.attn_tp_size)
    ]


@pytest.mark.parametrize(
    ("topology", "config", "words"),
    [
        (Topology(tp_size=2), SMOLLM2, ["9 attention heads", "--tp-size 1", "--enable-dp-attention --dp-size 2"]),
        (Topology(tp_size=4, dp_size=2, enable_dp_attention=True), SMOLLM2, ["attn_tp_size 2", "--dp-size 4"]),
        (Topology(tp_size=5, dp_size=5, enable_dp_attention=True), SMOLLM2, ["1536 MLP width", "--tp-size 4"]),
        (
            Topology(tp_size=2, dp_size=2, enable_dp_attention=True),
            {"intermediate_size": 96, "quantization": {"group_size": 32}},
            ["quantisation groups of 32", "--tp-size 1"],
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_its_shape(topology, config, words):
    with pytest.raises(OperatorError) as caught:
        check_model(topology, config)
    assert all(word in str(caught.value) for word in words)


def test_smollm2_divides_under_dp_attention_over_two_ranks():
    check_model(Topology(tp_size=2, dp_size=2, enable_dp_attention=True), SMOLLM2)
