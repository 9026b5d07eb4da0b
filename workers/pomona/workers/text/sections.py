"""The sections of an answer (content, reasoning, tool calls) and the marks between them.

Marks are found in the text, as in mlx-lm's server, not among the tokens: a model may spell a mark's last letters
together with what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .marks import Marks

# mlx-lm's names, because a tokenizer's response format speaks of them. Text of a section it names beyond these is
# the model's addressing ("to=user"), which nobody reads.
CONTENT = "normal"
REASONING = "reasoning"
CALL = "tool"
# A model that forgets to close its reasoning before a call; one that only speaks of the mark there must lose nothing.
REASONED_CALL = "tool in reasoning"
CALLS = frozenset({CALL, REASONED_CALL})

Edges = Mapping[str, Sequence[tuple[str, str]]]


class Tokenizer(Protocol):
    """The part of mlx-lm's TokenizerWrapper that says how a model marks sections."""

    has_thinking: bool
    think_start: Any
    think_end: Any
    has_tool_calling: bool
    tool_call_start: Any
    tool_call_end: Any
    structural_markers: Sequence[str]
    response_transitions: Edges


class Layout:
    """Which mark leads from which section into which; immutable."""

    def __init__(self, edges: Edges) -> None:
        self._next = {section: dict(leading) for section, leading in edges.items()}
        self._marks = {section: Marks(leading) for section, leading in self._next.items()}

    def __bool__(self) -> bool:
        return bool(self._next)

    def marks(self, section: str) -> Marks | None:
        """The marks that end this section."""
        return self._marks.get(section)

    def after(self, section: str, mark: str) -> str:
        """The section that the mark leads into."""
        return self._next[section][mark]


def layout_of(tokenizer: Tokenizer, *, reasoning: bool, calls: bool) -> Layout:
    """How the model's answers are laid out, as far as somebody wants to know: without either they are one section."""
    edges: dict[str, list[tuple[str, str]]] = {CONTENT: []}
    thinks = reasoning and tokenizer.has_thinking
    calls = calls and tokenizer.has_tool_calling
    formatted = tokenizer.response_transitions if reasoning else {}
    if thinks:
        edges[CONTENT].append((tokenizer.think_start, REASONING))
        edges[REASONING] = [(tokenizer.think_end, CONTENT)]
    if calls:
        _add_calls(edges, tokenizer, thinks=thinks)
    if calls and any(entered == CALL for leading in formatted.values() for _, entered in leading):
        edges[CONTENT].remove((tokenizer.tool_call_start, CALL))  # the response format says where calls may start
    if reasoning:
        edges[CONTENT] += [(marker, CONTENT) for marker in tokenizer.structural_markers]
    for section, leading in formatted.items():
        edges.setdefault(section, []).extend((mark, entered) for mark, entered in leading if calls or entered != CALL)
    return Layout({section: leading for section, leading in edges.items() if leading})


def _add_calls(edges: dict[str, list[tuple[str, str]]], tokenizer: Tokenizer, *, thinks: bool) -> None:
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    edges[CONTENT].append((start, CALL))
    edges[CALL] = [(end, CONTENT)] if end else []  # Mistral's calls go on to the end of the answer
    if thinks:
        edges[REASONING].append((start, REASONED_CALL))
        edges[REASONED_CALL] = [(end, REASONING)] if end else []
        edges[REASONED_CALL].append((tokenizer.think_end, CONTENT))


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of one section; `mark` is what ended the section there, and `entered` the section after it."""

    section: str
    text: str
    mark: str = ""
    entered: str = ""


class Sections:
    """Where an answer stands in its layout. Holds back only what may still become a mark."""

    def __init__(self, layout: Layout, section: str = CONTENT) -> None:
        self._layout = layout
        self.section = section
        self._held = ""

    def passes(self, text: str) -> bool:
        """Whether push(text) would return this text alone, of the section in force."""
        if self._held:
            return False
        marks = self._layout.marks(self.section)
        return marks is None or not marks.may_begin_in(text)

    def push(self, text: str) -> list[Segment]:
        """Add text; returns what is certain, the last segment being of the section in force."""
        return self._split(text, more_may_come=True)

    def flush(self) -> list[Segment]:
        """The answer ended: what was held back is no mark."""
        return self._split("", more_may_come=False)

    def _split(self, text: str, *, more_may_come: bool) -> list[Segment]:
        text, self._held = self._held + text, ""
        segments = []
        while marks := self._layout.marks(self.section):
            start, mark = marks.first(text, more_may_come=more_may_come)
            if not mark:
                text, self._held = text[:start], text[start:]
                break
            entered = self._layout.after(self.section, mark)
            segments.append(Segment(self.section, text[:start], mark, entered))
            text, self.section = text[start + len(mark) :], entered
        return [*segments, Segment(self.section, text)]
