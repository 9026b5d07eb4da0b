"""An answer's text, sorted as it comes: content up to a stop string, reasoning, tool calls.

Text of a call that is malformed or not closed goes where the call stood, marks and all: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.base import Piece, ToolCall
from .content import Before, Content
from .sections import CALL, CALLS, CONTENT, REASONED_CALL, REASONING, Sections, Segment
from .stops import StopMatcher
from .tools import CallParser, OpenCall


class Answer:
    """Turns the text of one answer into pieces. The same text gives the same, however it is cut into chunks."""

    def __init__(
        self,
        sections: Sections,
        stops: StopMatcher,
        *,
        parser: CallParser | None = None,
        calls_end_with_the_answer: bool = False,
        before: Before | None = None,
    ) -> None:
        """`before`: what the content follows, None if its first whitespace is never held back."""
        self._sections = sections
        self._content = Content(stops, before)
        self._parser = parser
        self._calls_end_with_the_answer = calls_end_with_the_answer
        self._open: OpenCall | None = None
        self._text = self._reasoning = ""
        self._calls: tuple[ToolCall, ...] = ()
        self._stopped = False

    def push(self, text: str) -> Piece:
        """Add text; returns what is certain of it."""
        if self._sections.passes(text):  # nearly every token: this way costs a third
            if self._sections.section == CONTENT:
                said, stopped = self._content.push(text)
                return Piece(said, stopped=stopped)
            if self._sections.section == REASONING:
                return Piece(reasoning=text)
        self._take_all(self._sections.push(text))
        return self._piece()

    def finish(self, text: str) -> Piece:
        """The answer ended with this text; returns it and what was held back."""
        self._take_all(self._sections.push(text))
        self._take_all(self._sections.flush())
        if self._open is not None:
            closed = self._calls_end_with_the_answer
            self._close(self._sections.section, self._parsed(self._open) if closed else (), "")
        if not self._stopped:
            held, self._stopped = self._content.flush()
            self._text += held
        return self._piece()

    def _take_all(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if self._stopped:
                return
            self._take(segment)

    def _take(self, segment: Segment) -> None:
        if segment.section in CALLS:
            self._collect(segment)
        elif segment.section == REASONING:
            self._reasoning += segment.text
        elif segment.section == CONTENT:
            self._say(segment.text)
        if segment.entered in CALLS:
            self._open = OpenCall(segment.mark)
        elif segment.entered == REASONING:
            self._content.begin(Before.REASONING)

    def _collect(self, segment: Segment) -> None:
        assert self._open is not None, "a call opens with its mark"
        self._unparsed(segment.section, self._open.add(segment.text))
        if not segment.mark:
            return
        if segment.section == REASONED_CALL and segment.entered == CONTENT:
            self._close(segment.section, (), "")  # the reasoning ended first: it only spoke of a call
        else:
            self._close(segment.section, self._parsed(self._open), segment.mark)

    def _parsed(self, call: OpenCall) -> tuple[ToolCall, ...]:
        return self._parser.calls(call.body()) if self._parser is not None and not call.given_up else ()

    def _close(self, section: str, calls: tuple[ToolCall, ...], mark: str) -> None:
        assert self._open is not None
        if calls:
            self._calls += calls
            if section == CALL:
                self._content.begin(Before.CALL)
        else:
            self._unparsed(section, self._open.take_raw() + mark)
        self._open = None

    def _unparsed(self, section: str, text: str) -> None:
        if section == REASONED_CALL:
            self._reasoning += text
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        if not self._stopped:
            said, self._stopped = self._content.push(text)
            self._text += said

    def _piece(self) -> Piece:
        piece = Piece(self._text, self._reasoning, self._calls, self._stopped)
        self._text = self._reasoning = ""
        self._calls = ()
        return piece
