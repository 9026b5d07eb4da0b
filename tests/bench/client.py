"""A client that costs little while it measures: it only records bytes and their time; they are parsed afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from answers import Answer, has_text, parse

# No request of any load takes longer on a server that works.
REQUEST_S = 400.0


class LoadFailed(RuntimeError):
    """A load whose figures would mean nothing; says what went wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens and what it calls its model."""

    url: str
    model: str


class Stream:
    """One request on its way; it starts when made."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        self.sent_s = time.perf_counter()
        self._ended_s = 0.0
        self._reads: list[tuple[float, bytes]] = []
        self._error = ""
        self._closed = False
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._record(session, url, body))

    async def _record(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        try:
            async with session.post(url, json=body) as reply:
                if reply.status != 200:
                    self._error = f"{reply.status} {(await reply.text())[:300]}"
                async for data in reply.content.iter_any():
                    self._reads.append((time.perf_counter(), data))
                    if not self._started.is_set() and has_text(self._reads):
                        self._started.set()
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            self._error = f"{type(exc).__name__}: {exc}"
        finally:
            self._ended_s = time.perf_counter()
            self._started.set()

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def started(self) -> None:
        """Returns when the first text is here. Raises LoadFailed when the request ended before."""
        await self._started.wait()
        if not self._reads or not has_text(self._reads):
            raise LoadFailed(f"a stream ended before its first text: {self._error or 'no text'}")

    async def end(self) -> None:
        await self._task

    async def close(self) -> None:
        """Leave, as a client that closes its connection does."""
        self._closed = not self._task.done()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @property
    def stamps(self) -> tuple[float, ...]:
        """When each piece of text arrived so far."""
        return parse(self._reads, sent_s=self.sent_s, ended_s=0.0, closed=True).stamps

    def answer(self) -> Answer:
        """What has been seen. Raises LoadFailed when the server failed or the stream was cut."""
        answer = parse(self._reads, sent_s=self.sent_s, ended_s=self._ended_s, closed=self._closed)
        if error := self._error or answer.error:
            raise LoadFailed(error)
        return answer


class Client:
    """Sends chat completions to one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target

    def start(self, messages: str | Sequence[dict[str, str]], max_tokens: int, **options: Any) -> Stream:
        """Send a request now: its text, or the chat so far. Greedy unless the options say otherwise."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": self._target.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"stream": True, "stream_options": {"include_usage": True}} | options
        return Stream(self._session, f"{self._target.url}/chat/completions", body)

    async def ask(self, messages: str | Sequence[dict[str, str]], max_tokens: int, **options: Any) -> Answer:
        stream = self.start(messages, max_tokens, **options)
        await stream.end()
        return stream.answer()

    async def ask_all(self, prompts: Iterable[str], at_once: int, max_tokens: int, **options: Any) -> list[Answer]:
        """A closed loop: `at_once` clients, each sends its next prompt when its last one ended."""
        todo, streams = iter(list(prompts)), list[Stream]()

        async def one() -> None:
            for text in todo:
                stream = self.start(text, max_tokens, **options)
                streams.append(stream)
                await stream.end()

        await asyncio.gather(*(one() for _ in range(at_once)))
        return [stream.answer() for stream in streams]


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Client]:
    """A client of `target`; leaving it closes every connection."""
    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        yield Client(session, target)


@asynccontextmanager
async def running(streams: list[Stream]) -> AsyncIterator[list[Stream]]:
    """Streams that all have text when the block begins, and are closed when it ends."""
    try:
        await asyncio.gather(*(stream.started() for stream in streams))
        yield streams
    finally:
        for stream in streams:
            await stream.close()
