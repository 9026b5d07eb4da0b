"""The prefix cache: longest shared prefix, least recently used first, never more than there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pomona.workers.engine.prefix_cache import MAX_ENTRIES, MIN_SHARED_TOKENS, PrefixCache, shared

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)


def filled(*sequences: tuple[int, ...]) -> PrefixCache[str]:
    cache: PrefixCache[str] = PrefixCache()
    for sequence in sequences:
        cache.add(sequence, str(sequence), 10_000)
    return cache


@given(tokens, tokens)
def test_shared_is_the_length_of_the_common_prefix(a, b):
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert shared(a, b) == count


@given(st.lists(tokens, max_size=12), tokens)
def test_a_prompt_gets_the_longest_kept_prefix_and_always_computes_its_last_token(sequences, prompt):
    found = filled(*sequences).longest(prompt)
    best = max((min(shared(s, prompt), len(prompt) - 1) for s in sequences), default=0)
    if best < MIN_SHARED_TOKENS:
        assert found is None
    else:
        state, length = found
        assert length == best
        assert state.startswith(str(prompt[:length])[:-1].rstrip(","))


@given(st.lists(st.tuples(tokens, st.integers(0, 120)), max_size=20))
def test_entries_never_hold_more_than_the_room_they_were_given(steps):
    cache: PrefixCache[None] = PrefixCache()
    for sequence, room in steps:
        cache.shrink(room)
        cache.add(sequence, None, room)
        assert cache.size <= room
        assert len(cache) <= MAX_ENTRIES


def test_a_sequence_that_continues_a_kept_one_replaces_it():
    cache = filled((1,) * 10, (1,) * 10 + (2,) * 5)
    assert (len(cache), cache.size) == (1, 15)


def test_a_sequence_that_a_kept_one_covers_is_not_kept_twice():
    cache = filled((1,) * 15, (1,) * 10)
    assert (len(cache), cache.size) == (1, 15)


def test_the_least_recently_used_goes_first():
    cache = filled((1,) * 10, (2,) * 10)
    assert cache.longest((1,) * 10 + (3,)) is not None
    cache.shrink(10)
    assert cache.longest((1,) * 10 + (3,)) is not None
    assert cache.longest((2,) * 10 + (3,)) is None
