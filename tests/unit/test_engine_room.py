"""Room at the engine: shares come and change, answers grow, and whoever makes room goes on where it was."""

import string

import pytest

from engines import ENDLESS, EOS, ids_of, started, text_of, was_told_to_leave
from pomona.workers.engine.base import Usage
from pomona.workers.errors import Unavailable

# Longer than what an answer starts with room for.
LONG = (string.ascii_letters * 6)[:300]


@pytest.mark.parametrize("epoch", [1, 4, 5])
def test_a_share_that_is_not_newer_is_refused(bench, epoch):
    b = bench().start(epoch=5, requests=2)
    b.share(epoch=epoch, requests=9)
    b.submit("a", max_tokens=1)
    b.open()
    b.wait_last("a")
    assert {load.epoch for load in b.loads} == {5}
    assert {load.requests.capacity for load in b.loads} == {2}


def test_a_newer_share_resizes_the_pools_and_keeps_what_runs(bench):
    b = bench().start(epoch=1, requests=2)
    b.submit("a", max_tokens=ENDLESS)
    b.submit("b", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    b.share(epoch=2, requests=1, kv_tokens=9_000, aux_slots=2)
    b.one_step()
    b.one_step()
    load = b.loads[-1]
    assert (load.epoch, load.running) == (2, 2)
    assert load.requests.capacity == load.requests.used == 2
    assert len(b.runners) == 1


def test_a_larger_share_lets_in_who_waits(bench):
    b = bench().start(epoch=1, requests=1)
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.submit("b", max_tokens=2)
    assert started(b.one_step()) == []
    b.share(epoch=2, requests=2)
    assert started(b.one_step()) == ["b"]


def test_a_smaller_share_sends_away_at_once_who_can_never_fit(bench):
    b = bench().start(epoch=1, requests=1, kv_tokens=100)
    running = b.submit("running", max_tokens=97)
    b.wait_plan(1)
    big, small = b.submit("big", max_tokens=90), b.submit("small", max_tokens=2)
    b.share(epoch=2, requests=1, kv_tokens=20)
    assert [type(delta.error) for delta in big] == [Unavailable]
    assert (b.loads[-1].running, b.loads[-1].waiting, b.loads[-1].counters.failed_requests) == (1, 1, 1)
    assert b.stepping
    b.open()
    b.wait_last("running", "small")
    assert (len(text_of(running)), text_of(small)) == (97, "xx")
    assert not any(plan.leave for plan in b.runners[0].plans)
    assert b.loads[-1].kv_tokens.capacity == 20


# -- answers that grow -----------------------------------------------------------------------------------------


def test_whoever_made_room_gives_its_client_one_uninterrupted_answer(bench):
    b = bench(scripts={"first": LONG, "second": LONG}, reused_tokens=1).start(kv_tokens=560)
    for request_id in ("first", "second"):
        b.submit(request_id, max_tokens=400)
    b.wait_plan(1)
    b.one_step()
    b.reused_tokens = 100  # what the second admission finds is not what the client was told of
    b.open()
    b.wait_last("first", "second")
    for deltas in b.answers.values():
        assert text_of(deltas) == LONG
        assert ids_of(deltas) == [*map(ord, LONG), EOS]
        assert deltas[-1].usage == Usage(3, 301, cached_tokens=1)
    once, resumed = (a for p in b.runners[0].plans for a in p.start if a.request.request_id == "second")
    assert was_told_to_leave(b, "second")
    assert (once.generated, resumed.generated) == ((), tuple(map(ord, LONG[: len(resumed.generated)])))
    assert resumed.generated
    counters = b.loads[-1].counters
    assert (counters.finished_requests, counters.failed_requests, counters.generation_tokens) == (2, 0, 602)
    assert counters.preempted_requests == 1


def test_whoever_made_room_waits_and_can_be_cancelled(bench):
    b = bench().start(kv_tokens=560)
    first, second = (b.submit(request_id, max_tokens=400) for request_id in ("first", "second"))
    b.wait_plan(1)
    while not was_told_to_leave(b, "second"):
        b.one_step()
    b.one_step()
    assert len(ids_of(second)) > 200
    assert (b.loads[-1].running, b.loads[-1].waiting) == (1, 1)
    b.cancel("second")
    assert (b.loads[-1].running, b.loads[-1].waiting) == (1, 0)
    b.open()
    b.wait_last("first")
    assert len(ids_of(first)) == 400


def test_a_smaller_share_that_still_holds_each_of_them_lets_both_end_one_after_the_other(bench):
    b = bench(scripts={"first": LONG, "second": LONG}).start(kv_tokens=2_000)
    for request_id in ("first", "second"):
        b.submit(request_id, max_tokens=400)
    b.wait_plan(1)
    b.one_step()
    b.share(epoch=2, kv_tokens=450)
    b.open()
    b.wait_last("first", "second")
    assert [text_of(deltas) for deltas in b.answers.values()] == [LONG, LONG]
    assert b.loads[-1].kv_tokens.capacity == 450


def test_a_smaller_share_that_cannot_hold_a_running_answer_ends_that_one_alone(bench):
    b = bench(scripts={"small": LONG}).start(kv_tokens=2_000)
    small, big = b.submit("small", max_tokens=400), b.submit("big", max_tokens=1_000)
    b.wait_plan(1)
    b.one_step()
    b.share(epoch=2, kv_tokens=450)
    b.open()
    b.wait_last("small", "big")
    assert text_of(small) == LONG
    assert "share became too small" in str(big[-1].error)
    counters = b.loads[-1].counters
    assert (counters.finished_requests, counters.failed_requests, len(b.runners)) == (1, 1, 1)


# -- what is kept ----------------------------------------------------------------------------------------------


def test_what_the_runner_keeps_is_evictable_and_gives_way_to_who_comes(bench):
    b = bench(kept_tokens=1_000).start(kv_tokens=500, requests=1)
    b.open()
    b.submit("a", prompt=3, max_tokens=10)
    b.wait_last("a")
    kept = b.loads[-1].kv_tokens
    assert (kept.used, kept.evictable, kept.free) == (0, 487, 13)
    b.submit("b", prompt=3, max_tokens=97)
    b.wait_last("b")
    (plan,) = (plan for plan in b.runners[0].plans if started(plan) == ["b"])
    assert plan.cache_tokens == 400
