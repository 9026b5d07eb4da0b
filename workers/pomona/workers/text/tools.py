"""From the text between a model's tool call marks to tool calls."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

from ..engine.base import ToolCall
from .deadline import Deadline

log = logging.getLogger(__name__)

# mlx-lm's parsers are mostly regular expressions, whose time grows with the square or the cube of what a model can be
# talked into writing (gemma4's: 4 s for 8,000 characters), and every other answer waits meanwhile. Honest calls of this
# size take some 20 ms.
MAX_CALL_CHARACTERS = 65_536
MAX_PARSE_S = 1.0

ParseText = Callable[[str, Any], Any]


def new_call_id() -> str:
    """An id in the form of OpenAI's own."""
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """A model's tool call parser, for one answer: each call has an id of its own."""

    def __init__(
        self,
        parse: ParseText,
        tools_json: str,
        new_id: Callable[[], str] = new_call_id,
        deadline: Deadline | None = None,
    ) -> None:
        self._parse = parse
        self._tools_json = tools_json
        self._new_id = new_id
        self._deadline = deadline or Deadline(MAX_PARSE_S)
        self._ids: set[str] = set()

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in the text between two marks, in order; none if it is malformed in any part."""
        try:
            tools = json.loads(self._tools_json)
            parsed = self._deadline.wait(lambda: self._parse(text, tools))
            found = parsed if isinstance(parsed, list) else [parsed]
            read = [(_name(call), _arguments(call), call.get("id")) for call in found]
        except (
            Exception
        ) as exc:  # the parser is a program over whatever a model wrote: it may raise anything, TimeoutError too
            log.info("a tool call of %d characters is malformed: %s", len(text), type(exc).__name__)
            return ()
        return tuple(ToolCall(self._id(proposed), name, arguments) for name, arguments, proposed in read)

    def _id(self, proposed: Any) -> str:
        """The model's own id where it gives one (its template may ask for it back), if it is new."""
        named = isinstance(proposed, str) and proposed.isprintable() and proposed not in self._ids
        call_id = proposed if named and proposed else self._new_id()
        self._ids.add(call_id)
        return str(call_id)


def _name(call: dict[str, Any]) -> str:
    name = call["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a call's name is a string")
    name.encode()  # a lone surrogate cannot be sent
    return name


def _arguments(call: dict[str, Any]) -> str:
    """The call's arguments as a JSON object. Raises ValueError or TypeError for what is none."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise TypeError("a call's arguments are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


class OpenCall:
    """The text of a call as it is written, up to the most that is still parsed."""

    def __init__(self, mark: str) -> None:
        self._parts = [mark]
        self._mark_characters = len(mark)
        self._characters = 0
        self.given_up = False

    def add(self, text: str) -> str:
        """Collect text; returns what turned out to be no call: all so far when it grew too long, then what follows."""
        self._parts.append(text)
        self._characters += len(text)
        if not self.given_up and self._characters <= MAX_CALL_CHARACTERS:
            return ""
        self.given_up = True
        return self.take_raw()

    def body(self) -> str:
        """The text after the mark."""
        return "".join(self._parts)[self._mark_characters :]

    def take_raw(self) -> str:
        """What the model wrote, its mark with it, as far as it was not taken before."""
        raw = "".join(self._parts)
        self._parts = []
        return raw
