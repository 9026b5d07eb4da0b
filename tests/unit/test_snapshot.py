"""The engine's snapshot shows its memory, and how often somebody had to make room."""

from engines import was_told_to_leave


def test_a_snapshot_tells_memory_in_use_from_what_mlx_keeps_and_from_the_limit(bench):
    load = bench().start().loads[-1]
    assert (load.active_bytes, load.cache_bytes, load.limit_bytes) == (10, 5, 100)


def test_a_snapshot_counts_the_requests_that_had_to_make_room(bench):
    """Since the start: whoever goes on afterwards takes nothing back."""
    b = bench().start(kv_tokens=560)
    for request_id in ("first", "second"):
        b.submit(request_id, max_tokens=400)
    b.wait_plan(1)
    assert b.loads[-1].counters.preempted_requests == 0
    while not was_told_to_leave(b, "second"):
        b.one_step()
    b.open()
    b.wait_last("first", "second")
    counters = b.loads[-1].counters
    assert (counters.preempted_requests, counters.finished_requests) == (1, 2)
