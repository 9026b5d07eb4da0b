"""Several prompts in one pass: who goes with whom, that everybody gets what it gets alone, and who fails with whom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from owner import VOCAB, Owner, bytes_a_token, model_of
from pomona.workers.engine import joint
from pomona.workers.engine.base import EngineRequest, Sampling
from pomona.workers.engine.joint import Layout
from pomona.workers.engine.prefill import MOST_PADDING, PASS_TOKENS, SHORT_TOKENS, passes
from pomona.workers.models.caches import maker

JOINT = ("llama", "qwen3_moe")
ALONE = ("gemma3_text", "qwen3_next", "lfm2", "mamba2", "falcon_h1", "granitemoehybrid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(tokens)]


# -- who goes with whom ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 600), max_size=40))
def test_every_chunk_is_in_one_pass_and_no_pass_is_mostly_padding(lengths: list[int]) -> None:
    groups = passes(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        padded = longest * len(group)
        assert len(group) == 1 or (longest <= SHORT_TOKENS and padded <= PASS_TOKENS)
        assert padded - sum(lengths[i] for i in group) <= MOST_PADDING * padded


def test_alike_prompts_share_a_pass_and_others_do_not() -> None:
    assert passes([60, 300, 60, 58, 10]) == [[1], [0, 2, 3], [4]]
    assert passes([100] * 7) == [[0, 1, 2, 3, 4], [5, 6]]
    assert passes([]) == []


# -- what each gets -------------------------------------------------------------------------------------------


@given(st.data())
def test_a_token_sees_what_is_before_it_in_its_own_row(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    before = data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
    counts = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    window = data.draw(st.none() | st.integers(1, 8))
    layout = Layout(before, counts)
    mask: Any = layout.mask(window).tolist()
    for row, (held, count) in enumerate(zip(before, counts, strict=True)):
        first = layout.columns - held - count
        for token in range(count):
            seen = [c - first for c, yes in enumerate(mask[row][0][layout.width - count + token]) if yes]
            position = held + token
            assert seen == list(range(0 if window is None else max(0, position - window + 1), position + 1))


@pytest.mark.parametrize("kind", JOINT)
@pytest.mark.parametrize("seed", range(6))
def test_prompts_in_one_pass_get_what_each_gets_alone(kind: str, seed: int, folder: Path) -> None:
    model, rng = model_of(kind, folder), random.Random(seed)
    make = maker(model)
    assert joint.possible(model, make)
    pasts = [prompt(rng, rng.choice([0, 0, 1, 9, 40])) for _ in range(rng.randint(2, 5))]
    tokens = [prompt(rng, rng.randint(1, 20)) for _ in pasts]
    caches = [make() for _ in pasts]
    for past, held in zip(pasts, caches, strict=True):
        if past:
            joint.run(model, [past], [held])
    logits = joint.run(model, tokens, caches)
    after = joint.run(model, [[5]] * len(pasts), caches)
    for row, (past, own) in enumerate(zip(pasts, tokens, strict=True)):
        alone = make()
        expected = joint.run(model, [past + own], [alone])
        assert mx.allclose(logits[row], expected[0], atol=1e-4)
        assert [cache.offset for cache in caches[row]] == [len(past) + len(own) + 1] * len(alone)
        assert mx.allclose(after[row], joint.run(model, [[5]], [alone])[0], atol=1e-4)


@pytest.mark.parametrize("kind", ALONE)
def test_models_with_windows_or_state_compute_one_prompt_a_pass(kind: str, folder: Path) -> None:
    model = model_of(kind, folder)
    assert not joint.possible(model, maker(model))


class Spoiled:
    """A model that gives something else as soon as it is asked for two rows, or breaks."""

    def __init__(self, model: Any, how: str) -> None:
        self.model, self.how = model, how
        self.layers = model.layers

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        if tokens.shape[0] > 1:
            if self.how == "raises":
                raise TypeError("only one row")
            for layer in cache:
                layer.offset = 0
        return self.model(tokens, cache=cache)


@pytest.mark.parametrize("how", ["raises", "is wrong"])
def test_a_model_that_padding_confuses_computes_one_prompt_a_pass(how: str, folder: Path) -> None:
    model = model_of("llama", folder)
    assert not joint.possible(Spoiled(model, how), maker(model))


# -- in steps -------------------------------------------------------------------------------------------------


class Watched:
    """A model that tells how many rows and tokens each pass had, and can be told to fail where a token is."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        self.shapes: list[tuple[int, ...]] = []
        self.fails_at = -1

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        self.shapes.append(tokens.shape)
        if (tokens == self.fails_at).any().item():
            raise RuntimeError("told to fail")
        return self.model(tokens, cache=cache)


@pytest.fixture
def watched(folder: Path) -> Watched:
    return Watched(model_of("llama", folder))


@pytest.fixture
def owner(watched: Watched) -> Iterator[Owner]:
    made = Owner(watched)
    watched.shapes.clear()
    yield made
    made.runner.close()


def ask(owner: Owner, request_id: str, tokens: list[int], answer: int = 3) -> None:
    owner.submit(EngineRequest(request_id, tuple(tokens), answer, sampling=Sampling(top_logprobs=0)))


def test_prompts_of_a_burst_share_a_pass(owner: Owner, watched: Watched) -> None:
    rng = random.Random(1)
    for i, length in enumerate((30, 29, 28, 5)):
        ask(owner, str(i), prompt(rng, length))
    owner.step()
    assert watched.shapes == [(3, 30), (1, 5)]
    owner.run()
    owner.assert_alone(watched.model)


def test_a_pass_that_fails_takes_its_own_prompts_with_it(owner: Owner, watched: Watched) -> None:
    rng = random.Random(2)
    watched.fails_at = 1
    for i, length in enumerate((30, 29, 5)):
        ask(owner, str(i), prompt(rng, length))
    ask(owner, "bad", [1] * 28)
    owner.run()
    assert set(owner.failed) == {"0", "1", "bad"}
    assert all("told to fail" in reason for reason in owner.failed.values())
    assert len(owner.answers["2"]) == 3


def test_nothing_that_is_not_a_number_is_kept_of_a_prompt_that_is_not_whole(folder: Path) -> None:
    model = model_of("llama", folder)
    make = maker(model)

    def run(tokens: Any, cache: Any = None) -> Any:
        logits = model(tokens, cache=cache)
        if tokens.shape[1] == 16:
            cache[-1].values = cache[-1].values * float("nan")
        return logits

    run.layers = model.layers  # type: ignore[attr-defined]
    owner = Owner(run, make_caches=make, chunk_tokens=16)
    ask(owner, "a", prompt(random.Random(3), 40))
    result = owner.step()
    assert "not a number" in owner.failed["a"]
    assert result.cached_tokens == 0
    owner.check_empty()


def test_one_prompt_that_is_kept_of_a_pass_does_not_keep_the_others(owner: Owner, watched: Watched) -> None:
    rng = random.Random(6)
    mx.clear_cache()
    before = mx.get_active_memory()
    for i in range(3):
        ask(owner, str(i), prompt(rng, 60), answer=1)
    owner.run()
    assert watched.shapes == [(3, 60)]
    owner.runner._kept._cache.shrink(60, 0)
    assert owner.runner._kept.tokens == 60
    assert mx.get_active_memory() - before == pytest.approx(60 * bytes_a_token(watched.model), rel=0.1)


def kept(owner: Owner, head: list[int]) -> list[int]:
    """A beginning that the cache holds."""
    ask(owner, "first", [*head, 3])
    owner.run()
    return head


def test_what_the_cache_saves_one_prompt_goes_to_the_next(owner: Owner, watched: Watched) -> None:
    rng = random.Random(4)
    head = kept(owner, prompt(rng, 30))
    # Of a budget of 512, four of 128: the cache holds 30 of each, so there is room for one more, and a part.
    for i in range(8):
        ask(owner, str(i), [*head, *prompt(rng, 98)])
    watched.shapes.clear()
    result = owner.step()
    assert watched.shapes == [(5, 98), (1, 22)]
    assert result.prompt_tokens == 512
    owner.run()
    owner.assert_alone(watched.model)


def test_no_more_is_given_away_than_was_saved(owner: Owner, watched: Watched) -> None:
    rng = random.Random(5)
    head = kept(owner, prompt(rng, 40))
    for i in range(2):
        ask(owner, str(i), [*head, *prompt(rng, 260 + i)])
    ask(owner, "long", prompt(rng, 480))
    watched.shapes.clear()
    result = owner.step()
    assert [prefilled.position for prefilled in result.prefilled] == [300, 252, 40]
    assert watched.shapes == [(1, 260), (1, 212), (1, 40)]
