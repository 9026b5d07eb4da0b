"""What clients may ask of an answer's form, under OpenAI's, vLLM's and SGLang's names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pomona.cluster.gateway.schema import ChatBody, CompletionBody, parse, to_generate_requests
from pomona.v1.inference_pb2 import Grammar
from pomona.workers.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"const": "ğ"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f"}}
BY_SCHEMA = Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False))
ANY_OBJECT = Grammar(json_object=True)
REGEX = Grammar(regex="a+")
CHOICE = Grammar(choice=Grammar.Choice(choices=["yes", "no"]))


def grammar(**fields: Any) -> Grammar | None:
    """What the worker is told."""
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}], **fields}
    (request,) = to_generate_requests(parse(ChatBody, json.dumps(body).encode()), "r")
    return request.grammar if request.HasField("grammar") else None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, BY_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}, BY_SCHEMA),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"guided_json": {}}, Grammar(json_schema="{}")),
        ({"guided_regex": "a+"}, REGEX),
        ({"guided_choice": ["yes", "no"]}, CHOICE),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, BY_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, REGEX),
        ({"structured_outputs": {"choice": ["yes", "no"], "disable_any_whitespace": False}}, CHOICE),
        ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"regex": "a+"}, REGEX),
        ({"response_format": {"type": "text"}, "regex": "a+"}, REGEX),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "none"}, ANY_OBJECT),
        ({"response_format": {"type": "text"}, "tools": [TOOL]}, None),
        ({}, None),
    ],
)
def test_every_name_of_a_form_becomes_one_grammar(fields: dict[str, Any], expected: Grammar | None) -> None:
    assert grammar(**fields) == expected


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        *[("response_format", {"response_format": value}) for value in ("json_object", {}, {"type": "xml"})],
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}),
        ("response_format", {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}),
        *[("guided_json", {"guided_json": value}) for value in (1, [], "[1]", "{", {"a": float("nan")}, '{"a": NaN}')],
        *[("json_schema", {"json_schema": value}) for value in (True, "text")],
        *[(name, {name: value}) for name in ("guided_regex", "regex") for value in (5, "")],
        *[("guided_choice", {"guided_choice": value}) for value in ("yes", [1], [""])],
        *[("structured_outputs", {"structured_outputs": value}) for value in ("a", {}, {"json_object": False})],
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
        ("structured_outputs", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {"json": SCHEMA, "json_object": True}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "grammar": "root ::= a"}}),
        ("guided_regex", {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
        ("regex", {"guided_choice": ["a"], "regex": "a"}),
        ("json_schema", {"structured_outputs": {"regex": "a"}, "json_schema": "{}"}),
        ("response_format", {"response_format": {"type": "json_object"}, "tools": [TOOL]}),
        ("guided_regex", {"guided_regex": "a", "tools": [TOOL]}),
    ],
)
def test_a_form_that_cannot_be_had_names_its_parameter(param: str, fields: dict[str, Any]) -> None:
    """Wrong types, half a schema, two forms at once, a form that forbids the tools."""
    with pytest.raises(RequestError) as caught:
        grammar(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)
    assert str(caught.value).endswith(".")


def test_completions_take_forms_too_and_every_choice_has_its_own() -> None:
    body = {"model": "M", "prompt": ["a", "b"], "n": 2, "guided_choice": ["yes", "no"]}
    requests = to_generate_requests(parse(CompletionBody, json.dumps(body).encode()), "r")
    assert [request.grammar for request in requests] == [CHOICE] * 4


def test_errors_about_a_schema_never_echo_it() -> None:
    with pytest.raises(RequestError) as caught:
        grammar(guided_json='{"hunter2"')
    assert "hunter2" not in str(caught.value)
    assert "The body is not" not in str(caught.value)
