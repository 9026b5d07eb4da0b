"""Asyncio plumbing of one HTTP exchange: several choices as one stream, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pomona.v1 import inference_pb2

from .limits import ClientGone

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = AsyncGenerator[inference_pb2.GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of one choice."""

    choice: int
    message: inference_pb2.GenerateResponse


Pieces = AsyncGenerator[Piece, None]
_Queue = asyncio.Queue["Piece | Exception | None"]


async def merged(streams: Sequence[Messages]) -> Pieces:
    """All messages of all streams as they come; the first error ends it. Closing it closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as messages:
            async for message in messages:
                yield Piece(0, message)
        return
    # Bounded, so that a slow client slows every choice instead of filling memory.
    queue: _Queue = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(choice, stream, queue)) for choice, stream in enumerate(streams)]
    live = len(pumps)
    try:
        while live:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                live -= 1
            else:
                yield item
    finally:
        await _cancel(*pumps)


async def _pump(choice: int, stream: Messages, queue: _Queue) -> None:
    try:
        async with aclosing(stream) as messages:
            async for message in messages:
                await queue.put(Piece(choice, message))
        await queue.put(None)
    except Exception as exc:  # the reader of the queue raises it again
        await queue.put(exc)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled the moment the client leaves: ClientGone. The body must be read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("The client left before its answer was complete.")
    finally:
        await _cancel(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `events` is closed when the client leaves or stops reading, and never runs on unread."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except ClientGone as exc:
                logger.info("stream ended: %s", exc)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
