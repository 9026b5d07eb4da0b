"""Placement: spread first, then the roomier host, and never a silent wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.cluster.placement import Host, bind_host, choose, unique_names
from pomona.workers.errors import OperatorError


def spread(hosts: Sequence[Host], replicas: int, *, need_bytes: int = 0) -> list[Host]:
    """Replicas placed one after the other, as `Replicas` does at its start."""
    ranks_on: Counter[str] = Counter()
    chosen = []
    for _ in range(replicas):
        host = choose(hosts, ranks_on, need_bytes=need_bytes)
        ranks_on[host.host_id] += 1
        chosen.append(host)
    return chosen


GIB = 2**30


def host(name: str, gib: float = 64, host_id: str = "", address: str = "") -> Host:
    return Host(host_id or f"id-{name}", name, address or f"10.0.0.{len(name)}", int(gib * GIB), 8)


FOUR = [host(f"mac{i}", address=f"10.0.0.{i}") for i in range(1, 5)]


def test_four_replicas_take_four_hosts_in_order_of_their_names():
    assert [h.name for h in spread(FOUR, 4)] == ["mac1", "mac2", "mac3", "mac4"]


def test_more_replicas_than_hosts_go_round_again():
    assert [h.name for h in spread(FOUR[:2], 5)] == ["mac1", "mac2", "mac1", "mac2", "mac1"]


def test_of_unequal_hosts_the_roomier_is_first_but_spread_comes_before_room():
    small, large = host("small", 32), host("large", 512)
    assert [h.name for h in spread([small, large], 4)] == ["large", "small", "large", "small"]


def test_tight_host_a_host_without_room_for_the_weights_gets_nothing():
    tight, roomy = host("tight", 130 / 1024), host("roomy", 64)
    assert {h.name for h in spread([tight, roomy], 5, need_bytes=8 * GIB)} == {"roomy"}


def test_ranks_of_one_host_share_its_memory():
    only = host("only", 20)
    assert len(spread([only], 2, need_bytes=10 * GIB)) == 2
    with pytest.raises(OperatorError, match=r"only has 6\.7 GiB"):
        spread([only], 3, need_bytes=10 * GIB)


def test_a_new_rank_goes_where_the_fewest_are():
    assert choose(FOUR, {"id-mac1": 1, "id-mac2": 2, "id-mac4": 1}).name == "mac3"


def test_placement_never_names_every_host_what_it_has_and_what_is_needed():
    hosts = [host("mac1", 16), host("mac2", 24)]
    with pytest.raises(OperatorError) as caught:
        choose(hosts, {"id-mac2": 1}, need_bytes=40 * GIB)
    text = str(caught.value)
    assert "needs 40.0 GiB" in text
    assert "mac1 has 16.0 GiB" in text
    assert "mac2 has 12.0 GiB" in text
    assert "--dp-size" in text


def test_no_live_host_is_an_error_with_its_fix():
    with pytest.raises(OperatorError, match="ray start"):
        choose([], {})


def test_unique_names_leaves_names_that_tell_hosts_apart():
    assert unique_names(FOUR) == FOUR


def test_unique_names_gives_repeated_names_the_start_of_their_ids():
    twins = [host("mac", host_id="aaaaaaaa11"), host("mac", host_id="bbbbbbbb22"), host("pro")]
    assert [h.name for h in unique_names(twins)] == ["mac#aaaaaa", "mac#bbbbbb", "pro"]
    assert [h.host_id for h in unique_names(twins)] == [h.host_id for h in twins]


def test_workers_of_a_cluster_of_one_machine_listen_on_loopback():
    assert bind_host(FOUR[0], FOUR[:1]) == "127.0.0.1"
    nodes_of_one_machine = [host("a", address="192.168.1.5"), host("b", address="192.168.1.5")]
    assert bind_host(nodes_of_one_machine[1], nodes_of_one_machine) == "127.0.0.1"


def test_workers_of_a_larger_cluster_listen_on_their_hosts_cluster_address():
    assert bind_host(FOUR[2], FOUR) == "10.0.0.3"


@given(st.integers(1, 9), st.integers(0, 40))
def test_equal_hosts_differ_by_at_most_one(count, replicas):
    hosts = [host(f"mac{i}", address=f"10.0.0.{i}") for i in range(count)]
    ranks = Counter(h.name for h in spread(hosts, replicas))
    taken = [ranks[h.name] for h in hosts]
    assert sum(taken) == replicas
    assert max(taken) - min(taken) <= 1


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 64))
def test_every_rank_has_room_for_the_weights_or_nothing_is_placed(memories, replicas, need):
    hosts = [host(f"mac{i}", gib) for i, gib in enumerate(memories)]
    fits = sum(gib // need for gib in memories)
    if fits < replicas:
        with pytest.raises(OperatorError):
            spread(hosts, replicas, need_bytes=need * GIB)
        return
    ranks = Counter(h.host_id for h in spread(hosts, replicas, need_bytes=need * GIB))
    assert all(h.memory_bytes >= ranks[h.host_id] * need * GIB for h in hosts)


@given(st.permutations(FOUR), st.integers(0, 9))
def test_the_order_in_which_hosts_are_listed_decides_nothing(hosts, replicas):
    assert spread(hosts, replicas) == spread(FOUR, replicas)
