"""A step does what its plan says, in the plan's order, and tells what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from owner import VOCAB, model_of, one_by_one
from pomona.workers.engine.base import (
    Admitted,
    Chunk,
    EngineRequest,
    FinishReason,
    Prefilled,
    Sampling,
    StepPlan,
    StepResult,
    TokenOut,
)
from pomona.workers.engine.runner import ModelRunner
from pomona.workers.models.caches import maker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(folder: Path) -> Any:
    return model_of("llama", folder)


@pytest.fixture
def runner(model: Any) -> Iterator[ModelRunner]:
    made = ModelRunner(model, maker(model), eos=(), vocab_size=VOCAB)
    yield made
    made.close()


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(2 + (seed * 31 + i * 17) % (VOCAB - 2) for i in range(tokens))


def plan(**fields: Any) -> StepPlan:
    """With room in the cache for all."""
    return StepPlan(cache_tokens=10_000, cache_slots=64, **fields)


def admitted(request_id: str, tokens: int = 9, most: int = 8, generated: tuple[int, ...] = (), **fields: Any) -> Any:
    request = EngineRequest(request_id, prompt(tokens, sum(request_id.encode())), most, **fields)
    return Admitted(request, most, generated)


def start(runner: ModelRunner, *those: Admitted) -> StepResult:
    """Start them and compute their prompts, in one step."""
    chunks = tuple(Chunk(one.request.request_id, 1000) for one in those)
    return runner.step(plan(start=those, prefill=chunks))


def finish(runner: ModelRunner, *results: StepResult) -> dict[str, list[TokenOut]]:
    """Step until nothing decodes; all tokens, those of `results` first."""
    said: dict[str, list[TokenOut]] = {}
    pending = list(results)
    while True:
        for result in pending:
            assert not result.failed
            for token in result.tokens:
                said.setdefault(token.request_id, []).append(token)
        pending = [runner.step(plan())]
        if not pending[0].tokens:
            return said


def ids(tokens: list[TokenOut]) -> list[int]:
    return [token.token for token in tokens]


def test_a_prompt_is_computed_by_chunks_and_its_last_one_brings_the_first_token(
    runner: ModelRunner, model: Any
) -> None:
    first = runner.step(plan(start=(admitted("a", 20),), prefill=(Chunk("a", 8),)))
    second = runner.step(plan(prefill=(Chunk("a", 8),)))
    third = runner.step(plan(prefill=(Chunk("a", 8),)))
    assert [result.prefilled for result in (first, second, third)] == [
        (Prefilled("a", 8, 0),),
        (Prefilled("a", 16, 0),),
        (Prefilled("a", 20, 0),),
    ]
    assert [result.prompt_tokens for result in (first, second, third)] == [8, 8, 4]
    assert [len(result.tokens) for result in (first, second, third)] == [0, 0, 1]
    assert ids(finish(runner, third)["a"]) == one_by_one(model, prompt(20, sum(b"a")), 8)


def test_a_started_request_without_a_chunk_does_nothing_yet(runner: ModelRunner) -> None:
    result = runner.step(plan(start=(admitted("a"),)))
    assert result == StepResult()


def test_who_ends_its_prompt_in_a_step_decodes_from_the_next_on(runner: ModelRunner) -> None:
    start(runner, admitted("a"))
    both = start(runner, admitted("b"))
    assert sorted(token.request_id for token in both.tokens) == ["a", "b"]
    assert sorted(token.request_id for token in runner.step(plan()).tokens) == ["a", "b"]


def test_chunks_and_leaves_of_those_that_are_not_here_are_nothing(runner: ModelRunner) -> None:
    result = runner.step(plan(leave=("nobody",), prefill=(Chunk("nobody", 5),)))
    assert result == StepResult()


def test_who_leaves_is_gone_before_the_step_and_may_start_again_in_it(runner: ModelRunner, model: Any) -> None:
    start(runner, admitted("a"), admitted("b"))
    again = admitted("a", most=5)
    result = runner.step(plan(leave=("a",), start=(again,), prefill=(Chunk("a", 1000),)))
    assert len([token for token in result.tokens if token.request_id == "a"]) == 1
    assert ids(finish(runner, result)["a"]) == one_by_one(model, again.request.prompt, 5)


def test_a_prompt_that_leaves_midway_leaves_what_it_computed(runner: ModelRunner) -> None:
    one = admitted("a", 40)
    runner.step(plan(start=(one,), prefill=(Chunk("a", 24),)))
    assert runner.step(plan(leave=("a",))).cached_tokens == 24
    result = start(runner, one)
    assert (result.prefilled, result.prompt_tokens) == ((Prefilled("a", 40, 24),), 16)
    assert result.tokens[0].cached_tokens == 24


def test_an_answer_of_one_token_never_gets_a_row(runner: ModelRunner) -> None:
    result = start(runner, admitted("a", most=1))
    assert [token.finish for token in result.tokens] == [FinishReason.LENGTH]
    assert runner.step(plan()).tokens == ()


def test_a_stop_token_ends_the_answer_and_is_told(runner: ModelRunner, model: Any) -> None:
    alone = one_by_one(model, prompt(9, sum(b"a")), 8)
    at = next(i for i in range(1, 8) if alone[i] not in alone[:i])
    said = finish(runner, start(runner, admitted("a", stop_token_ids=(alone[at],))))["a"]
    assert ids(said) == alone[: at + 1]
    assert [token.finish for token in said] == [None] * at + [FinishReason.STOP]


def test_the_models_end_token_ends_an_answer_that_does_not_ignore_it(model: Any) -> None:
    alone = one_by_one(model, prompt(9, sum(b"a")), 8)
    at = next(i for i in range(1, 8) if alone[i] not in alone[:i])
    runner = ModelRunner(model, maker(model), eos=(alone[at],), vocab_size=VOCAB)
    said = finish(runner, start(runner, admitted("a"), admitted("A", ignore_eos=True)))
    assert ids(said["a"]) == alone[: at + 1]
    assert len(said["A"]) == 8
    late = finish(runner, start(runner, admitted("a", min_tokens=at + 3)))["a"]
    assert len(late) > at + 2
    assert alone[at] not in ids(late)[: at + 2]
    runner.close()


def test_a_preempted_answer_goes_on_after_what_it_has_said(runner: ModelRunner, model: Any) -> None:
    alone = one_by_one(model, prompt(9, sum(b"a")), 8)
    result = start(runner, admitted("a", generated=tuple(alone[:3])))
    assert result.prompt_tokens == 12
    assert ids(finish(runner, result)["a"]) == alone[3:]


def test_logprobs_are_told_to_who_asked(runner: ModelRunner) -> None:
    said = finish(runner, start(runner, admitted("a", sampling=Sampling(top_logprobs=2)), admitted("b")))
    assert all(token.logprob is not None and len(token.top) == 2 for token in said["a"])
    assert all(token.logprob == token.top[0].logprob for token in said["a"])
    assert all(token.logprob is None and token.top == () for token in said["b"])


def test_a_step_times_only_what_it_did(runner: ModelRunner) -> None:
    prefill = start(runner, admitted("a")).times
    decode = runner.step(plan()).times
    assert (prefill.decode_s, decode.prefill_s) == (0, 0)
    assert prefill.prefill_s > 0
    assert decode.decode_s > 0


def test_the_cache_shrinks_before_the_step_to_what_the_plan_leaves_it(runner: ModelRunner) -> None:
    finish(runner, start(runner, admitted("a", 40), admitted("b", 50)))
    assert runner.step(plan()).cached_tokens == 40 + 50 + 2 * 7
    assert runner.step(StepPlan(cache_tokens=60)).cached_tokens <= 60
    assert runner.step(StepPlan()).cached_tokens == 0


def test_a_prompt_that_branches_off_in_a_hybrid_stops_once_where_it_does(folder: Path) -> None:
    model = model_of("lfm2", folder)
    runner = ModelRunner(model, maker(model), eos=(), vocab_size=VOCAB)
    start(runner, Admitted(EngineRequest("base", prompt(60)), 1))
    branches = [Admitted(EngineRequest(f"{i}", (*prompt(40), *prompt(9, i + 5))), 1) for i in range(2)]
    stopped = start(runner, branches[0])
    assert (stopped.prefilled[0].position, stopped.prompt_tokens, stopped.cached_slots) == (40, 40, 2)
    runner.step(plan(prefill=(Chunk("0", 1000),)))
    assert start(runner, branches[1]).prefilled == (Prefilled("1", 49, 40),)
    runner.close()


def test_closing_frees_everything(model: Any) -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    runner = ModelRunner(model, maker(model), eos=(), vocab_size=VOCAB)
    start(runner, admitted("a", 100, 50), admitted("b", 200, 50))
    runner.step(plan(start=(admitted("c", 100),), prefill=(Chunk("c", 20),)))
    assert mx.get_active_memory() > before + 50_000
    runner.close()
    assert mx.get_active_memory() - before < 2000
