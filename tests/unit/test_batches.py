"""What a batch allocates: room for those that come too, where it fits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from owner import VOCAB, model_of
from pomona.workers.engine.base import Admitted, EngineRequest
from pomona.workers.engine.batch import Size
from pomona.workers.engine.batches import Batches
from pomona.workers.engine.sequence import Sequence
from pomona.workers.engine.split import StepCost
from pomona.workers.models.caches import maker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_of("llama", tmp_path_factory.mktemp("models"))


def sequence(model: Any, tokens: int, name: str = "a") -> tuple[Sequence, list[Any]]:
    """One whose prompt is whole, and its caches."""
    whole = Sequence(Admitted(EngineRequest(name, (1,) * tokens, 9), 9, ()), eos=(), vocab_size=VOCAB)
    caches = maker(model)()
    model(mx.array([whole.tokens]), cache=caches)
    whole.position = tokens
    whole.tokens.append(5)
    return whole, caches


def sizes(model: Any, coming: tuple[int, ...], most_cells: int, tokens: int = 40) -> list[Size]:
    batches = Batches(model, maker(model)(), StepCost(), most_cells, lambda: coming)
    batches.add(*sequence(model, tokens))
    return [batch.size for batch in batches]


def test_there_is_room_for_prompts_that_are_on_their_way(model: Any) -> None:
    assert sizes(model, (), 10_000) == [Size(2, 169)]
    assert sizes(model, (40, 30, 50), 10_000) == [Size(6, 169)]


def test_much_shorter_prompts_may_go_elsewhere(model: Any) -> None:
    assert sizes(model, (5, 20, 40), 10_000) == [Size(3, 169)]


def test_where_memory_is_short_nobody_else_has_room(model: Any) -> None:
    assert sizes(model, (40,) * 10, 6 * 169) == [Size(2, 169)]
    assert sizes(model, (40,) * 10, 100) == [Size(1, 49)]


def test_a_burst_is_placed_without_growing_the_batch(model: Any) -> None:
    burst = [sequence(model, 40 + i, str(i)) for i in range(8)]
    waiting = [whole.position for whole, _ in burst]
    batches = Batches(model, maker(model)(), StepCost(), 10_000, lambda: waiting)
    seen = set()
    for whole, caches in burst:
        waiting.pop(0)
        batches.add(whole, caches)
        seen.update(batch.size for batch in batches)
    assert seen == {Size(12, 169)}
