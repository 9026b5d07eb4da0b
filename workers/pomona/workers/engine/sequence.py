"""One request inside the runner: its tokens, how far they are computed, and what its next token depends on."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from .base import Admitted, FinishReason, Matcher
from .sampling import RowSampler


class Sequence:
    """`tokens` is prompt and answer; the first `position` of them are in the caches."""

    def __init__(self, admitted: Admitted, *, eos: Collection[int], vocab_size: int) -> None:
        request = admitted.request
        self.request = request
        self.request_id = request.request_id
        self.max_tokens = admitted.max_tokens
        self.tokens = [*request.prompt, *admitted.generated]
        self.position = 0
        self.cached = 0
        self.cuts: set[int] = set()  # where the prompt is cut for the sake of a snapshot
        self.snapshot_at = 0
        self.caches: list[Any] | None = None  # mlx-lm's, until the sequence has a row
        self.stop_ids = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(eos))
        self.matcher: Matcher | None = request.grammar.matcher() if request.grammar is not None else None
        said = (*request.prompt[len(request.prompt) - request.resumed_tokens :], *admitted.generated)
        if self.matcher is not None:  # a resumed request's grammar begins after what was said elsewhere
            for token in admitted.generated:
                self.matcher.accept(token)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        self.sampler = RowSampler(request, said, vocab_size=vocab_size, stop_ids=self.stop_ids, seed=seed)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def add(self, token: int) -> FinishReason | None:
        """The next token of the answer; says whether it ends it."""
        self.tokens.append(token)
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.matcher is not None:
            self.matcher.accept(token)
        return FinishReason.LENGTH if self.generated >= self.max_tokens else None
