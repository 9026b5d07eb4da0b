"""The loads: what is sent, what is measured of it, and the bar that pomona / mlx_lm.server has to meet."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from answers import Answer, gaps_s, percentile, tokens_per_s
from client import Client, LoadFailed, Stream, Target, connect, running
from prompts import prompt, prompts

OPENAI_LOAD = Path(__file__).parents[3] / "shared" / "bench" / "openai_load.py"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are. QUICK only shows that they run: its figures mean nothing."""

    clients: tuple[int, ...] = (1, 4, 8, 16)
    tiny_clients: int = 64
    requests_per_client: int = 3
    prompt_words: int = 48
    answer_tokens: int = 48
    long_words: int = 3000
    middle_words: int = 500
    short_words: int = 10
    context_words: int = 970
    streams: int = 16
    measured_s: float = 20.0
    sharing_requests: int = 12
    shared_words: int = 300
    own_words: int = 30
    chats: int = 4
    turns: int = 6


QUICK = Sizes(
    clients=(1, 2),
    tiny_clients=8,
    requests_per_client=1,
    answer_tokens=8,
    long_words=200,
    middle_words=50,
    context_words=40,
    streams=3,
    measured_s=2.0,
    sharing_requests=4,
    shared_words=60,
    turns=3,
)
# Streams that run while something else is measured are closed by us: they get more tokens than they can reach.
ENDLESS_TOKENS = 5000


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound of pomona's figure over mlx_lm.server's."""

    ratio: float
    at_least: bool

    def met(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.ratio:g}"


def at_least(ratio: float) -> Bar:
    return Bar(ratio, at_least=True)


def at_most(ratio: float) -> Bar:
    return Bar(ratio, at_least=False)


@dataclass(frozen=True, slots=True)
class Load:
    """`bars` by measure; a measure without one is only shown. `options`: a server's flags beyond its defaults."""

    run: Callable[[Target, Sizes], Awaitable[Figures]]
    bars: Mapping[str, Bar]
    model: str = "smollm2"
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


async def openai_load(target: Target, sizes: Sizes, clients: int) -> dict[str, Any]:
    """The shared load client, in its own process: greedy, closed loop."""
    flags: dict[str, Any] = {"url": target.url, "model": target.model, "concurrency": clients, "seed": clients}
    flags |= {"requests": clients * sizes.requests_per_client, "max-tokens": sizes.answer_tokens}
    flags |= {"prompt-words": sizes.prompt_words}
    command = [sys.executable, str(OPENAI_LOAD), *(part for k, v in flags.items() for part in (f"--{k}", str(v)))]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result: dict[str, Any] = json.loads(output) if process.returncode == 0 else {"failed": "all", "errors": []}
    if result["failed"]:
        raise LoadFailed(f"{result['failed']} of {clients} clients' requests failed: {result['errors']}")
    return result


async def uniform(target: Target, sizes: Sizes) -> Figures:
    """Short prompts, short answers, 1 to 16 clients."""
    figures: Figures = {}
    for clients in sizes.clients:
        seen = await openai_load(target, sizes, clients)
        figures[f"tokens/s, {clients} clients"] = seen["output_tokens_per_s"]
        figures[f"first token s (median), {clients} clients"] = seen["ttft_s"]["p50"]
        figures[f"gap s (median), {clients} clients"] = seen["itl_s"]["p50"]
    return figures


async def long_prompt(target: Target, sizes: Sizes) -> Figures:
    """Four streams run, and a long prompt arrives."""
    async with connect(target) as client:
        texts = prompts("long prompt", 4, sizes.prompt_words)
        async with running([client.start(text, ENDLESS_TOKENS) for text in texts]) as streams:
            await asyncio.sleep(2.0)
            answer = await client.ask(prompt("long", sizes.long_words), 8)
            _all_run(streams)
            gaps = [gap for s in streams for gap in gaps_s(s.stamps, answer.sent_s, answer.ended_s)]
            return {"longest gap of the streams s": max(gaps), "first token of the long prompt s": answer.first_token_s}


async def mixed_prompts(target: Target, sizes: Sizes) -> Figures:
    """A long, a middle and a short prompt at once."""
    async with connect(target) as client:
        words = (sizes.long_words, sizes.middle_words, sizes.short_words)
        asked = [client.ask(prompt(f"mixed {count}", count), 64) for count in words]
        long, middle, short = await asyncio.gather(*asked)
        return {
            "all end s": max(a.ended_s for a in (long, middle, short)) - min(a.sent_s for a in (long, middle, short)),
            "the short one ends s": short.ended_s - short.sent_s,
            "the middle one ends s": middle.ended_s - middle.sent_s,
            "first token of the short one s": short.first_token_s,
        }


async def joining(target: Target, sizes: Sizes) -> Figures:
    """Many streams with long contexts; a short request joins twice a second, and so about as many end."""
    async with connect(target) as client:
        texts = prompts("joining", sizes.streams, sizes.context_words)
        async with running([client.start(text, ENDLESS_TOKENS) for text in texts]) as streams:
            since_s = time.perf_counter()
            joined = []
            for text in prompts("joins", round(sizes.measured_s * 2), sizes.short_words):
                joined.append(client.start(text, 4))
                await asyncio.sleep(0.5)
            until_s = time.perf_counter()
            _all_run(streams)
            ended = sum(stream.ended for stream in joined)
            gaps = [gap for s in streams for gap in gaps_s(s.stamps, since_s, until_s)]
            for stream in joined:
                await stream.close()
                stream.answer()  # one that was refused would have cost nothing
            return {
                "gap s (99th percentile)": percentile(gaps, 0.99),
                "gap s (median)": percentile(gaps, 0.5),
                "longest gap s": max(gaps),
                "tokens/s of the streams": len(gaps) / (until_s - since_s),
                "short requests ended": ended,
            }


def _all_run(streams: list[Stream]) -> None:
    if any(stream.ended for stream in streams):
        raise LoadFailed("a stream ended while it was measured")


async def shared_prefix(target: Target, sizes: Sizes) -> Figures:
    """Prompts that begin alike, four at a time."""
    async with connect(target) as client:
        words, shared = sizes.shared_words + sizes.own_words, sizes.shared_words
        texts = prompts("shared prefix", sizes.sharing_requests, words, shared=shared)
        answers = await client.ask_all(texts, 4, sizes.answer_tokens)
        return {
            "first token s (mean)": statistics.fmean(a.first_token_s for a in answers),
            "prompt tokens computed": sum(a.prompt_tokens - a.cached_tokens for a in answers),
        }


async def chats(target: Target, sizes: Sizes) -> Figures:
    """Chats at once; each turn sends the whole chat so far, with the answers as they were read."""
    async with connect(target) as client:
        said = await asyncio.gather(*(_chat(client, sizes, number) for number in range(sizes.chats)))
        answers = list(itertools.chain.from_iterable(said))
        return {
            "prompt tokens computed": sum(a.prompt_tokens - a.cached_tokens for a in answers),
            "prompt tokens": sum(a.prompt_tokens for a in answers),
            "first token s (mean)": statistics.fmean(a.first_token_s for a in answers),
        }


async def _chat(client: Client, sizes: Sizes, number: int) -> list[Answer]:
    messages, answers = list[dict[str, str]](), list[Answer]()
    for turn in range(sizes.turns):
        messages.append({"role": "user", "content": prompt(f"chat {number} {turn}", 40)})
        answer = await client.ask(messages, sizes.answer_tokens)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def sampled(target: Target, sizes: Sizes) -> Figures:
    """The uniform load with temperature and top_p."""
    clients = max(sizes.clients)
    async with connect(target) as client:
        texts = prompts("sampled", clients * sizes.requests_per_client, sizes.prompt_words)
        answers = await client.ask_all(texts, clients, sizes.answer_tokens, temperature=0.8, top_p=0.9)
        return {"tokens/s": tokens_per_s(answers), "output tokens": sum(a.completion_tokens for a in answers)}


async def tiny(target: Target, sizes: Sizes) -> Figures:
    """A model that costs next to nothing, many clients: what is left is the server."""
    clients = sizes.tiny_clients
    seen = await openai_load(target, sizes, clients)
    async with connect(target) as client:
        texts = prompts("tiny", clients * sizes.requests_per_client, sizes.prompt_words)
        answers = await client.ask_all(texts, clients, sizes.answer_tokens)
    return {
        "tokens/s": seen["output_tokens_per_s"],
        "tokens/s, lean client": tokens_per_s(answers),
        "first token s (median)": seen["ttft_s"]["p50"],
    }


TINY_BARS = {"tokens/s": at_least(3.0), "tokens/s, lean client": at_least(3.0)}
LOADS: dict[str, Load] = {
    "uniform": Load(
        uniform,
        {f"tokens/s, {n} clients": at_least(r) for n, r in ((1, 0.97), (4, 1.0), (8, 1.0), (16, 1.05))},
    ),
    "long_prompt": Load(
        long_prompt,
        {"longest gap of the streams s": at_most(0.1), "first token of the long prompt s": at_most(1.5)},
    ),
    "mixed_prompts": Load(mixed_prompts, {"all end s": at_most(0.8)}),
    "joining": Load(joining, {"gap s (99th percentile)": at_most(0.5)}),
    "shared_prefix": Load(shared_prefix, {"first token s (mean)": at_most(0.6)}),
    # Random answers, read and sent back, are other tokens than those that were said; digits are the same.
    "hybrid_chats": Load(chats, {"prompt tokens computed": at_most(0.35)}, model="tiny qwen3_next"),
    "hybrid_chats_digits": Load(chats, {}, model="tiny digits qwen3_next"),
    "sampled": Load(sampled, {"tokens/s": at_least(1.25)}),
    "tiny": Load(tiny, TINY_BARS, model="tiny llama"),
    # By default mlx_lm.server decodes 32 requests at once: with room for all 64 it is not held back by that.
    "tiny_raised": Load(
        tiny,
        TINY_BARS,
        model="tiny llama",
        options={"mlx_lm.server": ("--decode-concurrency", "64", "--prompt-concurrency", "64")},
    ),
}


async def warm(target: Target) -> None:
    """Two short requests at once: whatever a server does for the first time."""
    async with connect(target) as client:
        await client.ask_all(prompts("warm", 4, 48), 2, 16)


async def run(load: Load, target: Target, sizes: Sizes, *, limit_s: float) -> Figures:
    """The load's figures on a server that has just started. Raises LoadFailed."""
    try:
        async with asyncio.timeout(limit_s):
            await warm(target)
            return await load.run(target, sizes)
    except TimeoutError as exc:
        raise LoadFailed(f"it took longer than {limit_s:g} s") from exc
