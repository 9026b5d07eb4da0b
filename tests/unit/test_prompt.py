"""PromptEncoder: every kind of prompt becomes ids, and every mistake the client's error."""

import json

import pytest

from pomona.v1.inference_pb2 import ChatPrompt, GenerateRequest, TokenPrompt
from pomona.workers.errors import RequestError
from pomona.workers.text.prompt import RESERVED, PromptEncoder

BOS, VOCABULARY = 1, 1000
MESSAGES = [{"role": "user", "content": "hi"}]


class FakeTokenizer:
    """A token a character (its code point); encode puts BOS (1) first when asked for special tokens."""

    def __init__(
        self,
        *,
        has_chat_template=True,
        has_tool_calling=True,
        bos_token="<s>",
        template=None,
        chat_template="{% for tool in tools %}",
    ):
        self.has_chat_template = has_chat_template
        self.has_tool_calling = has_tool_calling
        self.chat_template = chat_template
        self.bos_token = bos_token
        self._template = template or (lambda messages, **_: [ord(c) for m in messages for c in m["content"]])
        self.calls = []

    def apply_chat_template(self, messages, **kwargs):
        self.calls.append((messages, kwargs))
        return self._template(messages, **kwargs)

    def encode(self, text, *, add_special_tokens=True):
        return [BOS] * add_special_tokens + [ord(c) for c in text]


def encode(request, tokenizer=None):
    return PromptEncoder(tokenizer or FakeTokenizer(), VOCABULARY).encode(request)


def chat(messages=MESSAGES, arguments=None, **fields):
    rendered = "" if arguments is None else json.dumps(arguments)
    return GenerateRequest(
        chat=ChatPrompt(messages_json=json.dumps(messages), template_arguments_json=rendered, **fields)
    )


def ids_of(text):
    return tuple(ord(c) for c in text)


def raising(error):
    def template(messages, **_):
        raise error

    return template


def test_messages_are_rendered_by_the_template_with_a_generation_prompt():
    tokenizer = FakeTokenizer()
    assert encode(chat(), tokenizer) == ids_of("hi")
    assert tokenizer.calls == [(MESSAGES, {"add_generation_prompt": True})]


def test_a_final_message_is_continued_instead():
    tokenizer = FakeTokenizer()
    encode(chat(continue_final_message=True), tokenizer)
    assert tokenizer.calls == [(MESSAGES, {"continue_final_message": True})]


def test_template_arguments_reach_the_template_beside_the_generation_prompt():
    tokenizer = FakeTokenizer()
    encode(chat(arguments={"enable_thinking": False, "documents": []}), tokenizer)
    assert tokenizer.calls[0][1] == {"enable_thinking": False, "documents": [], "add_generation_prompt": True}


OURS = ["add_generation_prompt", "chat_template", "continue_final_message", "messages", "tokenize", "tools"]


@pytest.mark.parametrize("name", sorted({*RESERVED, *OURS}))
@pytest.mark.parametrize("continued", [False, True], ids=["new", "continued"])
def test_a_template_argument_that_is_the_servers_to_say_is_refused(name, continued):
    tokenizer = FakeTokenizer()
    with pytest.raises(RequestError, match=f"chat_template_kwargs must not name {name}") as caught:
        encode(chat(arguments={"enable_thinking": True, name: None}, continue_final_message=continued), tokenizer)
    assert (caught.value.param, caught.value.status) == ("chat_template_kwargs", 400)
    assert tokenizer.calls == []


def test_all_refused_template_arguments_are_named():
    with pytest.raises(RequestError, match=r"must not name tokenize, truncation$"):
        encode(chat(arguments={"truncation": True, "fine": 1, "tokenize": False}))


TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("template", ["{% if tools %}", None, {"tool_use": "x"}], ids=["text", "code", "several"])
def test_tools_reach_the_template(template):
    tokenizer = FakeTokenizer(chat_template=template)
    encode(chat(arguments={"enable_thinking": True}, tools_json=json.dumps(TOOLS)), tokenizer)
    assert tokenizer.calls[0][1] == {"enable_thinking": True, "tools": TOOLS, "add_generation_prompt": True}


def test_no_tools_are_not_named_to_the_template():
    tokenizer = FakeTokenizer(has_tool_calling=False)
    encode(chat(tools_json="[]"), tokenizer)
    assert tokenizer.calls[0][1] == {"add_generation_prompt": True}


@pytest.mark.parametrize("lacking", [{"has_tool_calling": False}, {"chat_template": "{{ messages }} {{ toolset }}"}])
def test_tools_for_a_model_that_cannot_call_any_are_refused(lacking):
    tokenizer = FakeTokenizer(**lacking)
    with pytest.raises(RequestError, match="no tool calling") as caught:
        encode(chat(tools_json=json.dumps(TOOLS)), tokenizer)
    assert (caught.value.param, caught.value.status, tokenizer.calls) == ("tools", 400, [])


@pytest.mark.parametrize("tools", ["{}", "null", "not json", "[" * 100_000])
def test_tools_that_are_no_list_are_an_error_about_them(tools):
    with pytest.raises(RequestError, match="tools") as caught:
        encode(chat(tools_json=tools))
    assert caught.value.param == "tools"


def called(arguments, **message):
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}], **message}


def rendered(*messages):
    """The messages as the template gets them."""
    tokenizer = FakeTokenizer(template=lambda messages, **_: [])
    encode(chat(list(messages)), tokenizer)
    return tokenizer.calls[0][0]


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ('{"zone": "CET"}', {"zone": "CET"}),
        ("{}", {}),
        ("", {}),
        ({"zone": "CET"}, {"zone": "CET"}),
        ('{"zone": ', '{"zone": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        (None, None),
    ],
    ids=["object", "empty object", "nothing", "no text", "no json", "a list", "deep", "null"],
)
def test_the_arguments_of_earlier_calls_are_objects_to_the_template_where_they_can_be(sent, seen):
    assert rendered(called(sent, content="so")) == [called(seen, content="so")]


def test_content_that_is_null_or_absent_is_empty_to_the_template():
    said = {"role": "user", "content": "a"}
    assert rendered({"role": "assistant", "content": None}, {"role": "assistant"}, said) == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        said,
    ]


@pytest.mark.parametrize("calls", [None, "x", ["x"], [{}], [{"function": "x"}], [{"function": {}}], []])
def test_earlier_calls_in_another_form_are_left_to_the_template(calls):
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert rendered(message) == [message]


def test_messages_that_are_no_objects_are_left_to_the_template():
    assert rendered("hi") == ["hi"]


def test_text_gets_the_special_tokens():
    assert encode(GenerateRequest(text="hi")) == (BOS, *ids_of("hi"))


def test_text_that_spells_out_the_bos_token_gets_no_second_one():
    assert encode(GenerateRequest(text="<s>hi")) == ids_of("<s>hi")


def test_a_tokenizer_without_a_bos_token_decides_for_itself():
    assert encode(GenerateRequest(text="<s>"), FakeTokenizer(bos_token=None)) == (BOS, *ids_of("<s>"))


def test_empty_text_is_a_prompt_of_special_tokens():
    assert encode(GenerateRequest(text="")) == (BOS,)


def test_ids_are_taken_as_they_are():
    assert encode(GenerateRequest(tokens=TokenPrompt(ids=[5, 0, 999]))) == (5, 0, 999)


def test_a_request_without_a_prompt_is_refused():
    with pytest.raises(RequestError, match="no prompt") as caught:
        encode(GenerateRequest())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("error", [ValueError("roles must alternate"), TypeError("a list"), RuntimeError("whatever")])
def test_whatever_the_template_raises_is_an_error_about_the_messages(error):
    with pytest.raises(RequestError, match=str(error)) as caught:
        encode(chat(), FakeTokenizer(template=raising(error)))
    assert (caught.value.param, caught.value.status) == ("messages", 400)
    assert caught.value.__cause__ is error


def test_template_arguments_that_are_no_object_are_an_error_about_them():
    with pytest.raises(RequestError, match="chat_template_kwargs must be a JSON object") as caught:
        encode(chat(arguments=["not", "an", "object"]))
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("messages", [{"role": "user", "content": "hi"}, "hi", None], ids=["object", "string", "null"])
def test_messages_that_are_no_list_are_an_error_about_them(messages):
    with pytest.raises(RequestError, match="messages must be a JSON list") as caught:
        encode(chat(messages))
    assert caught.value.param == "messages"


def test_messages_to_a_model_without_a_template_name_the_other_endpoint():
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        encode(chat(), FakeTokenizer(has_chat_template=False))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("error", [TypeError("bad text"), ValueError("bad text")])
def test_text_that_cannot_be_tokenised_is_an_error_about_the_prompt(error):
    class Refusing(FakeTokenizer):
        def encode(self, text, **_):
            raise error

    with pytest.raises(RequestError, match="cannot be tokenised: bad text") as caught:
        encode(GenerateRequest(text="x"), Refusing())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("ids", [[VOCABULARY], [1, 2, 2**32 - 1]])
def test_ids_outside_the_vocabulary_are_named(ids):
    with pytest.raises(RequestError, match=f"token id {ids[-1]} is outside the vocabulary of {VOCABULARY}") as caught:
        encode(GenerateRequest(tokens=TokenPrompt(ids=ids)))
    assert caught.value.param == "prompt"


def test_resumed_ids_must_be_of_the_vocabulary_too():
    with pytest.raises(RequestError, match="token id 1000"):
        encode(GenerateRequest(text="hi", resume_ids=[VOCABULARY]))


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (GenerateRequest(text="hi"), (BOS, *ids_of("hi"))),
        (GenerateRequest(tokens=TokenPrompt(ids=[5])), (5,)),
        (chat(), ids_of("hi")),
    ],
    ids=["text", "tokens", "chat"],
)
def test_ids_to_resume_from_come_after_any_prompt(request_, prompt):
    request_.resume_ids.extend([7, 8])
    assert encode(request_) == (*prompt, 7, 8)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt(messages_json="not json"), "messages"),
        (ChatPrompt(messages_json=""), "messages"),
        (ChatPrompt(messages_json="[" * 100_000), "messages"),
        (ChatPrompt(messages_json="[]", template_arguments_json="not json"), "chat_template_kwargs"),
        (ChatPrompt(messages_json="[]", template_arguments_json='{"a":' * 100_000), "chat_template_kwargs"),
    ],
    ids=["messages", "no messages", "deep messages", "arguments", "deep arguments"],
)
def test_broken_json_is_the_callers_error(prompt, param):
    tokenizer = FakeTokenizer()
    with pytest.raises(RequestError, match=f"{param} is not JSON") as caught:
        encode(GenerateRequest(chat=prompt), tokenizer)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert tokenizer.calls == []
