"""Answers without a model: a tokenizer whose tokens are any pieces of text, and what TextMaker makes of them."""

from __future__ import annotations

import json
from itertools import count

from hypothesis import strategies as st

from pomona.workers.engine.base import EngineRequest, Piece
from pomona.workers.text.maker import TextMaker

WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
THINK = ("<think>", "</think>")
EOS = 0


class FakeDetokenizer:
    """Token i is the i-th piece; `tail` is what it still holds when the answer ends."""

    def __init__(self, pieces, tail=""):
        self._pieces = pieces
        self._tail = tail
        self.last_segment = ""

    def add_token(self, token):
        self.last_segment = self._pieces[token]

    def finalize(self):
        self.last_segment = self._tail


class FakeTokenizer:
    """mlx-lm's TokenizerWrapper with the marks asked for; `parser` is a module of mlx_lm.tool_parsers."""

    structural_markers = ()
    response_transitions = {}  # noqa: RUF012 (as on mlx-lm's wrapper)
    response_initial_state = None
    eos_token_ids = frozenset({EOS})

    def __init__(self, *, think=None, parser=None):
        self.pieces = ["<eos>"]
        self.has_thinking = think is not None
        self.think_start, self.think_end = think or (None, None)
        self.think_start_tokens = self.tokens([self.think_start]) if think else None
        self.think_end_tokens = self.tokens([self.think_end]) if think else None
        self.has_tool_calling = parser is not None
        self.tool_parser = parser and parser.parse_tool_call
        self.tool_call_start = parser and parser.tool_call_start
        self.tool_call_end = parser and parser.tool_call_end

    @property
    def detokenizer(self):
        return FakeDetokenizer(self.pieces)

    def tokens(self, texts):
        """An id for each of the texts, the same for the same text."""
        self.pieces += [text for text in dict.fromkeys(texts) if text not in self.pieces]
        return tuple(map(self.pieces.index, texts))


def pieces_of(tokenizer, texts, *, prompt=(), tools=WEATHER, resumed=0, **fields):
    """Each piece of an answer that comes in these texts, finish() last, up to a stop. Ids are id-1, id-2 and so on."""
    tools_json = json.dumps(tools) if tools else ""
    answer = tokenizer.tokens(texts)
    request = EngineRequest("r", (*prompt, *answer[:resumed]), tools_json=tools_json, **fields)
    numbers = count(1)
    text = TextMaker(tokenizer, lambda: f"id-{next(numbers)}").new(request, resumed)
    pieces = []
    for token in answer[resumed:]:
        pieces.append(text.push(token))
        if pieces[-1].stopped:
            return pieces
    return [*pieces, text.finish()]


def joined(pieces):
    """One piece of them all."""
    return Piece(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
        any(piece.stopped for piece in pieces),
    )


def read(tokenizer, *texts, **fields):
    """The whole of an answer that comes in these texts."""
    return joined(pieces_of(tokenizer, texts, **fields))


def calls_of(piece):
    """Names and arguments of the piece's calls."""
    return [(call.name, json.loads(call.arguments_json)) for call in piece.tool_calls]


@st.composite
def cut(draw, texts):
    """A text, and the same in arbitrary parts, some of them empty."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
