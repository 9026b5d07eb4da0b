"""Whatever else runs, is reused, preempted or cancelled: greedy tokens are those of one-by-one decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from owner import KINDS, STATE, VOCAB, Owner, model_of, one_by_one
from pomona.workers.engine.base import EngineRequest

SLOTS_PER_REQUEST = 4


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
def owners() -> Iterator[Any]:
    """Makes owners with slots where the model has state, and closes them."""
    made = []

    def make(kind: str, model: Any, *, requests: int = 8, **sizes: Any) -> Owner:
        if kind in STATE:
            sizes.setdefault("aux_slots", SLOTS_PER_REQUEST * requests)
            sizes["slots_per_request"] = SLOTS_PER_REQUEST
        made.append(Owner(model, requests=requests, **sizes))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(tokens))


def test_unequal_prompts_in_small_chunks_answer_as_if_alone(kind: str, model: Any, owners: Any) -> None:
    rng = random.Random(1)
    owner = owners(kind, model, requests=5, chunk_tokens=16)
    prompts = [prompt(rng, n) for n in (1, 3, 17, 64, 130, 33, 90)]
    for i, tokens in enumerate(prompts):
        owner.submit(EngineRequest(str(i), tokens, 12 + i))
    owner.run()
    assert owner.answers == {str(i): one_by_one(model, p, 12 + i) for i, p in enumerate(prompts)}
    assert owner.most_running == 5


def test_prefix_hits_of_every_length(kind: str, model: Any, owners: Any) -> None:
    """A base prompt, then prompts that share 1, 2, 3, ... of its tokens, each with an end of its own."""
    rng = random.Random(2)
    base = prompt(rng, 48)
    owner = owners(kind, model, aux_slots=64 if kind in STATE else 0)
    owner.submit(EngineRequest("base", base, 8))
    owner.run()
    for shared in range(1, 49):
        request_id, tokens = str(shared), (*base[:shared], *prompt(rng, 5))
        owner.submit(EngineRequest(request_id, tokens, 4))
        owner.run()
        assert owner.answers[request_id] == one_by_one(model, tokens, 4), f"{shared} tokens shared"
        assert kind in STATE or owner.cached[request_id] >= shared
    assert kind not in STATE or any(owner.cached.values())


def test_the_next_turn_of_a_chat_computes_only_what_is_new(kind: str, model: Any, owners: Any) -> None:
    rng = random.Random(3)
    owner = owners(kind, model)
    history: tuple[int, ...] = ()
    for turn in range(5):
        history += prompt(rng, 20)
        request_id = str(turn)
        before = owner.prompt_tokens
        owner.submit(EngineRequest(request_id, history, 10))
        owner.run()
        assert owner.answers[request_id] == one_by_one(model, history, 10)
        assert owner.prompt_tokens - before <= 21
        history += tuple(owner.answers[request_id])


def test_what_is_preempted_says_the_same_when_it_resumes(kind: str, model: Any, owners: Any) -> None:
    rng = random.Random(4)
    owner = owners(kind, model, kv_tokens=850)
    prompts = [prompt(rng, n) for n in (20, 9, 31)]
    for i, tokens in enumerate(prompts):
        owner.submit(EngineRequest(str(i), tokens, 330))
    owner.run()
    assert owner.scheduler.preemptions > 0
    for i, tokens in enumerate(prompts):
        assert owner.answers[str(i)] == one_by_one(model, tokens, 330), f"request {i}"


def test_joins_and_leaves_at_every_step(kind: str, model: Any, owners: Any) -> None:
    """Somebody comes and somebody goes before each step; those that stay are not disturbed."""
    rng = random.Random(5)
    owner = owners(kind, model, requests=4)
    prompts = {str(i): prompt(rng, rng.randrange(1, 40)) for i in range(30)}
    limits = {request_id: rng.randrange(1, 30) for request_id in prompts}
    coming, cancelled = list(prompts), set()
    while coming or owner.scheduler.has_work():
        if coming:
            owner.submit(EngineRequest(coming[0], prompts[coming[0]], limits[coming[0]]))
            del coming[0]
        running = [r for r in owner.answers if r not in owner.ended | cancelled]
        if running and rng.random() < 0.3:
            cancelled.add(rng.choice(running))
            owner.cancel(max(cancelled & set(running)))
        owner.step()
    for request_id, tokens in prompts.items():
        expected = one_by_one(model, tokens, limits[request_id])
        said = owner.answers[request_id]
        assert said == (expected[: len(said)] if request_id in cancelled else expected), request_id
    assert not owner.failed


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps until it comes
        st.integers(0, 40),  # tokens of the shared beginning
        st.integers(1, 30),  # tokens of its own
        st.integers(1, 40),  # tokens to say
        st.one_of(st.none(), st.integers(0, 20)),  # cancelled after so many steps
    ),
    min_size=1,
    max_size=10,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    arrivals=arrivals, requests=st.integers(1, 5), kv_tokens=st.integers(80, 300), chunk=st.sampled_from([16, 40, 512])
)
def test_random_arrivals_cancels_and_pools(
    kind: str, model: Any, owners: Any, arrivals: list[Any], requests: int, kv_tokens: int, chunk: int
) -> None:
    """Pools are exact after every step (Owner checks), nobody is lost, and everybody says what they would alone."""
    rng = random.Random(6)
    owner, base = owners(kind, model, requests=requests, kv_tokens=kv_tokens, chunk_tokens=chunk), prompt(rng, 40)
    prompts = {str(i): (*base[:shared], *prompt(rng, own)) for i, (_, shared, own, _, _) in enumerate(arrivals)}
    limits: dict[str, int] = {}
    clock, events = 0, []
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
            if leaving:
                owner.cancel(request_id)
            else:
                limits[request_id] = arrivals[int(request_id)][3]
                owner.submit(EngineRequest(request_id, prompts[request_id], limits[request_id]))
        owner.step()
        now += 1
    assert not owner.failed
    cancelled = {str(i) for i, arrival in enumerate(arrivals) if arrival[4] is not None}
    for request_id, said in owner.answers.items():
        limit = min(limits[request_id], kv_tokens - len(prompts[request_id]))
        expected = one_by_one(model, prompts[request_id], limit)
        assert said == (expected[: len(said)] if request_id in cancelled else expected), request_id
    pools = owner.scheduler.pools
    assert (pools.requests.used, pools.kv_tokens.used, pools.aux_slots.used) == (0, 0, 0)
