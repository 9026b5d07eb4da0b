"""What is wrong with one request, or with the model while it computes it, is that request's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_model

import tiny
from owner import CONTEXT, VOCAB, FixedCost, Owner, model_of, one_by_one
from pomona.workers.engine.base import EngineRequest, Sampling
from pomona.workers.errors import RequestError

GREEDY = Sampling(top_logprobs=0)
APART = FixedCost(0, 1)  # every length in a batch of its own
Owners = Callable[..., Owner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(folder: Path) -> Any:
    return model_of("llama", folder)


@pytest.fixture
def owners(model: Any) -> Iterator[Owners]:
    """Makes owners of the model, or of another, and closes them."""
    made = []

    def make(other: Any = None, **options: Any) -> Owner:
        made.append(Owner(other or model, **options))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(2 + (seed * 31 + i * 17) % (VOCAB - 2) for i in range(tokens))


def ask(owner: Owner, request_id: str, tokens: int = 9, answer: int = 8, **fields: Any) -> None:
    seed = sum(request_id.encode())
    owner.submit(EngineRequest(request_id, prompt(tokens, seed), answer, GREEDY, **fields))


def assert_right(owner: Owner, model: Any, *request_ids: str) -> None:
    """They ended, with what they would be told alone."""
    for request_id in request_ids:
        said = owner.answers[request_id]
        assert request_id in owner.ended
        assert said == one_by_one(model, owner.prompts[request_id], len(said))


# -- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (0, "the prompt has no tokens"),
        (CONTEXT, f"the prompt has {CONTEXT} tokens and an answer needs at least 1, but the model's context window is"),
        (CONTEXT + 1, f"the prompt has {CONTEXT + 1} tokens and an answer needs at least 1"),
    ],
)
def test_a_prompt_of_a_length_that_cannot_be_is_refused_as_often_as_it_comes(
    owners: Owners, model: Any, tokens: int, reason: str
) -> None:
    owner = owners()
    ask(owner, "good")
    for i in range(10):
        with pytest.raises(RequestError, match=reason):
            ask(owner, f"bad {i}", tokens)
        owner.step()
    owner.run()
    assert_right(owner, model, "good")
    assert set(owner.answers) == {"good"}


def test_a_prompt_that_leaves_one_token_of_the_context_gets_one(owners: Owners, model: Any) -> None:
    owner = owners()
    for i in range(10):
        owner.submit(EngineRequest(f"{i}", prompt(CONTEXT - 1), 50, GREEDY))
        owner.run()
        assert len(owner.answers[f"{i}"]) == 1
    assert_right(owner, model, "0", "9")


@pytest.mark.parametrize("asked", [13, 100_000, None])
def test_an_answer_ends_where_the_context_does(owners: Owners, model: Any, asked: int | None) -> None:
    owner = owners()
    owner.submit(EngineRequest("long", prompt(CONTEXT - 12), asked))
    ask(owner, "short")
    owner.run()
    assert [len(said) for said in owner.answers.values()] == [12, 8]
    assert_right(owner, model, "long", "short")


def test_a_prompt_that_only_the_pool_is_too_small_for_is_refused_with_its_size(owners: Owners) -> None:
    owner = owners(kv_tokens=40)
    with pytest.raises(RequestError, match="this server's KV pool holds 40 tokens"):
        ask(owner, "long", 40)
    ask(owner, "fits", 39, 50)
    owner.run()
    assert len(owner.answers["fits"]) == 1


# -- models that fail ------------------------------------------------------------------------------------------------


class Failing:
    """A model that raises when it is to compute certain tokens."""

    def __init__(self, model: Any, fails: Callable[[Any], bool]) -> None:
        self._model = model
        self._fails = fails

    def __call__(self, tokens: Any, **options: Any) -> Any:
        if self._fails(tokens):
            raise RuntimeError("the device said no")
        return self._model(tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def with_weight(folder: Path, change: Callable[[Any], None]) -> Any:
    """A llama of its own, one of its weights changed."""
    path = folder / "llama"
    model: Any = load_model(path if path.exists() else tiny.make("llama", path, vocab=VOCAB, context=CONTEXT))[0]
    change(model)
    return model


def test_a_model_with_a_broken_weight_fails_each_request_in_a_sentence_and_the_runner_goes_on(
    owners: Owners, folder: Path
) -> None:
    def broken(model: Any) -> None:
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")

    owner = owners(with_weight(folder, broken), chunk_tokens=16)
    for i in range(3):
        ask(owner, f"{i}", 40)
        owner.run()
    for i in range(3):
        ask(owner, f"together {i}", 40)
    owner.run()
    assert len(owner.failed) == 6
    assert all("is not a number (NaN)" in reason for reason in owner.failed.values())
    assert not any(owner.answers.values())


def test_not_a_number_in_one_row_harms_neither_its_neighbours_nor_who_gets_the_row_next(
    owners: Owners, model: Any, folder: Path
) -> None:
    """Broken is the embedding of a token that only one of the answers has: its keys and values are NaN from there.

    A longer row keeps that column among those that attention reads, whoever is in the broken one's row.
    """
    lengths = {"long": 80, "mine": 30, "one": 9, "two": 9, "three": 9}
    alone = {
        request_id: one_by_one(model, prompt(tokens, sum(request_id.encode())), 30)
        for request_id, tokens in lengths.items()
    }
    prompts = {token for request_id, tokens in lengths.items() for token in prompt(tokens, sum(request_id.encode()))}
    theirs = {token for request_id in lengths if request_id != "mine" for token in alone[request_id]}
    poison = next(token for token in alone["mine"] if token not in prompts | theirs)

    def broken(model: Any) -> None:
        model.model.embed_tokens.weight[poison] = float("nan")

    owner = owners(with_weight(folder, broken), requests=3, cost=FixedCost(1, 0))
    for request_id in ("long", "mine", "one"):
        ask(owner, request_id, lengths[request_id], 30)
        owner.step()
    while not owner.failed:
        owner.step()
    assert "NaN" in owner.failed["mine"]
    for request_id in ("two", "three"):
        ask(owner, request_id, lengths[request_id], 30)
    owner.run()
    assert list(owner.failed) == ["mine"]
    assert_right(owner, model, "long", "one", "two", "three")


def test_a_prompt_chunk_that_raises_fails_its_request_only(owners: Owners, model: Any) -> None:
    poison = 501
    owner = owners(
        Failing(model, lambda tokens: tokens.shape[1] > 1 and bool((tokens == poison).any())), chunk_tokens=16
    )
    ask(owner, "before", 9, 20)
    owner.step()
    owner.submit(EngineRequest("bad", (*prompt(30), poison, *prompt(9)), 5))
    ask(owner, "beside", 25, 12)
    owner.run()
    ask(owner, "after")
    owner.run()
    assert list(owner.failed) == ["bad"]
    assert "computing the prompt failed (RuntimeError: the device said no)" in owner.failed["bad"]
    assert_right(owner, model, "before", "beside", "after")


def test_a_decode_step_that_raises_fails_the_rows_of_its_batch_only(owners: Owners, model: Any) -> None:
    failures: list[bool] = []

    def fails(tokens: Any) -> bool:
        rows, columns = tokens.shape
        failing = bool(columns == 1 and rows == 2 and not failures)
        failures.extend([True] * failing)
        return failing

    owner = owners(Failing(model, fails), cost=APART)
    ask(owner, "apart", 200, 20)
    owner.step()
    for request_id in ("a1", "b2"):
        ask(owner, request_id, 9, 20)
    owner.run()
    ask(owner, "after", 9)
    owner.run()
    assert set(owner.failed) == {"a1", "b2"}
    assert "a decode step failed (RuntimeError: the device said no)" in owner.failed["a1"]
    assert_right(owner, model, "apart", "after")


# -- grammars that fail ----------------------------------------------------------------------------------------------


class Fragile:
    """A grammar that allows everything, until it raises: at the beginning (0), or at so many tokens of an answer."""

    def __init__(self, at: int, error: type[Exception] = ValueError) -> None:
        self._at = at
        self._error = error
        self._tokens = 0

    def matcher(self) -> Fragile:
        if self._at == 0:
            raise self._error("the grammar has become too complex")
        return Fragile(self._at, self._error)

    def mask(self) -> Any:
        return np.full(VOCAB // 32, 2**32 - 1, np.uint32)

    def accept(self, token: int) -> None:
        self._tokens += 1
        if self._tokens == self._at:
            raise self._error("the grammar has become too complex")


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_grammar_over_its_limits_fails_its_request_only(owners: Owners, model: Any, at: int) -> None:
    owner = owners()
    ask(owner, "before", 9, 12)
    owner.step()
    ask(owner, "bad", 9, 8, grammar=Fragile(at))
    ask(owner, "beside", 9, 12, grammar=Fragile(100))
    owner.run()
    ask(owner, "after")
    owner.run()
    assert list(owner.failed) == ["bad"]
    assert "the grammar has become too complex" in owner.failed["bad"]
    assert len(owner.answers["bad"]) == max(0, at - 1)
    assert_right(owner, model, "before", "beside", "after")


def test_an_error_between_two_rows_tokens_fails_the_batch_and_leaves_no_row_half_ended(
    owners: Owners, model: Any
) -> None:
    """Its neighbour's answer would have ended in the same step."""
    owner = owners(cost=APART)
    ask(owner, "apart", 200, 20)
    owner.step()
    ask(owner, "neighbour", 9, 5)
    ask(owner, "bad", 9, 20, grammar=Fragile(5, RuntimeError))
    owner.run()
    assert set(owner.failed) == {"bad", "neighbour"}
    assert owner.ended == {"apart"}
    assert_right(owner, model, "apart")


# -- cancels ---------------------------------------------------------------------------------------------------------


def waiting(owner: Owner) -> str:
    owner.step()
    return "c"


def prefilling(owner: Owner) -> str:
    for _ in range(6):
        owner.step()
    assert not owner.answers["b"]
    assert 0 < owner.runner._prompts["b"].position < 90
    return "b"


def decoding(owner: Owner) -> str:
    while len(owner.answers["b"]) < 4:
        owner.step()
    return "b"


def preempted(owner: Owner) -> str:
    while not owner.scheduler.preemptions:
        owner.step()
    return next(r for r in "ab" if owner.answers[r] and r not in owner.ended | owner.held)


@pytest.mark.parametrize("reach", [waiting, prefilling, decoding, preempted])
def test_a_cancel_in_any_state_frees_all_within_a_step_and_touches_nobody_else(
    owners: Owners, model: Any, reach: Callable[[Owner], str]
) -> None:
    owner = owners(
        requests=2,
        kv_tokens=140 if reach is preempted else 10_000,
        chunk_tokens=16,
        admit_ahead_tokens=8,
        growth_tokens=8,
    )
    ask(owner, "a", 9, 60)
    ask(owner, "b", 20 if reach is preempted else 90, 60)
    ask(owner, "c", 12, 10)
    request_id = reach(owner)
    said = list(owner.answers[request_id])
    owner.cancel(request_id)
    owner.step()
    assert request_id not in owner.held
    assert owner.scheduler.pools.requests.used == len(owner.held) <= 2
    owner.run()
    assert owner.answers[request_id] == said
    assert owner.ended == {"a", "b", "c"} - {request_id}
    assert_right(owner, model, *owner.ended)


@pytest.mark.parametrize("cancelled", ["first", "second"])
def test_a_cancel_of_who_computes_or_awaits_a_shared_beginning_leaves_the_others_right(
    owners: Owners, model: Any, cancelled: str
) -> None:
    owner = owners(chunk_tokens=16)
    base = prompt(64)
    for i, request_id in enumerate(("first", "second", "third")):
        owner.submit(EngineRequest(request_id, (*base, *prompt(7, i)), 6, GREEDY))
    owner.step()
    owner.step()
    owner.cancel(cancelled)
    owner.step()
    assert cancelled not in owner.held
    owner.run()
    assert_right(owner, model, *({"first", "second", "third"} - {cancelled}))
