"""A text for each answer of one model: what its tokenizer marks, and what the request wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..engine.base import EngineRequest, Text
from . import sections
from .answer import Answer
from .content import Before
from .deadline import Deadline
from .detokenizer import detokenizers
from .sections import CONTENT, REASONING, Layout, Sections
from .stops import StopMatcher
from .stream import TextStream
from .tools import MAX_PARSE_S, CallParser, new_call_id


class Tokenizer(sections.Tokenizer, Protocol):
    """The part of mlx-lm's TokenizerWrapper that answers need, beside its detokenizer."""

    think_start_tokens: Sequence[int] | None
    think_end_tokens: Sequence[int] | None
    eos_token_ids: Any
    response_initial_state: str | None
    tool_parser: Any


class TextMaker:
    """Built once a model; `new` costs microseconds, and may be called from any one thread."""

    def __init__(self, tokenizer: Tokenizer, new_id: Callable[[], str] = new_call_id) -> None:
        self._tokenizer = tokenizer
        self._new_detokenizer = detokenizers(tokenizer)
        self._new_id = new_id
        self._deadline = Deadline(MAX_PARSE_S)  # one for all answers: what they leave behind shares the cores
        self._start = tuple(tokenizer.think_start_tokens or ())
        self._end = tuple(tokenizer.think_end_tokens or ())
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._telling = self._eos.union(self._start[:1], self._end[:1])
        self._layouts = {
            (reasoning, calls): sections.layout_of(tokenizer, reasoning=reasoning, calls=calls)
            for reasoning in (False, True)
            for calls in (False, True)
        }

    def new(self, request: EngineRequest, resumed_tokens: int = 0) -> Text:
        """The text of this request's answer.

        The last `resumed_tokens` of the prompt are the answer's own, whose text was sent before: it goes on as if it
        had seen them, inside a call or a stop string too.
        """
        calls = bool(request.tools_json) and self._tokenizer.has_tool_calling
        layout = self._layouts[not request.keep_reasoning_in_text, calls]
        answer_at = len(request.prompt) - resumed_tokens
        answer = None
        if layout or any(request.stop):
            answer = self._answer(request, layout, request.prompt[:answer_at])
        text = TextStream(self._new_detokenizer(), answer)
        for token in request.prompt[answer_at:]:
            text.push(token)
        return text

    def _answer(self, request: EngineRequest, layout: Layout, prompt: tuple[int, ...]) -> Answer:
        section, before = CONTENT, None
        if layout:
            section = CONTENT if request.keep_reasoning_in_text else self._first_section(prompt)
            before = Before.REASONING if section == REASONING else Before.NOTHING
        parser = CallParser(self._tokenizer.tool_parser, request.tools_json, self._new_id, self._deadline)
        return Answer(
            Sections(layout, section),
            StopMatcher(request.stop),
            parser=parser,
            calls_end_with_the_answer=not self._tokenizer.tool_call_end,
            before=before,
        )

    def _first_section(self, prompt: tuple[int, ...]) -> str:
        if self._tokenizer.response_initial_state:
            return self._tokenizer.response_initial_state
        return REASONING if self._start and self._ends_in_reasoning(prompt) else CONTENT

    def _ends_in_reasoning(self, prompt: tuple[int, ...]) -> bool:
        """Whether the prompt opened a reasoning block that it did not close.

        As in mlx-lm's server, but only back to the last EOS: before it are other turns, and a user who writes the
        mark there opens nothing.
        """
        for back, token in enumerate(reversed(prompt), 1):
            if token not in self._telling:
                continue
            at = len(prompt) - back
            if prompt[at : at + len(self._start)] == self._start:
                return True
            if token in self._eos or prompt[at : at + len(self._end)] == self._end:
                return False
        return False
