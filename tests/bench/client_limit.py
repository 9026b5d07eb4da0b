"""What the load clients themselves cost: against a server that only writes events, CPU microseconds a token.

    python tests/bench/client_limit.py

The clients share the machine with the server that they measure, so this says how much of a figure is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from answers import tokens_per_s
from client import Target, connect
from loads import Sizes, openai_load
from prompts import prompts

CLIENTS, TOKENS = 64, 48
# About what pomona at 64 streams says: the events come in rounds, as an engine's steps make them.
STEP_S = 0.01
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    common = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return _chunk(json.dumps(common | fields, separators=(",", ":")).encode())


TOKEN = _event(choices=[{"index": 0, "delta": {"content": " river"}, "finish_reason": None}])
END = _event(choices=[], usage={"prompt_tokens": 90, "completion_tokens": TOKENS, "total_tokens": 90 + TOKENS})


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):  # the client has no more to ask
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(HEAD)
            for _ in range(TOKENS):
                writer.write(TOKEN)
                await asyncio.sleep(STEP_S)
            writer.write(END + _chunk(b"[DONE]") + b"0\r\n\r\n")
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=CLIENTS)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@contextmanager
def events_only() -> Iterator[Target]:
    """A server in a process of its own that answers at once."""
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "a pipe"
        try:
            yield Target(f"http://127.0.0.1:{int(process.stdout.readline())}/v1", "m")
        finally:
            process.terminate()


async def lean(target: Target, sizes: Sizes) -> None:
    texts = prompts("limit", CLIENTS * sizes.requests_per_client, sizes.prompt_words)
    async with connect(target) as client:
        begin = time.process_time()
        answers = await client.ask_all(texts, CLIENTS, TOKENS)
        spent = time.process_time() - begin
    report("lean client (with parsing afterwards)", tokens_per_s(answers), spent, len(texts))


async def official(target: Target, sizes: Sizes) -> None:
    seen = await openai_load(target, sizes, CLIENTS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report(
        "openai_load.py (with its start)", seen["output_tokens_per_s"], used.ru_utime + used.ru_stime, seen["requests"]
    )


def report(name: str, rate: float, cpu_s: float, requests: int) -> None:
    print(f"{name}: {rate:.0f} tokens/s, {1e6 * cpu_s / (requests * TOKENS):.0f} us of CPU a token")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        asyncio.run(_serve())
        return
    with events_only() as target:
        asyncio.run(official(target, Sizes()))
        asyncio.run(lean(target, Sizes()))


if __name__ == "__main__":
    main()
