"""The prefix cache: shared beginnings held once, the least recently used first to go, never more than the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pomona.workers.engine.prefix_cache import MIN_KEPT_TOKENS, Match, PrefixCache, Snapshot
from pomona.workers.engine.radix import shared

Tokens = tuple[int, ...]
few_tokens = st.lists(st.integers(0, 2), max_size=24).map(tuple)


@dataclass(frozen=True)
class Run:
    """A segment that knows what it is: a (position, token) for each token."""

    held: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return len(self.held)

    def split(self, at: int) -> tuple[Run, Run]:
        assert 0 < at < len(self.held)
        return Run(self.held[:at]), Run(self.held[at:])


Cache = PrefixCache[Run, Tokens]


def run(tokens: Iterable[int], start: int = 0) -> Run:
    return Run(tuple(enumerate(tokens))[start:])


def insert(cache: Cache, tokens: Tokens) -> int | None:
    """Hold `tokens`; how many were held before, None where the cache did not ask."""
    asked: list[int] = []

    def segment_from(start: int) -> Run:
        asked.append(start)
        return run(tokens, start)

    assert cache.insert(tokens, segment_from)
    assert len(asked) <= 1
    return asked[0] if asked else None


def filled(*sequences: Tokens) -> Cache:
    cache = Cache()
    for tokens in sequences:
        insert(cache, tokens)
    return cache


def held(cache: Cache, tokens: Tokens) -> int:
    return cache.match(tokens, len(tokens)).length


def spelled(match: Match[Run, Tokens]) -> Run:
    return Run(tuple(pair for part in match.parts for pair in part.segment.held[: part.used_tokens]))


def ones(count: int) -> Tokens:
    return (1,) * count


# What is shared


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 5), st.integers(0, 5))
def test_shared_is_the_length_of_the_common_prefix(same, start, run_rest, tokens_rest):
    common = tuple(range(same))
    assert shared(common + (-1,) * run_rest, (7,) * start + common + (-2,) * tokens_rest, start) == same


# Matches


def test_an_empty_cache_matches_nothing():
    assert Cache().match((1, 2, 3), 3) == Match(0, (), None)


@pytest.mark.parametrize("limit", [-1, 0, 2, 4])
def test_a_match_goes_no_further_than_its_limit(limit):
    match = filled((1, 2, 3)).match((1, 2, 3), limit)
    assert spelled(match) == run((1, 2, 3)[: match.length])
    assert match.length == min(max(limit, 0), 3)


def test_a_match_ends_where_the_sequences_part():
    match = filled((1, 2, 3, 4)).match((1, 2, 9, 9), 4)
    assert (match.length, spelled(match)) == (2, run((1, 2)))


def test_a_match_splits_nothing():
    cache = filled((1, 2, 3, 4))
    cache.match((1, 2, 9), 3)
    assert [part.segment for part in cache.match((1, 2, 3, 4), 4).parts] == [run((1, 2, 3, 4))]


def test_a_match_runs_through_the_turns_of_a_chat():
    turns = ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5))
    match = filled(*turns).match((*turns[-1], 6), 6)
    assert ([part.used_tokens for part in match.parts], spelled(match)) == ([2, 2, 1], run(turns[-1]))


def test_a_match_outlives_what_the_cache_lets_go():
    cache = filled((1, 2, 3, 4))
    match = cache.match((1, 2, 3, 4), 4)
    cache.clear()
    assert spelled(match) == run((1, 2, 3, 4))


# Inserts


def test_only_what_is_missing_is_asked_for():
    cache = filled((1, 2, 3, 4))
    assert insert(cache, (1, 2, 8, 9)) == 2
    assert insert(cache, (1, 2, 3, 4, 5)) == 4
    assert insert(cache, (7,)) == 0
    assert cache.size == 8


@pytest.mark.parametrize("tokens", [(1, 2, 3), (1, 2), ()])
def test_what_is_held_is_not_asked_for(tokens):
    cache = filled((1, 2, 3))
    assert insert(cache, tokens) is None
    assert cache.size == 3


def test_a_segment_that_cannot_be_had_adds_nothing():
    cache = filled((1, 2, 3))
    assert not cache.insert((1, 2, 9), lambda start: None)
    assert len(cache.match((1, 2, 3), 3).parts) == 1
    assert cache.size == 3


def test_a_segment_of_the_wrong_length_is_refused_and_changes_nothing():
    cache = filled((1, 2, 3))
    with pytest.raises(ValueError, match="a segment of 1 tokens cannot be tokens 2 to 4"):
        cache.insert((1, 2, 8, 9), lambda start: run((8,)))
    cache.check_invariants()
    assert cache.size == 3


# Snapshots


def test_the_deepest_snapshot_within_the_match_is_found():
    cache = filled(tuple(range(8)))
    for position in (2, 4, 6):
        assert cache.attach(tuple(range(position)), tuple(range(position)))
    assert cache.match(tuple(range(8)), 8).snapshot == Snapshot(6, tuple(range(6)))
    assert cache.match(tuple(range(8)), 5).snapshot == Snapshot(4, tuple(range(4)))
    assert cache.match((0, 1, 2, 3, 9), 5).snapshot == Snapshot(4, tuple(range(4)))
    assert cache.match((0, 1, 9), 3).snapshot == Snapshot(2, (0, 1))
    assert cache.match((0, 9), 2).snapshot is None


@pytest.mark.parametrize("tokens", [(), (1, 2, 9), (1, 2, 3, 4), (7,)])
def test_a_snapshot_needs_its_tokens_held(tokens):
    cache = filled((1, 2, 3))
    assert not cache.attach(tokens, tokens)
    assert cache.slots == 0


def test_the_first_snapshot_of_a_position_stays():
    cache: PrefixCache[Run, str] = PrefixCache()
    cache.insert((1, 2), lambda start: run((1, 2)))
    assert cache.attach((1, 2), "first")
    assert not cache.attach((1, 2), "second")
    assert cache.match((1, 2), 2).snapshot == Snapshot(2, "first")
    assert cache.slots == 1


# What goes, and in which order


def test_the_least_recently_used_goes_first():
    cache = filled((1,) * 10, (2,) * 10, (3,) * 10)
    assert held(cache, (1,) * 10) == 10
    cache.shrink(20, 0)
    assert [held(cache, (token,) * 10) for token in (1, 2, 3)] == [10, 0, 10]


def test_a_shared_beginning_outlives_its_continuations():
    beginning = tuple(range(20))
    cache = filled((*beginning, 100), (*beginning, 200))
    cache.shrink(20, 0)
    assert held(cache, beginning) == 20


def test_a_split_keeps_the_age_of_what_was_not_used():
    cache = filled((1, 1, 1, 1), (2, 2))
    insert(cache, (1, 1, 5))  # the rest of the first is now the oldest
    cache.shrink(5, 0)
    assert held(cache, (1, 1, 1, 1)) == 2
    assert held(cache, (2, 2)) == 2
    assert held(cache, (1, 1, 5)) == 3


def test_a_long_leaf_is_cut_by_exactly_what_has_to_go():
    cache = filled(ones(100))
    cache.attach(ones(100), ones(100))
    cache.shrink(60, 1)
    assert spelled(cache.match(ones(100), 100)) == run(ones(60))
    assert (cache.size, cache.slots) == (60, 0)


@pytest.mark.parametrize(("room", "left"), [(MIN_KEPT_TOKENS, MIN_KEPT_TOKENS), (MIN_KEPT_TOKENS - 1, 0)])
def test_a_tiny_rest_is_not_kept(room, left):
    cache = filled(ones(100))
    cache.shrink(room, 0)
    assert cache.size == left


def test_kv_takes_its_snapshot_along_before_others_are_let_go():
    cache = filled((1, 1), (2, 2))
    cache.attach((2, 2), (2, 2))
    cache.attach((1, 1), (1, 1))  # the snapshot of the twos is the older one, and their KV is too
    cache.shrink(2, 1)
    assert cache.match((1, 1), 2).snapshot == Snapshot(2, (1, 1))


def test_the_least_recently_used_snapshot_goes_first_and_its_kv_stays():
    cache = filled((1, 2, 3, 4))
    cache.attach((1, 2), (1, 2))
    cache.attach((1, 2, 3, 4), (1, 2, 3, 4))
    assert cache.match((1, 2, 9), 3).snapshot == Snapshot(2, (1, 2))
    cache.shrink(4, 1)
    assert cache.match((1, 2, 3, 4), 4).snapshot == Snapshot(2, (1, 2))
    assert cache.size == 4


def test_attaching_again_is_a_use_of_the_snapshot_that_is_there():
    cache = filled((1, 1), (2, 2))
    for tokens in ((1, 1), (2, 2), (1, 1)):
        cache.attach(tokens, tokens)
    cache.shrink(4, 1)
    assert cache.match((1, 1), 2).snapshot == Snapshot(2, (1, 1))


def test_clear_leaves_nothing():
    cache = filled((1, 2, 3), (1, 2, 4), (5,))
    cache.attach((1, 2), (1, 2))
    cache.clear()
    cache.check_invariants()
    assert (cache.size, cache.slots, held(cache, (1, 2, 3))) == (0, 0, 0)


# Against a naive model


class NaiveCache:
    """Every held prefix on its own, with the time of its last use; runs lie between the prefixes in `ends`."""

    def __init__(self) -> None:
        self.now = 0
        self.used: dict[Tokens, int] = {}
        self.ends: set[Tokens] = set()
        self.snapshots: dict[Tokens, int] = {}

    def length(self, tokens: Tokens) -> int:
        return next(n for n in range(len(tokens), -1, -1) if n == 0 or tokens[:n] in self.used)

    def use(self, tokens: Tokens) -> None:
        """Whole runs are used, also where only the beginning of the last is wanted."""
        self.now += 1
        while tokens and tokens not in self.ends:
            (tokens,) = (p for p in self.used if p[:-1] == tokens)
        self.used.update({tokens[:n]: self.now for n in range(1, len(tokens) + 1)})

    def insert(self, tokens: Tokens) -> None:
        start = self.length(tokens)
        if start < len(tokens):
            self.ends |= {tokens[:start], tokens} - {()}
            self.used.update({tokens[:n]: 0 for n in range(start + 1, len(tokens) + 1)})
        self.use(tokens)

    def attach(self, tokens: Tokens) -> bool:
        if not tokens or tokens not in self.used:
            return False
        self.ends.add(tokens)
        self.use(tokens)
        new = tokens not in self.snapshots
        self.snapshots[tokens] = self.now
        return new

    def match(self, tokens: Tokens) -> tuple[int, Snapshot[Tokens] | None]:
        length = self.length(tokens)
        self.use(tokens[:length])
        deepest = max((p for p in self.snapshots if p == tokens[: len(p)]), key=len, default=None)
        if deepest is None:
            return length, None
        self.snapshots[deepest] = self.now
        return length, Snapshot(len(deepest), deepest)

    def shrink(self, tokens: int, slots: int) -> None:
        while len(self.used) > tokens:
            self._free(len(self.used) - tokens)
        while len(self.snapshots) > slots:
            del self.snapshots[min(self.snapshots, key=self.snapshots.__getitem__)]

    def _free(self, excess: int) -> None:
        parents = {p[:-1] for p in self.used}
        leaf = min((end for end in self.ends if end not in parents), key=self.used.__getitem__)
        start = next(n for n in range(len(leaf) - 1, -1, -1) if n == 0 or leaf[:n] in self.ends)
        keep = len(leaf) - start - excess
        end = start + keep if keep >= MIN_KEPT_TOKENS else start
        for n in range(end + 1, len(leaf) + 1):
            del self.used[leaf[:n]]
            self.snapshots.pop(leaf[:n], None)
        self.ends.discard(leaf)
        if end > start:
            self.ends.add(leaf[:end])


class CacheMachine(RuleBasedStateMachine):
    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.naive = NaiveCache()

    @rule(target=known, tokens=few_tokens)
    def something_new(self, tokens: Tokens) -> Tokens:
        return tokens

    @rule(target=known, tokens=known, keep=st.integers(0, 24), more=few_tokens)
    def something_that_begins_alike(self, tokens: Tokens, keep: int, more: Tokens) -> Tokens:
        return tokens[:keep] + more

    @rule(tokens=known)
    def insert(self, tokens: Tokens) -> None:
        start = self.naive.length(tokens)
        assert insert(self.cache, tokens) == (start if start < len(tokens) else None)
        self.naive.insert(tokens)

    @rule(tokens=known)
    def insert_what_cannot_be_had(self, tokens: Tokens) -> None:
        length = self.naive.length(tokens)
        assert self.cache.insert(tokens, lambda start: None) == (length == len(tokens))
        self.naive.use(tokens[:length])

    @rule(tokens=known, end=st.integers(0, 48))
    def attach(self, tokens: Tokens, end: int) -> None:
        assert self.cache.attach(tokens[:end], tokens[:end]) == self.naive.attach(tokens[:end])

    @rule(tokens=known, limit=st.integers(0, 48))
    def match(self, tokens: Tokens, limit: int) -> None:
        match = self.cache.match(tokens, limit)
        assert (match.length, match.snapshot) == self.naive.match(tokens[:limit])
        assert spelled(match) == run(tokens[: match.length])

    @rule(tokens=st.integers(0, 120), slots=st.integers(0, 4))
    def shrink(self, tokens: int, slots: int) -> None:
        self.cache.shrink(tokens, slots)
        self.naive.shrink(tokens, slots)
        assert self.cache.size <= tokens
        assert self.cache.slots <= slots

    @rule(tokens=known, room=st.integers(0, 120))
    def shrink_after_a_use(self, tokens: Tokens, room: int) -> None:
        """The path used last survives where it fits."""
        self.insert(tokens)
        self.cache.attach(tokens, tokens)
        self.naive.attach(tokens)
        self.shrink(max(room, len(tokens)), 1)
        if tokens:
            assert self.cache.match(tokens, len(tokens)).snapshot == Snapshot(len(tokens), tokens)
            self.naive.match(tokens)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.naive.shrink(0, 0)

    @invariant()
    def both_hold_the_same_amount(self) -> None:
        self.cache.check_invariants()
        assert self.cache.size == len(self.naive.used)
        assert self.cache.slots == len(self.naive.snapshots)

    def teardown(self) -> None:
        for end in self.naive.ends:
            assert spelled(self.cache.match(end, len(end))) == run(end)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheAgainstTheNaiveModel = CacheMachine.TestCase
