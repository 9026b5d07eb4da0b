"""An answer's way out: what waits together leaves together, and after its end nothing counts."""

from __future__ import annotations

import asyncio

import pytest

from pomona.workers.engine.base import Delta, FinishReason
from pomona.workers.errors import RequestError
from pomona.workers.service import AnswerQueue

ABORTED = Delta(error=RequestError("aborted", code="aborted", status=499))


async def read(queue: AnswerQueue) -> list[Delta]:
    return [delta async for delta in queue.deltas(asyncio.get_running_loop().time() + 5)]


async def test_pieces_that_wait_together_leave_together() -> None:
    queue = AnswerQueue()
    for token in (1, 2):
        queue.put(Delta(ids=(token,), text=str(token)))
    queue.put(Delta(ids=(3,), text="3", finish=FinishReason.LENGTH))
    assert [(delta.ids, delta.text, delta.finish) for delta in await read(queue)] == [
        ((1, 2, 3), "123", FinishReason.LENGTH)
    ]


async def test_a_token_of_a_step_that_ran_meanwhile_does_not_hide_the_error() -> None:
    queue = AnswerQueue()
    queue.put(ABORTED)
    queue.put(Delta(ids=(1,), text="late"))
    with pytest.raises(RequestError, match="aborted"):
        await read(queue)
    assert queue.ended


async def test_what_was_said_before_the_error_is_told_first() -> None:
    queue = AnswerQueue()
    queue.put(Delta(ids=(1,), text="said"))
    queue.put(ABORTED)
    deltas = queue.deltas(asyncio.get_running_loop().time() + 5)
    assert (await anext(deltas)).text == "said"
    with pytest.raises(RequestError, match="aborted"):
        await anext(deltas)
