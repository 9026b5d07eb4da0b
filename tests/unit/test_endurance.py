"""Thousands of requests leave nothing behind, and as many run at once as may."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from owner import VOCAB, Owner, bytes_a_token, model_of
from pomona.workers.engine.base import EngineRequest
from pomona.workers.engine.requests import Live
from pomona.workers.engine.sequence import Sequence

WAVES, WAVE = 10, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(folder: Path) -> Any:
    return model_of("llama", folder)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def prompt(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 9)))


def forget(owner: Owner) -> None:
    """What the test itself remembers of those that ended."""
    assert owner.failed == {}
    for told in (owner.prompts, owner.answers, owner.logprobs, owner.cached, owner.ended):
        told.clear()


def alive(*kinds: type) -> int:
    gc.collect()
    return sum(isinstance(each, kinds) for each in gc.get_objects())


def test_three_thousand_requests_leave_nothing_behind(model: Any, traced: None) -> None:
    """After the first waves no memory grows: neither MLX's, nor Python's, nor objects.

    The prefix cache's tokens are taken off, byte for byte: how many there is room for beside the rows varies.
    """
    rng = random.Random(1)
    owner = Owner(model, requests=64, kv_tokens=2000, admit_ahead_tokens=8, growth_tokens=8)
    others = alive(Sequence, Live)
    before = mx.get_active_memory()
    device: list[int] = []
    host: list[int] = []
    for wave in range(WAVES):
        for i in range(WAVE):
            owner.submit(EngineRequest(f"{wave}-{i}", prompt(rng), rng.randrange(1, 5)))
        owner.run()
        assert len(owner.ended) == WAVE
        forget(owner)
        mx.clear_cache()
        assert alive(Sequence, Live) == others
        device.append(mx.get_active_memory() - owner.runner._kept.tokens * bytes_a_token(model))
        host.append(tracemalloc.get_traced_memory()[0])
    assert owner.most_running == 64
    assert max(device[5:]) - max(device[2:5]) < 100_000
    assert max(host[5:]) - max(host[2:5]) < 200_000
    owner.runner.close()
    assert mx.get_active_memory() - before < 20_000, "all that is left was the prefix cache's"


def test_every_owner_of_sixteen_runs_as_many_requests_as_it_may(model: Any) -> None:
    rng = random.Random(2)
    owners = [Owner(model, requests=4) for _ in range(16)]
    for owner in owners:
        for i in range(8):
            owner.submit(EngineRequest(f"{i}", prompt(rng), 6))
    while any(owner.scheduler.has_work() for owner in owners):
        for owner in owners:
            if owner.scheduler.has_work():
                owner.step()
                assert owner.scheduler.running <= 4
    for owner in owners:
        owner.check_empty()
        assert (owner.most_running, len(owner.ended)) == (4, 8)
        owner.close()
