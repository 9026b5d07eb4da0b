"""Which prompts get a step's prompt tokens, and which wait because another is computing what they share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .base import Chunk
from .pace import MIN_CHUNK_TOKENS
from .requests import Hold, Live

STARVED_STEPS = 4
SHARED_MIN_TOKENS = 32
OVERRUN_TOKENS = 32


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with. Compares slices, which runs in C, and no more than twice what is shared."""
    end = min(len(one), len(other))
    low, step = 0, SHARED_MIN_TOKENS
    while low < end:
        high = min(low + step, end)
        if one[low:high] != other[low:high]:
            break
        low, step = high, 2 * step
    else:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def find_hold(prompt: Sequence[int], prefilling: Iterable[Live]) -> Hold | None:
    """What a new prompt should wait for: the prefix that one of `prefilling` shares with it and has yet to compute.

    None unless that is at least SHARED_MIN_TOKENS and a third of the prompt. Of several the longest counts; where
    that is computed already there is nothing to wait for.
    """
    longest = max(SHARED_MIN_TOKENS, -(-len(prompt) // 3)) - 1
    hold = None
    for other in prefilling:
        theirs = other.request.prompt
        # Only one that goes on alike after the longest so far can share more: a burst costs one comparison each.
        if longest >= min(len(prompt), len(theirs)) or prompt[longest] != theirs[longest]:
            continue
        shared = min(common_prefix(prompt, theirs), len(prompt) - 1)  # the last is computed by each for itself
        if shared > longest:
            longest = shared
            hold = Hold(other, shared) if other.position < shared else None
    return hold


def release_holds(prefilling: Iterable[Live], step: int) -> list[Live]:
    """End the holds that are over; returns the prompts that may have a chunk. To be called once in every step."""
    free = []
    for live in prefilling:
        if live.hold is not None and live.hold.over:
            if live.hold.computed:
                # What it will find in the cache; else it would look long, and take a budget that it does not need.
                # Should the cache have lost it, the runner's next word puts this right.
                live.position = min(live.hold.tokens, live.known_tokens - 1)
            # For good: its source may be preempted and come back behind it, and then wait for it.
            live.hold = None
        if live.hold is not None:
            live.served_step = step
        elif live.remaining_tokens > 0:
            free.append(live)
    return free


def share(budget_tokens: int, prompts: Sequence[Live], step: int) -> tuple[Chunk, ...]:
    """Divide a step's budget: shortest remaining prompt first, but nobody starves.

    First the prompt that has been without a chunk for longest, if that is more than STARVED_STEPS steps, gets a quarter
    of the budget; only one a step, since all of them at once would cut every step into crumbs. Then the shortest gets
    what it needs, and so on. So each prompt that is not held gets a chunk in any STARVED_STEPS + P consecutive steps,
    P being how many prefill: once starved it waits only for those that starve longer, and each step serves one.

    No chunk is under MIN_CHUNK_TOKENS unless the budget is, or it ends its prompt; one that nearly ends its prompt ends
    it, by half of what was left and OVERRUN_TOKENS at most: the rest would need a pass of its own.
    """
    least = min(MIN_CHUNK_TOKENS, budget_tokens)
    given: dict[Live, int] = {}
    starved = [live for live in prompts if step - live.served_step > STARVED_STEPS]
    if starved:
        first = min(starved, key=lambda live: (live.served_step, live.rank))
        given[first] = min(first.remaining_tokens, max(least, budget_tokens // 4))
    left = budget_tokens - sum(given.values())
    for live in _shortest_first(prompts):
        if left <= 0:
            break
        had = given.get(live, 0)
        most = had + left + min(OVERRUN_TOKENS, left // 2)
        tokens = live.remaining_tokens if live.remaining_tokens <= most else had + left
        if tokens > had and (tokens >= least or tokens == live.remaining_tokens):
            given[live] = tokens
            left -= tokens - had
    for live in given:
        live.served_step = step
    return tuple(Chunk(live.request_id, tokens, live.next_cut) for live, tokens in given.items())


def spare(chunks: Sequence[Chunk], prompts: Iterable[Live]) -> tuple[Chunk, ...]:
    """Whole rests of the prompts without a chunk, the shortest first: they take what reuse saves the others."""
    given = {chunk.request_id for chunk in chunks}
    left_out = _shortest_first(live for live in prompts if live.request_id not in given)
    return tuple(Chunk(live.request_id, live.remaining_tokens, live.next_cut) for live in left_out)


def _shortest_first(prompts: Iterable[Live]) -> list[Live]:
    return sorted(prompts, key=lambda live: (live.remaining_tokens, live.rank))
