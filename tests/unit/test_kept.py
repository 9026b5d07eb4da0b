"""What is kept of sequences: the same keys, values and state again, in memory of their own, within the step's room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pomona.workers.engine.base import Admitted, EngineRequest, StepPlan
from pomona.workers.engine.kept import SNAPSHOT_EVERY_TOKENS, Kept
from pomona.workers.engine.rows import leaves, planes
from pomona.workers.engine.segments import KvSegment, computed, is_state, restored, snapshot
from pomona.workers.engine.sequence import Sequence

HEADS, WIDTH, WINDOW = 2, 32, 24
Make = Callable[[], list[Any]]
CACHES: dict[str, Make] = {
    "plain": lambda: [KVCache()],
    "quantised": lambda: [QuantizedKVCache(group_size=32, bits=8)],
    "ring": lambda: [RotatingKVCache(WINDOW)],
    "hybrid": lambda: [CacheList(ArraysCache(2), KVCache()), RotatingKVCache(WINDOW)],
}


@pytest.fixture(params=CACHES)
def make(request: pytest.FixtureRequest) -> Make:
    return CACHES[request.param]


def layer(tokens: list[int]) -> Any:
    """[1, heads, tokens, width]: keys or values that depend on each token alone."""
    flat = mx.array([[(token * 37 + i * 11) % 97 / 97 - 0.5 for i in range(HEADS * WIDTH)] for token in tokens])
    return flat.reshape(1, len(tokens), HEADS, WIDTH).transpose(0, 2, 1, 3)


def compute(caches: list[Any], tokens: list[int]) -> list[Any]:
    """What a model does with the next tokens: returns what each attention layer puts out for them."""
    outputs = []
    for leaf in leaves(caches):
        if is_state(leaf):
            for i in range(len(leaf.cache)):
                before = leaf[i] if leaf[i] is not None else mx.zeros((1, 3))
                for token in tokens:
                    before = before * 0.5 + token
                leaf[i] = before + i
            continue
        mask = leaf.make_mask(len(tokens), return_array=len(tokens) > 1, window_size=None)
        keys, values = leaf.update_and_fetch(layer(tokens), layer([token + 1 for token in tokens]))
        outputs.append(scaled_dot_product_attention(layer(tokens), keys, values, leaf, 1.0, mask))
    mx.eval(outputs, [cache.state for cache in caches])
    return outputs


def equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        mx.allclose(a, b, rtol=1e-5, atol=1e-5).item() for a, b in zip(one, other, strict=True)
    )


def text(tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 13) % 101 for i in range(tokens)]


# -- segments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [1, 9, 14])
@pytest.mark.parametrize("capacity", [0, 100])
def test_restored_caches_go_on_as_if_they_had_computed_all_themselves(make: Make, used: int, capacity: int) -> None:
    """Two segments, of the second only a part; then a chunk and single tokens, past the end of the window."""
    tokens, caches = text(60), make()
    compute(caches, tokens[:10])
    first = computed(caches, 10)
    compute(caches, tokens[10:24])
    second = computed(caches, 14)
    assert first is not None
    assert second is not None
    alone = make()
    compute(alone, tokens[:10])
    compute(alone, tokens[10 : 10 + used])
    again = restored(make, [(first, 10), (second, used)], snapshot(alone), max(capacity, 10 + used))
    position = 10 + used
    for length in (5, 1, 1, 12, 1, 1, 1):
        chunk = tokens[position : position + length]
        assert equal(compute(again, chunk), compute(alone, chunk))
        position += length
    assert equal([a for cache in snapshot(again) for a in cache], [a for cache in snapshot(alone) for a in cache])


def test_without_anything_kept_the_caches_are_new(make: Make) -> None:
    assert equal(compute(restored(make, [], None, 50), text(7)), compute(make(), text(7)))


def test_the_last_tokens_are_what_the_caches_hold_of_them() -> None:
    caches = CACHES["plain"]()
    compute(caches, text(20))
    segment = computed(caches, 6)
    assert segment is not None
    assert segment.tokens == 6
    assert equal(segment.layers[0], [layer(text(20)[14:]), layer([token + 1 for token in text(20)[14:]])])


def test_tokens_that_a_window_has_lost_cannot_be_had() -> None:
    caches = CACHES["ring"]()
    for token in text(WINDOW + 5):
        compute(caches, [token])
    assert computed(caches, WINDOW) is not None
    assert computed(caches, WINDOW + 1) is None


def test_a_segment_splits_into_two_that_together_are_the_same(make: Make) -> None:
    caches = make()
    compute(caches, text(20))
    whole = computed(caches, 20)
    assert whole is not None
    head, tail = whole.split(7)
    assert (head.tokens, tail.tokens) == (7, 13)
    for i, planes_of_layer in enumerate(whole.layers):
        joined = [mx.concatenate(list(pair), axis=2) for pair in zip(head.layers[i], tail.layers[i], strict=True)]
        assert equal(joined, planes_of_layer)


def active_bytes() -> int:
    mx.clear_cache()
    return mx.get_active_memory()


def test_what_is_kept_of_a_large_array_does_not_keep_the_array() -> None:
    """Segments, halves of segments and snapshots have memory of their own."""
    before = active_bytes()
    caches = [CacheList(ArraysCache(1), KVCache())]
    caches[0][1].update_and_fetch(mx.zeros((1, 2, 4096, 64)), mx.zeros((1, 2, 4096, 64)))
    caches[0][0][0] = mx.zeros((1, 4096, 64))[:, -1:]
    mx.eval(caches[0].state)
    kept, state = computed(caches, 100), snapshot(caches)
    assert kept is not None
    mx.eval(kept.layers, state)
    del caches
    all_of_it = 2 * 4 * 2 * 100 * 64
    assert active_bytes() - before < 2 * all_of_it
    head = kept.split(10)[0]
    del kept
    assert active_bytes() - before < 0.3 * all_of_it
    assert head.tokens == 10


def test_a_snapshot_stays_as_it_was_when_its_sequence_goes_on() -> None:
    caches = CACHES["hybrid"]()
    compute(caches, text(5))
    state = snapshot(caches)
    said = [array.tolist() for array in state[0]]
    again = restored(CACHES["hybrid"], [], state, 10)
    compute(caches, text(5))
    compute(again, text(3))
    assert [array.tolist() for array in state[0]] == said


# -- kept ------------------------------------------------------------------------------------------------------------


class Keeper:
    """Kept, and prompts computed for it by chunks."""

    def __init__(self, make: Make) -> None:
        self.kept = Kept(make)

    def room(self, tokens: int, slots: int = 0, memory: int = 1 << 40) -> None:
        self.kept.begin_step(StepPlan(cache_tokens=tokens, cache_slots=slots), memory)

    def begin(self, tokens: list[int]) -> Sequence:
        request = EngineRequest("r", tuple(tokens))
        sequence = Sequence(Admitted(request, 10), eos=(), vocab_size=128)
        self.kept.begin(sequence)
        return sequence

    def chunk(self, sequence: Sequence, end: int) -> None:
        assert sequence.caches is not None
        compute(sequence.caches, sequence.tokens[sequence.position : end])
        sequence.position = end
        self.kept.keep_chunk(sequence)

    def prompt(self, tokens: list[int], *ends: int) -> Sequence:
        """A prompt computed in chunks that end there and at its end."""
        sequence = self.begin(tokens)
        for end in (*ends, len(tokens)):
            if end > sequence.position:
                self.chunk(sequence, end)
        return sequence


@pytest.mark.parametrize("name", ["plain", "quantised", "ring"])
def test_the_longest_beginning_that_is_kept_is_reused_but_for_the_last_token(name: str) -> None:
    keeper = Keeper(CACHES[name])
    keeper.room(1000)
    base = text(40)
    keeper.prompt(base, 15, 30)
    for tokens, reused in ((base, 39), ([*base, 5], 40), ([*base[:17], 99], 17), ([99, *base], 0), (base[:1], 0)):
        sequence = keeper.begin(tokens)
        assert (sequence.position, sequence.cached) == (reused, reused)
        alone = CACHES[name]()
        compute(alone, tokens)
        assert sequence.caches is not None
        compute(sequence.caches, tokens[reused:])
        assert equal(compute(sequence.caches, [7]), compute(alone, [7]))


def test_a_window_that_a_long_chunk_has_run_through_keeps_what_it_can_of_it() -> None:
    """A chunk longer than the window leaves all of its tokens in mlx-lm's cache: they are kept."""
    keeper = Keeper(CACHES["ring"])
    keeper.room(1000)
    keeper.prompt(text(3 * WINDOW))
    assert keeper.kept.tokens == 3 * WINDOW


def test_with_no_room_nothing_is_kept_and_what_was_goes() -> None:
    keeper = Keeper(CACHES["plain"])
    keeper.prompt(text(40))
    assert keeper.kept.tokens == 0
    keeper.room(100)
    keeper.prompt(text(40))
    assert keeper.kept.tokens == 40
    keeper.room(0)
    assert keeper.kept.tokens == 0


@pytest.mark.parametrize(("plan", "memory"), [(60, 1 << 40), (1 << 40, 60), (60, 60)])
def test_what_is_kept_never_exceeds_the_plan_nor_the_memory(plan: int, memory: int) -> None:
    keeper = Keeper(CACHES["plain"])
    for seed in range(9):
        keeper.room(plan, memory=memory)
        keeper.prompt([seed, *text(25, seed)], 10)
        assert 26 <= keeper.kept.tokens <= 60
    keeper.room(plan, memory=-5)
    assert keeper.kept.tokens == 0


def test_rows_that_ended_leave_their_room_to_what_is_kept() -> None:
    keeper = Keeper(CACHES["plain"])
    keeper.room(30)
    keeper.kept.freed(20)
    keeper.prompt(text(50))
    assert keeper.kept.tokens == 50
    keeper.room(30)
    assert 0 < keeper.kept.tokens <= 30


def test_caches_that_cannot_be_cut_are_not_kept() -> None:
    keeper = Keeper(lambda: [ConcatenateKVCache()])
    keeper.room(1000)
    sequence = keeper.begin(text(20))
    sequence.position = 20
    keeper.kept.keep_chunk(sequence)
    assert keeper.kept.tokens == 0


def test_state_is_reused_where_a_snapshot_is_and_a_prompt_that_shares_more_stops_there_for_the_next() -> None:
    keeper = Keeper(CACHES["hybrid"])
    keeper.room(1000, slots=8)
    base = text(60)
    keeper.prompt(base)
    assert keeper.kept.slots == 1
    assert keeper.begin([*base, 5]).cached == 60
    branch = [*base[:40], 99, 98]
    sequence = keeper.begin(branch)
    assert (sequence.cached, sequence.cuts) == (0, {40})
    keeper.prompt(branch, 40)
    assert keeper.begin([*base[:40], 97]).cached == 40
    assert keeper.begin([*base[:40], 99, 98, 97]).cached == 42


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    keeper = Keeper(CACHES["hybrid"])
    keeper.room(10_000, slots=8)
    chunk = SNAPSHOT_EVERY_TOKENS // 2
    tokens = [i % 101 for i in range(5 * chunk + 10)]
    keeper.prompt(tokens, *range(chunk, len(tokens), chunk))
    assert keeper.kept.slots == 3
    assert keeper.begin([*tokens[: 4 * chunk + 10], 99]).cached == 4 * chunk


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_no_more_snapshots_are_kept_than_there_are_slots(slots: int) -> None:
    keeper = Keeper(CACHES["hybrid"])
    for seed in range(6):
        keeper.room(1000, slots=slots)
        keeper.prompt([seed, *text(20, seed)])
        assert keeper.kept.slots == min(seed + 1, slots)
    keeper.room(1000, slots=0)
    assert (keeper.kept.slots, keeper.kept.tokens) == (0, 6 * 21)


def test_clearing_lets_go_of_the_memory_at_once() -> None:
    before = active_bytes()
    keeper = Keeper(CACHES["hybrid"])
    keeper.room(1000, slots=8)
    keeper.prompt(text(200), 50, 100)
    assert active_bytes() > before
    keeper.kept.clear()
    assert active_bytes() - before < 1000


def test_planes_are_of_each_attention_layer_in_the_models_order() -> None:
    caches = CACHES["hybrid"]()
    compute(caches, text(10))
    segment = computed(caches, 4)
    assert isinstance(segment, KvSegment)
    held = [planes(leaf) for leaf in leaves(caches) if not is_state(leaf)]
    assert [len(layer) for layer in segment.layers] == [len(layer) for layer in held] == [2, 2]
