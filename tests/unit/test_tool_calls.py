"""Tool calls: read by mlx-lm's own parsers, whole, and nothing lost of what is none."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import gemma4, glm47, json_tools, kimi_k2, mistral, pythonic, qwen3_coder

from pomona.workers.engine.base import Piece, ToolCall
from pomona.workers.text import tools
from pomona.workers.text.deadline import Deadline
from pomona.workers.text.tools import CallParser, new_call_id
from texts import THINK, WEATHER, FakeTokenizer, calls_of, cut, joined, pieces_of, read

PARIS = {"city": "Paris", "days": 3}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris", '
    '"days": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
SPELLED = {
    "json_tools": (json_tools, CALL),
    "qwen3_coder": (qwen3_coder, CODER),
    "mistral": (mistral, '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}'),
    "mistral, older": (mistral, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}]'),
    "pythonic": (pythonic, '<|tool_call_start|>[weather(city="Paris", days=3)]<|tool_call_end|>'),
    "gemma4": (gemma4, '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'),
    "glm47": (
        glm47,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    ),
    "kimi_k2": (kimi_k2, KIMI),
}
spelled = pytest.mark.parametrize(("parser", "text"), SPELLED.values(), ids=SPELLED)


def hermes(**kwargs):
    return FakeTokenizer(parser=json_tools, **kwargs)


def call(arguments='{"city": "Paris", "days": 3}', name="weather"):
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


@spelled
def test_a_call_is_read_as_its_model_spells_it_and_is_no_text(parser, text):
    piece = read(FakeTokenizer(parser=parser), text)
    assert (calls_of(piece), piece.text, piece.reasoning) == ([("weather", PARIS)], "", "")


@spelled
def test_a_call_is_the_same_letter_by_letter_and_no_mark_shows_meanwhile(parser, text):
    pieces = pieces_of(FakeTokenizer(parser=parser), list(text))
    assert calls_of(joined(pieces)) == [("weather", PARIS)]
    assert not any(piece.text or piece.reasoning for piece in pieces)


@spelled
def test_without_tools_in_the_request_the_same_is_text(parser, text):
    assert read(FakeTokenizer(parser=parser), *text, tools=None) == Piece(text)


def test_a_model_without_tool_calling_writes_text():
    assert read(FakeTokenizer(), CALL) == Piece(CALL)


def test_a_call_goes_out_whole_with_its_last_letter():
    pieces = pieces_of(hermes(), ["Well. ", *CALL])
    assert [len(piece.tool_calls) for piece in pieces[-2:]] == [1, 0]
    assert joined(pieces[:-2]) == Piece("Well. ")


# -- several calls, and what stands around them -----------------------------------------------------------------


def test_calls_keep_their_order_and_have_different_ids():
    two = read(hermes(), call(name="first"), "\n", call(name="second"))
    assert [(c.id, c.name) for c in two.tool_calls] == [("id-1", "first"), ("id-2", "second")]


def test_one_mark_may_hold_several_calls():
    piece = read(FakeTokenizer(parser=pythonic), "<|tool_call_start|>[a(x=1), b(y='2')]<|tool_call_end|>")
    assert calls_of(piece) == [("a", {"x": 1}), ("b", {"y": "2"})]


@pytest.mark.parametrize("before", ["", "\n\n"])
@pytest.mark.parametrize("between", ["", "\n", " \n\t"])
@pytest.mark.parametrize("after", ["", "\n"])
def test_whitespace_around_calls_is_no_content(before, between, after):
    piece = read(hermes(), *f"{before}{CALL}{between}{CALL}{after}")
    assert (len(piece.tool_calls), piece.text) == (2, "")


def test_text_around_calls_keeps_its_whitespace():
    piece = read(hermes(), *f" Let me see.\n\n{CALL}\n\nDone. ")
    assert (len(piece.tool_calls), piece.text) == (1, " Let me see.\n\n\n\nDone. ")


def test_an_answer_of_whitespace_alone_is_that():
    assert read(hermes(), " ", "\n") == Piece(" \n")


# -- what is no call --------------------------------------------------------------------------------------------

MALFORMED = [
    "<tool_call>not json</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>',
    f"<tool_call>{'[' * 5_000}</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>null</tool_call>",
    '<tool_call>"weather"</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    call(name=""),
    call(name=7),
    call(name="\ud800"),
    call("[1]"),
    call('"no object"'),
    call('"[1]"'),
    call('{"days": NaN}'),
    call('{"days": 1e999}'),
    call('{"city": "\\ud800"}'),
    '<tool_call>[{"name": "weather", "arguments": {}}, {"name": 7}]</tool_call>',
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_text_with_its_marks(text):
    assert read(hermes(), text) == read(hermes(), *text) == Piece(text)


def test_after_a_malformed_call_the_answer_goes_on():
    piece = read(hermes(), f"\n<tool_call>bad</tool_call>\n{CALL} so <tool")
    assert (piece.text, calls_of(piece)) == ("\n<tool_call>bad</tool_call>\n so <tool", [("weather", PARIS)])


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), RecursionError(), MemoryError(), AttributeError("x"), KeyError(1)]
)
def test_whatever_a_parser_raises_is_a_malformed_call(error):
    def parse(text, tools):
        raise error

    tokenizer = hermes()
    tokenizer.tool_parser = parse
    assert read(tokenizer, CALL) == Piece(CALL)


@pytest.mark.parametrize("value", [{1, 2}, b"x", {(1, 2): 3}, 1j, object()], ids=str)
def test_arguments_that_json_does_not_know_are_a_malformed_call(value):
    parser = CallParser(lambda text, tools: {"name": "f", "arguments": {"x": value}}, "[]")
    assert parser.calls("") == ()


@pytest.mark.parametrize(
    ("given_", "sent"),
    [
        ('{"city": "Zürich 🍎"}', {"city": "Zürich 🍎"}),
        ('"{\\"city\\": \\"Paris\\"}"', {"city": "Paris"}),
        ('""', {}),
        ("null", {}),
        ("{}", {}),
    ],
)
def test_arguments_are_a_json_object(given_, sent):
    assert calls_of(read(hermes(), call(given_))) == [("weather", sent)]


def test_letters_beyond_ascii_stay_letters():
    assert read(hermes(), call('{"city": "Zürich"}')).tool_calls[0].arguments_json == '{"city": "Zürich"}'


def test_a_call_needs_no_arguments():
    assert calls_of(read(hermes(), '<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]


@pytest.mark.parametrize("text", [CALL[:-1], CALL[:30], "<tool_call>", "<tool_cal", "<"])
def test_a_call_that_the_answers_end_cuts_off_is_text(text):
    assert read(hermes(), text) == read(hermes(), *text) == Piece(text)


def test_a_call_without_an_end_mark_that_is_cut_off_is_text():
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Par'
    assert read(FakeTokenizer(parser=mistral), *text) == Piece(text)


def test_calls_without_an_end_mark_go_on_to_the_answers_end():
    one = 'weather[ARGS]{"city": "Paris", "days": 3}'
    piece = read(FakeTokenizer(parser=mistral), *f"So: [TOOL_CALLS]{one}[TOOL_CALLS]{one}")
    assert (piece.text, calls_of(piece)) == ("So: ", [("weather", PARIS)] * 2)


def test_an_end_mark_without_a_call_is_text():
    assert read(hermes(), "a</tool_call>b") == Piece("a</tool_call>b")


# -- hostile calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_a_call_beyond_the_longest_is_text_and_the_answer_goes_on(monkeypatch, size):
    monkeypatch.setattr(tools, "MAX_CALL_CHARACTERS", 100)
    long = f"<tool_call>{'x<think>' * 40}</tool_call>"
    text = f"{long} then {CALL}"
    piece = read(hermes(think=THINK), *(text[at : at + size] for at in range(0, len(text), size)))
    assert (piece.text, calls_of(piece)) == (f"{long} then ", [("weather", PARIS)])


def test_text_of_a_call_beyond_the_longest_waits_no_longer(monkeypatch):
    monkeypatch.setattr(tools, "MAX_CALL_CHARACTERS", 3)
    pieces = pieces_of(hermes(), ["<tool_call>", "abc", "d", "e"])
    assert [piece.text for piece in pieces] == ["", "", "<tool_call>abcd", "e", ""]


@pytest.fixture
def endless():
    """A parser that never returns, until the test ends."""
    release = threading.Event()
    yield lambda text, tools: release.wait()
    release.set()


def test_a_parser_that_takes_too_long_is_left_behind(endless):
    assert CallParser(endless, "[]", deadline=Deadline(0.01)).calls("x") == ()


def test_only_so_many_parsers_are_left_behind(endless):
    deadline = Deadline(0.01, left_behind=1)
    assert CallParser(endless, "[]", deadline=deadline).calls("x") == ()
    with pytest.raises(TimeoutError, match="earlier work"):
        deadline.wait(lambda: "refused")


def test_a_place_is_free_again_for_the_next_call():
    parser = CallParser(json_tools.parse_tool_call, "[]", deadline=Deadline(60, left_behind=1))
    assert all(parser.calls(text) == () or text != "bad" for text in ["bad", '{"name": "f"}'] * 50)
    assert parser.calls('{"name": "f"}')


# -- ids --------------------------------------------------------------------------------------------------------


def test_an_id_that_the_model_gives_is_kept_once():
    piece = read(FakeTokenizer(parser=kimi_k2), KIMI, KIMI)
    assert [c.id for c in piece.tool_calls] == ["functions.weather:0", "id-1"]


@pytest.mark.parametrize("proposed", ["", "a\nb", 7, None])
def test_an_id_that_is_none_is_replaced(proposed):
    parser = CallParser(lambda text, tools: {"name": "f", "id": proposed}, "[]", lambda: "new")
    assert parser.calls("") == (ToolCall("new", "f", "{}"),)


def test_ids_look_like_openais():
    made = {new_call_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(i) == 29 and i.startswith("call_") and int(i[5:], 16) >= 0 for i in made)


def test_the_parser_sees_the_requests_tools():
    seen = []
    tokenizer = hermes()
    tokenizer.tool_parser = lambda text, tools: seen.append(tools)
    read(tokenizer, CALL)
    assert seen == [WEATHER]


# -- stop strings -----------------------------------------------------------------------------------------------


def test_a_stop_string_inside_a_call_stops_nothing():
    piece = read(hermes(), *CALL, stop=("Paris", "tool_call"))
    assert (calls_of(piece), piece.stopped) == ([("weather", PARIS)], False)


def test_a_stop_string_before_a_call_ends_the_answer_before_it():
    assert read(hermes(), f"one stop {CALL}", stop=("stop",)) == Piece("one ", stopped=True)


def test_a_stop_string_in_a_malformed_call_is_found():
    piece = read(hermes(), *"a<tool_call>one stop</tool_call> b", stop=("stop",))
    assert piece == Piece("a<tool_call>one ", stopped=True)


def test_the_content_around_a_call_never_makes_a_stop_string():
    piece = read(hermes(), *f"one st{CALL}op two", stop=("stop",))
    assert (piece.text, len(piece.tool_calls), piece.stopped) == ("one ", 1, True)


def test_with_a_stop_string_held_back_whitespace_is_found_too():
    assert read(hermes(), "\n", "\n", "x", stop=("\n\n",)) == Piece(stopped=True)


# -- an answer that went on elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("sent", range(len(CALL) + 9))
def test_an_answer_resumed_anywhere_says_what_was_not_said_yet(sent):
    texts = list(f"Well.\n{CALL}\nok")
    whole = pieces_of(hermes(), texts)
    rest = joined(pieces_of(hermes(), texts, resumed=sent))
    assert rest == joined(whole[sent:])


# -- properties -------------------------------------------------------------------------------------------------

bits = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "<", "to", " ", "\n", "a", "é🍎", "bad"]
)
answers = st.lists(bits, max_size=10).map("".join)
stops = st.lists(st.sampled_from(["bad", "a", "\n\n", "é🍎a", "<th", "call>"]), max_size=2).map(tuple)


@settings(deadline=None)
@given(cut(answers), stops, st.booleans())
def test_however_an_answer_is_cut_it_says_the_same(whole_and_parts, stop, keep):
    whole, parts = whole_and_parts
    fields = {"stop": stop, "keep_reasoning_in_text": keep}
    tokenizer = hermes(think=THINK)
    assert read(tokenizer, *parts, **fields) == read(tokenizer, whole, **fields) == read(tokenizer, *whole, **fields)


noise = st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<", "tool", " ", "\n", "é🍎", "}", "/"]), max_size=12)


@settings(deadline=None)
@given(cut(noise.map("".join)))
def test_without_a_good_call_every_letter_is_content(whole_and_parts):
    whole, parts = whole_and_parts
    assert read(hermes(), *parts) == Piece(whole)


# Too short for a whole mark.
words = st.text(st.sampled_from("ab<>/tool_cal é🍎\n{}"), max_size=10).map(lambda text: f"x{text}")


@settings(deadline=None)
@given(st.lists(st.one_of(words, st.none()), max_size=6), st.data())
def test_calls_and_the_text_between_them_come_apart_cleanly(parts, data):
    text = "".join(CALL if part is None else part for part in parts)
    _, cuts = data.draw(cut(st.just(text)))
    piece = read(hermes(), *cuts)
    assert piece.text == "".join(part for part in parts if part is not None)
    assert calls_of(piece) == [("weather", PARIS)] * parts.count(None)
