"""From what an answer has to look like (schema, regex, choices) to the source text of an llguidance grammar. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from llguidance import LLMatcher, regex_to_lark

from pomona.v1 import inference_pb2

from ..errors import RequestError

MAX_SOURCE_BYTES = 64 * 1024
MAX_CHOICES = 1000
MAX_REASON_CHARACTERS = 300

# Free whitespace lets a small model write blanks until its tokens are spent, none at all takes the layout that it
# learnt from it. Between two parts of a JSON text: one line break, then the indentation of a deep level.
JSON_WHITESPACE = r"\n?[ \t]{0,32}"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """`foreign`: the client wrote it as a program of its own, so that compiling it may take any time and stack."""

    text: str
    param: str
    foreign: bool = False


def source_of(spec: inference_pb2.Grammar) -> GrammarSource:
    """The source of what the client asks for. Raises RequestError for what is too large or not well formed."""
    kind = spec.WhichOneof("kind")
    if kind == "json_schema":
        return GrammarSource(_json_source(spec.json_schema), "response_format", foreign=True)
    if kind == "json_object":
        return GrammarSource(_json_source('{"type": "object"}'), "response_format")
    if kind == "regex":
        return GrammarSource(_regex_source(spec.regex), "regex", foreign=True)
    if kind == "choice":
        return GrammarSource(_choice_source(list(spec.choice.choices)), "choice")
    raise RequestError("the grammar is empty: it needs a schema, a regex or choices", code="invalid_grammar")


def invalid_grammar(reason: str, param: str) -> RequestError:
    """The client's error, with the library's reason cut down to the line that says what is wrong."""
    lines = reason.strip().splitlines() or ["no reason is known"]
    # A regex error draws the place first and says what is wrong there after it.
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if said.startswith("NoExtension"):
        said = "nothing can satisfy it"
    said = said[:MAX_REASON_CHARACTERS].rstrip(" .:;")
    return RequestError(f"the grammar cannot be used: {said}", param=param, code="invalid_grammar")


def _check_size(text: str, param: str) -> None:
    if len(text.encode()) > MAX_SOURCE_BYTES:
        raise invalid_grammar(f"it is larger than {MAX_SOURCE_BYTES} bytes", param)


def _json_source(schema: str) -> str:
    _check_size(schema, "response_format")
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            # Overrides, so that a schema's own "x-guidance" cannot turn what we do not enforce into what we ignore.
            overrides={
                "item_separator": ",",
                "key_separator": ":",
                "whitespace_flexible": True,
                "whitespace_pattern": JSON_WHITESPACE,
                "coerce_one_of": False,
                "lenient": False,
            },
        )
    except ValueError as exc:
        raise invalid_grammar(f"the schema is not a JSON object: {exc}", "response_format") from exc


def _regex_source(regex: str) -> str:
    """`\\d` and `\\w` are ASCII, as they are in a schema's patterns."""
    _check_size(regex, "regex")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # the library would drop it
        raise invalid_grammar("the regex ends with a lone backslash", "regex")
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, 'dw')}/")


def _choice_source(choices: list[str]) -> str:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise invalid_grammar(f"there are {len(choices)} choices, and 1 to {MAX_CHOICES} are possible", "choice")
    _check_size("".join(choices), "choice")
    # Lark's string literals are JSON's, as long as they are ASCII.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
