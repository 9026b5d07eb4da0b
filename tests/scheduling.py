"""A scheduler without a runner: the test says what a step brought."""

from pomona.workers.engine.base import EngineRequest, StepResult, TokenOut
from pomona.workers.engine.pools import Pools
from pomona.workers.engine.scheduler import Rules, Scheduler


def scheduler(
    *, context=1000, aux_each=0, queue=1024, cache=False, ahead=256, growth=64, requests=4, kv_tokens=1000, aux_slots=0
):
    return Scheduler(
        Rules(context, aux_each, queue, prefix_cache=cache, admit_ahead_tokens=ahead, growth_tokens=growth),
        Pools(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots),
    )


def request(request_id, prompt=5, max_tokens=5, **fields):
    return EngineRequest(request_id, tuple(range(prompt)), max_tokens, **fields)


def submit_all(engine, *requests):
    for each in requests:
        engine.submit(each)


def started(plan):
    return [admitted.request.request_id for admitted in plan.start]


def used(engine):
    return engine.pools.requests.used, engine.pools.kv_tokens.used, engine.pools.aux_slots.used


def token(request_id, finish=None, value=7):
    return TokenOut(request_id, value, finish)


def result(*tokens):
    return StepResult(tuple(tokens))


def step(engine, *request_ids):
    """One whole step in which these requests say a token."""
    plan = engine.plan()
    engine.commit(result(*(token(r) for r in request_ids)))
    engine.check_invariants()
    return plan


def chunked(plan):
    return [chunk.request_id for chunk in plan.prefill]
