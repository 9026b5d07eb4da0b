"""Whatever else runs, is reused, preempted, moved or cancelled: everybody is told what they would be told alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ConcatenateKVCache

from owner import KINDS, STATE, TOLERANCE, VOCAB, FixedCost, Owner, model_of, one_by_one
from pomona.workers.engine.base import EngineRequest, Sampling
from pomona.workers.engine.batch import DecodeBatch

SLOTS_PER_REQUEST = 4
# Pools this small are full after some tokens.
TIGHT = {"admit_ahead_tokens": 8, "growth_tokens": 8}
GREEDY = Sampling(top_logprobs=0)
SEEDED = Sampling(temperature=1.0, top_p=0.95, seed=11, top_logprobs=0)
# Kinds whose steps are dear get fewer examples and lengths; of each sort of cache one gets all.
EVERY_LENGTH = {"llama": 49, "gemma3_text": 49, "lfm2": 49}
EXAMPLES = {"llama": 15, "gemma3_text": 8, "lfm2": 10}

Owners = Callable[..., Owner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, folder: Path) -> Any:
    return model_of(kind, folder)


@pytest.fixture
def owners() -> Iterator[Owners]:
    """Makes owners with slots where the model has state, and closes them."""
    made = []

    def make(kind: str, model: Any, *, requests: int = 8, **options: Any) -> Owner:
        if kind in STATE:
            options.setdefault("aux_slots", SLOTS_PER_REQUEST * requests)
            options["slots_per_request"] = SLOTS_PER_REQUEST
        made.append(Owner(model, requests=requests, **options))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(tokens))


def ask(owner: Owner, request_id: str, tokens: tuple[int, ...], answer: int, sampling: Sampling = GREEDY) -> None:
    owner.submit(EngineRequest(request_id, tokens, answer, sampling))


def lengths(owner: Owner) -> list[int]:
    return [len(answer) for answer in owner.answers.values()]


def test_unequal_prompts_in_small_chunks_say_what_mlx_lm_says_one_by_one(kind: str, model: Any, owners: Owners) -> None:
    rng = random.Random(1)
    owner = owners(kind, model, requests=4, chunk_tokens=16)
    prompts = [prompt(rng, n) for n in (1, 3, 17, 110, 33)]
    for i, tokens in enumerate(prompts):
        ask(owner, str(i), tokens, 8 + i)
    owner.run()
    assert owner.answers == {str(i): one_by_one(model, p, 8 + i) for i, p in enumerate(prompts)}
    owner.assert_alone(model)
    assert owner.most_running == 4


def test_prefix_hits_of_every_length(kind: str, model: Any, owners: Owners) -> None:
    """A base prompt, then prompts that share 1, 2, 3, ... of its tokens, each with an end of its own."""
    rng = random.Random(2)
    base = prompt(rng, 48)
    owner = owners(kind, model, aux_slots=64 if kind in STATE else 0)
    ask(owner, "base", base, 8)
    owner.run()
    every = range(1, EVERY_LENGTH[kind]) if kind in EVERY_LENGTH else (1, 16, 17, 33, 47, 48)
    for shared in every:
        ask(owner, str(shared), (*base[:shared], *prompt(rng, 5)), 3)
        owner.run()
        assert kind in STATE or owner.cached[str(shared)] >= shared
    owner.assert_alone(model)
    assert kind not in STATE or any(owner.cached.values())


def test_the_next_turn_of_a_chat_computes_only_what_is_new(kind: str, model: Any, owners: Owners) -> None:
    rng = random.Random(3)
    owner = owners(kind, model)
    history: tuple[int, ...] = ()
    for turn in range(4):
        history += prompt(rng, 20)
        before = owner.prompt_tokens
        ask(owner, str(turn), history, 8)
        owner.run()
        assert owner.prompt_tokens - before <= 21
        history += tuple(owner.answers[str(turn)])
    owner.assert_alone(model)


def test_what_is_preempted_says_the_same_when_it_resumes(kind: str, model: Any, owners: Owners) -> None:
    rng = random.Random(4)
    owner = owners(kind, model, kv_tokens=120, **TIGHT)
    for i, n in enumerate((20, 9, 31)):
        ask(owner, str(i), prompt(rng, n), 40)
    owner.run()
    assert owner.resumed
    assert lengths(owner) == [40] * 3
    owner.assert_alone(model)


def test_joins_and_leaves_at_every_step(kind: str, model: Any, owners: Owners) -> None:
    """Somebody comes and somebody goes before each step; those that stay are not disturbed."""
    rng = random.Random(5)
    owner = owners(kind, model, requests=4)
    coming = {str(i): (prompt(rng, rng.randrange(1, 40)), rng.randrange(1, 20)) for i in range(18)}
    limits = {request_id: limit for request_id, (_, limit) in coming.items()}
    cancelled: set[str] = set()
    while coming or owner.scheduler.has_work():
        if coming:
            request_id = next(iter(coming))
            ask(owner, request_id, *coming.pop(request_id))
        running = [r for r in owner.answers if r not in owner.ended | cancelled]
        if running and rng.random() < 0.3:
            cancelled.add(rng.choice(running))
            owner.cancel(max(cancelled & set(running)))
        owner.step()
    assert cancelled
    for request_id, said in owner.answers.items():
        assert len(said) == limits[request_id] or request_id in cancelled
    owner.assert_alone(model)


def test_rows_that_move_between_batches_go_on_undisturbed(
    kind: str, model: Any, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass costs as much as 150 cells: few long rows go with the short ones, and are moved when these are many."""
    rng = random.Random(7)
    owner = owners(kind, model, requests=9, cost=FixedCost(150, 1))
    moves, take_over = [], DecodeBatch.take_over

    def counted(self: DecodeBatch, sequence: Any, other: DecodeBatch) -> None:
        moves.append(sequence.request_id)
        take_over(self, sequence, other)

    monkeypatch.setattr(DecodeBatch, "take_over", counted)
    seen = set()
    # (step, prompt, answer): three short ones join two long ones and part again, more come, the long ones end.
    coming = [(0, 120, 20), (0, 125, 22), (1, 10, 30), (3, 12, 18), (5, 9, 30), (6, 40, 9), (7, 11, 12), (9, 3, 9)]
    for at in range(60):
        for i, (step, tokens, answer) in enumerate(coming):
            if step == at:
                ask(owner, str(i), prompt(rng, tokens), answer)
        owner.step()
        seen.add(len(owner.batches))
    owner.run()
    assert seen == {0, 1, 2}
    assert moves
    assert lengths(owner) == [answer for _, _, answer in coming]
    owner.assert_alone(model)


@pytest.mark.parametrize("tokens", [2, 40])
def test_two_requests_with_the_same_prompt_at_once(kind: str, model: Any, owners: Owners, tokens: int) -> None:
    owner = owners(kind, model)
    same = prompt(random.Random(8), tokens)
    for request_id in "abc":
        ask(owner, request_id, same, 6)
    owner.run()
    assert owner.answers["a"] == owner.answers["b"] == owner.answers["c"]
    owner.assert_alone(model)


@pytest.mark.parametrize("chunk_tokens", [32, 512])
def test_what_prompts_that_come_at_once_share_is_computed_once(
    kind: str, model: Any, owners: Owners, chunk_tokens: int
) -> None:
    rng = random.Random(9)
    base = prompt(rng, 96)
    owner = owners(kind, model, chunk_tokens=chunk_tokens)
    for i in range(4):
        ask(owner, str(i), (*base, *prompt(rng, 10)), 4)
    owner.run()
    assert owner.prompt_tokens == 96 + 4 * 10
    owner.assert_alone(model)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "falcon_h1"])
def test_a_seeded_request_says_the_same_alone_in_a_batch_and_after_a_preemption(
    kind: str, model: Any, owners: Owners
) -> None:
    rng = random.Random(10)
    seeded, others = prompt(rng, 20), [prompt(rng, n) for n in (7, 33)]
    runs = []
    for company, kv_tokens in ((0, 1000), (2, 1000), (2, 120)):
        owner = owners(kind, model, kv_tokens=kv_tokens, **TIGHT)
        for i in range(company):
            ask(owner, str(i), others[i], 30, SEEDED if i else GREEDY)
        ask(owner, "seeded", seeded, 30, SEEDED)
        owner.run()
        assert ("seeded" in owner.resumed) == (kv_tokens == 120)
        runs.append(owner)
    answers = [owner.answers["seeded"] for owner in runs]
    assert answers[0] == answers[1] == answers[2] != one_by_one(model, seeded, 30)
    for owner in runs[1:]:
        assert owner.logprobs["seeded"] == pytest.approx(runs[0].logprobs["seeded"], abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama"])
def test_a_model_whose_caches_do_not_batch_is_served_alone_and_preempted_alike(model: Any, owners: Owners) -> None:
    owner = owners(
        "llama", model, kv_tokens=120, make_caches=lambda: [ConcatenateKVCache() for _ in model.layers], **TIGHT
    )
    rng = random.Random(12)
    for i, n in enumerate((20, 9, 31)):
        ask(owner, str(i), prompt(rng, n), 40)
    owner.step()
    assert [len(batch) for batch in owner.batches] == [1, 1, 1]
    owner.run()
    assert owner.resumed
    assert lengths(owner) == [40] * 3
    owner.assert_alone(model)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 4),  # steps until it comes
        st.integers(0, 40),  # tokens of the shared beginning
        st.integers(1, 30),  # tokens of its own
        st.integers(1, 24),  # tokens to say
        st.one_of(st.none(), st.integers(0, 12)),  # cancelled after so many steps
    ),
    min_size=1,
    max_size=8,
)


def test_random_arrivals_cancels_and_pools(kind: str, model: Any, owners: Owners) -> None:
    """Pools are exact after every step (Owner checks), nobody is lost, and everybody says what they would alone."""

    @settings(max_examples=EXAMPLES.get(kind, 6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        arrivals=arrivals,
        requests=st.integers(1, 5),
        kv_tokens=st.integers(100, 300),
        chunk=st.sampled_from([16, 40, 512]),
        pass_s=st.sampled_from([0, 30, 1000]),
    )
    def check(arrivals: list[Any], requests: int, kv_tokens: int, chunk: int, pass_s: int) -> None:
        owner = owners(
            kind,
            model,
            requests=requests,
            kv_tokens=kv_tokens,
            chunk_tokens=chunk,
            cost=FixedCost(pass_s, 1),
            **TIGHT,
        )
        run_arrivals(owner, arrivals)
        owner.close()
        for request_id, (_, _, _, limit, leaves) in enumerate(arrivals):
            assert len(owner.answers[str(request_id)]) == limit or leaves is not None
        owner.assert_alone(model)

    check()


def run_arrivals(owner: Owner, arrivals: list[Any]) -> None:
    """Everybody comes and goes when they are to."""
    rng = random.Random(6)
    base, clock = prompt(rng, 40), 0
    events: list[tuple[int, int, str]] = []  # the step, whether it is the end, and whose
    for i, (wait, _, _, _, leaves) in enumerate(arrivals):
        clock += wait
        events.append((clock, 0, str(i)))
        if leaves is not None:
            events.append((clock + leaves, 1, str(i)))
    events.sort()
    now = 0
    while events or owner.scheduler.has_work():
        while events and events[0][0] <= now:
            _, leaving, request_id = events.pop(0)
            _, shared, own, limit, _ = arrivals[int(request_id)]
            if leaving:
                owner.cancel(request_id)
            else:
                ask(owner, request_id, (*base[:shared], *prompt(rng, own)), limit)
        owner.step()
        now += 1
    owner.check_empty()
