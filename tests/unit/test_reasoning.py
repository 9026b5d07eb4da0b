"""Reasoning: apart from the content, without its marks, wherever the tokens break."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, kimi_k3, mistral, muse_spark

from pomona.workers.engine.base import Piece
from texts import EOS, THINK, FakeTokenizer, calls_of, cut, joined, pieces_of, read

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CHANNEL = ("<|channel>thought", "<channel|>")
marks = pytest.mark.parametrize("think", [THINK, CHANNEL], ids=["think", "channel"])


def thinker(think=THINK, **kwargs):
    return FakeTokenizer(think=think, **kwargs)


def prompted(*texts, tokenizer=None):
    """A tokenizer, and a prompt of these texts; EOS as None."""
    tokenizer = tokenizer or thinker()
    return tokenizer, [EOS if text is None else tokenizer.tokens([text])[0] for text in texts]


@marks
def test_reasoning_and_content_come_apart(think):
    piece = read(thinker(think), f"{think[0]}why{think[1]}so")
    assert piece == Piece("so", "why")


@marks
def test_the_same_letter_by_letter_and_no_mark_shows_meanwhile(think):
    pieces = pieces_of(thinker(think), f"{think[0]}why{think[1]}so")
    assert joined(pieces) == Piece("so", "why")
    assert all(piece.text in ("", "s", "o") and piece.reasoning in ("", "w", "h", "y") for piece in pieces)


def test_what_may_still_be_a_mark_is_held_back_and_no_more():
    pieces = pieces_of(thinker(), ["a<", "thi", "s", "<think>b</", "b", "</think", "!"])
    assert [piece.text + piece.reasoning for piece in pieces] == ["a", "", "<this", "b", "</b", "", "</think!", ""]


def test_what_is_held_back_at_the_end_is_no_mark():
    assert read(thinker(), "a<thi") == Piece("a<thi")
    assert read(thinker(), "<think>a</think") == Piece("", "a</think")


def test_reasoning_that_the_answers_end_cuts_off_is_reasoning():
    assert read(thinker(), "<think>why", " so") == Piece("", "why so")


def test_whitespace_after_reasoning_is_no_content():
    assert read(thinker(), *"<think>\nwhy\n</think>\n\n so \n") == Piece("so \n", "\nwhy\n")


def test_whitespace_before_reasoning_is_no_content():
    assert read(thinker(), *"\n<think>why</think>so") == Piece("so", "why")


def test_an_answer_without_reasoning_keeps_its_whitespace():
    assert read(thinker(), "\n ", " so\n") == Piece("\n  so\n")


def test_reasoning_may_come_again():
    assert read(thinker(), *"<think>a</think>b<think>c</think>d") == Piece("bd", "ac")


def test_an_end_mark_outside_reasoning_is_text():
    assert read(thinker(), *"a</think>b") == Piece("a</think>b")


def test_a_model_without_reasoning_writes_text():
    assert read(FakeTokenizer(), "<think>why</think>so") == Piece("<think>why</think>so")


# -- where the answer begins ------------------------------------------------------------------------------------


def test_a_prompt_that_opens_reasoning_makes_the_answer_begin_with_it():
    tokenizer, prompt = prompted("hi", None, "assistant", "<think>", "\n")
    assert read(tokenizer, *"why</think>\n\nso", prompt=prompt) == Piece("so", "why")


def test_a_prompt_that_closed_its_reasoning_does_not():
    tokenizer, prompt = prompted("<think>", "\n\n", "</think>", "\n\n")
    assert read(tokenizer, "so", prompt=prompt) == Piece("so")


def test_reasoning_of_earlier_turns_does_not_count():
    tokenizer, prompt = prompted("<think>", "a", "</think>", "b", None, "hi", None, "assistant")
    assert read(tokenizer, "so", prompt=prompt) == Piece("so")


def test_a_mark_that_a_user_wrote_opens_nothing():
    tokenizer, prompt = prompted("what is", "<think>", "?", None, "assistant")
    assert read(tokenizer, "so", prompt=prompt) == Piece("so")


def test_a_mark_of_several_tokens_is_found_in_the_prompt():
    tokenizer, prompt = prompted("<|channel>", "thought", "\n", tokenizer=thinker(CHANNEL))
    tokenizer.think_start_tokens = tokenizer.tokens(["<|channel>", "thought"])
    assert read(tokenizer, "why<channel|>so", prompt=prompt) == Piece("so", "why")
    assert read(tokenizer, "so", prompt=prompt[:1]) == Piece("so"), "half a mark is none"


@pytest.mark.parametrize(
    ("before", "rest"),
    [
        (["<think>", "wh"], Piece("so", "y")),
        (["<think>", "why", "</think>", "\n"], Piece("so")),
        (["s"], Piece("o")),
    ],
    ids=["reasoning", "content", "no reasoning"],
)
def test_an_answer_resumed_from_its_tokens_alone_knows_its_section(before, rest):
    tokenizer, prompt = prompted("hi", None, "assistant", *before)
    whole = "<think>why</think>\nso" if len(before) > 1 else "so"
    assert read(tokenizer, *whole.removeprefix("".join(before)), prompt=prompt) == rest


@pytest.mark.parametrize("sent", range(24))
def test_an_answer_resumed_anywhere_says_what_was_not_said_yet(sent):
    texts = list("<think>why</think>\n\nso!")
    assert joined(pieces_of(thinker(), texts, resumed=sent)) == joined(pieces_of(thinker(), texts)[sent:])


# -- reasoning in the text --------------------------------------------------------------------------------------


def test_reasoning_may_be_kept_in_the_text_with_its_marks():
    text = "\n<think>why</think>\n\nso"
    assert read(thinker(), *text, keep_reasoning_in_text=True) == Piece(text)


def test_calls_are_found_in_such_text_too():
    piece = read(thinker(parser=json_tools), f"<think>why{CALL}", keep_reasoning_in_text=True)
    assert (piece.text, calls_of(piece)) == ("<think>why", [("now", {})])


# -- stop strings and calls -------------------------------------------------------------------------------------


def test_a_stop_string_in_the_reasoning_stops_nothing():
    assert read(thinker(), *"<think>stop</think>go stop on", stop=("stop",)) == Piece("go ", "stop", stopped=True)


def test_a_stop_string_does_not_reach_over_reasoning_into_its_marks():
    assert read(thinker(), *"<think>a</think>b", stop=("think>b", "</think>")) == Piece("b", "a")


def test_a_call_after_reasoning_leaves_no_content():
    piece = read(thinker(parser=json_tools), *f"<think>why</think>\n\n{CALL}\n")
    assert (piece.text, piece.reasoning, calls_of(piece)) == ("", "why", [("now", {})])


def test_a_call_from_unclosed_reasoning_is_a_call_and_the_reasoning_goes_on():
    piece = read(thinker(parser=json_tools), *f"<think>why {CALL} and</think>so")
    assert (piece.text, piece.reasoning, calls_of(piece)) == ("so", "why  and", [("now", {})])


@pytest.mark.parametrize("parser", [json_tools, mistral], ids=["json_tools", "mistral"])
def test_reasoning_that_only_speaks_of_the_mark_stays_reasoning(parser):
    thought = f"I could write {parser.tool_call_start} now"
    assert read(thinker(parser=parser), *f"<think>{thought}</think>\nso") == Piece("so", thought)
    assert read(thinker(parser=parser), *f"<think>{thought}") == Piece("", thought)


def test_a_malformed_call_in_the_reasoning_is_reasoning():
    piece = read(thinker(parser=json_tools), *"<think>a<tool_call>bad</tool_call>b</think>so")
    assert piece == Piece("so", "a<tool_call>bad</tool_call>b")


# -- models whose answers mark more than that -------------------------------------------------------------------


def test_the_marks_around_kimis_response_go_nowhere():
    tokenizer = thinker(("<|open|>think<|sep|>", "<|close|>think<|sep|>"), parser=kimi_k3)
    tokenizer.structural_markers = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    text = "<|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>so<|close|>response<|sep|>"
    assert read(tokenizer, *text) == Piece("so", "why")


def test_an_answer_that_addresses_its_parts_is_sorted_by_address():
    tokenizer = FakeTokenizer(parser=muse_spark)
    tokenizer.response_initial_state = "header"
    tokenizer.response_transitions = {
        "header": [
            ("to=self<|message|>", "reasoning"),
            ("to=user<|message|>", "normal"),
            ("<atem:function_calls>", "tool"),
        ],
        "reasoning": [("<|eom|>", "header")],
        "normal": [("<|eom|>", "header")],
    }
    call = '<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>'
    piece = read(tokenizer, *f" to=self<|message|>why<|eom|>from=x to=user<|message|>so<|eom|>{call}")
    assert (piece.text, piece.reasoning, calls_of(piece)) == ("so", "why", [("now", {})])
    assert read(tokenizer, "to=user<|message|>so", tools=None) == Piece("so")


# Too short for a whole mark.
words = st.text(st.sampled_from("ab<>/think é🍎\n"), max_size=6).map(lambda text: f"x{text}")


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), max_size=4), st.data())
def test_however_an_answer_is_cut_reasoning_and_content_come_apart_cleanly(parts, data):
    text = "".join(f"<think>{reasoning}</think>\n\n{content}" for reasoning, content in parts)
    _, cuts = data.draw(cut(st.just(text)))
    expected = Piece("".join(content for _, content in parts), "".join(reasoning for reasoning, _ in parts))
    assert read(thinker(), *cuts) == expected
