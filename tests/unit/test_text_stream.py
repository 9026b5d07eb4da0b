"""TextStream: whole characters, in order, none lost, none after a stop string."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from pomona.workers.engine.base import EngineRequest, Piece
from pomona.workers.text.answer import Answer
from pomona.workers.text.detokenizer import ByteLevelDetokenizer, detokenizers
from pomona.workers.text.maker import TextMaker
from pomona.workers.text.sections import Layout, Sections
from pomona.workers.text.stops import StopMatcher
from pomona.workers.text.stream import TextStream
from texts import FakeDetokenizer


def pieces_of(pieces, *, stops=(), tail=""):
    """Each (text, stopped) that the stream returns, its finish() last, up to the first stop."""
    answer = Answer(Sections(Layout({})), StopMatcher(stops)) if stops else None
    stream, out = TextStream(FakeDetokenizer(pieces, tail), answer), []
    for token in range(len(pieces)):
        piece = stream.push(token)
        assert piece == Piece(piece.text, stopped=piece.stopped)
        out.append((piece.text, piece.stopped))
        if piece.stopped:
            return out
    piece = stream.finish()
    return [*out, (piece.text, piece.stopped)]


def test_without_stop_strings_text_goes_out_as_it_comes():
    assert pieces_of(["Hel", "", "lo"]) == [("Hel", False), ("", False), ("lo", False), ("", False)]


def test_what_the_detokenizer_still_holds_comes_at_the_end():
    assert pieces_of(["a"], tail="b") == [("a", False), ("b", False)]


def test_what_the_stop_matcher_still_holds_comes_at_the_end():
    assert pieces_of(["one st", "o"], stops=["stop"]) == [("one ", False), ("", False), ("sto", False)]


def test_both_kinds_of_held_text_come_in_order():
    assert pieces_of(["one st"], stops=["stop"], tail="ory") == [("one ", False), ("story", False)]


def test_a_stop_string_across_tokens_ends_the_answer_without_a_trace():
    assert pieces_of(["one s", "to", "p two"], stops=["stop"]) == [("one ", False), ("", False), ("", True)]


def test_a_stop_string_that_the_detokenizers_tail_completes_is_found_in_finish():
    assert pieces_of(["one st"], stops=["stop"], tail="op two") == [("one ", False), ("", True)]


def test_a_shorter_stop_string_inside_a_longer_one_that_never_completes_is_found_in_finish():
    assert pieces_of(["xabc"], stops=["abcd", "bc"]) == [("x", False), ("a", True)]


def test_with_stop_strings_whitespace_goes_out_as_it_comes_too():
    assert pieces_of(["\n", " a"], stops=["stop"]) == [("\n", False), (" a", False), ("", False)]


# -- a byte-level vocabulary ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """257 tokens, one a byte and a mark: every character beyond ASCII spans several."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    byte_level = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = ByteLevel(add_prefix_space=False)
    byte_level.decoder = ByteLevelDecoder()
    byte_level.add_special_tokens([AddedToken("<|mark|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def stream_of(tokenizer, text, stops=()):
    """The pieces of `text`, pushed token by token, the finish last."""
    stream, out = TextMaker(tokenizer).new(EngineRequest("r", (), stop=tuple(stops))), []
    for token in tokenizer.encode(text, add_special_tokens=False):
        piece = stream.push(token)
        out.append(piece.text)
        if piece.stopped:
            return out
    return [*out, stream.finish().text]


SPANNING = [
    "🍎 pomona 🍏",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "日本語のテキスト、中文和한국어",
    "cafe\u0301 n\u0303 a\u0308\u0323",
    "नमस्ते สวัสดี",
    "x\n\n  two  spaces \t tab\r\n",
]


@pytest.mark.parametrize("text", SPANNING)
def test_characters_of_several_tokens_come_whole_and_exact(tokenizer, text):
    pieces = stream_of(tokenizer, text)
    assert len(pieces) == len(text.encode()) + 1, "one token a byte"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


# Not U+FFFD: it is what we look for.
characters = st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])


@settings(deadline=None)
@given(text=st.text(characters | st.sampled_from("🍎é日 \n"), max_size=20))
@example(text="a ")
@example(text=" Paris")
@example(text="a\x00b")
@example(text="<|mark|> é")
def test_any_text_survives_token_by_token(tokenizer, text):
    pieces = stream_of(tokenizer, text)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_a_stop_string_inside_several_bytes_cuts_between_whole_characters(tokenizer):
    assert "".join(stream_of(tokenizer, "red 🍎, green 🍏, end", stops=["🍏"])) == "red 🍎, green "


def test_an_answer_that_ends_inside_a_character_leaves_it_out(tokenizer):
    stream = TextMaker(tokenizer).new(EngineRequest("r", ()))
    pieces = [stream.push(token).text for token in tokenizer.encode("a🍎", add_special_tokens=False)[:-1]]
    assert "".join(pieces) == "a"
    assert stream.finish() == Piece()


def test_what_stands_in_one_token_with_half_a_character_comes_at_the_end():
    byte_level = Tokenizer(BPE(vocab={"a": 0, "Ã": 1, "aÃ": 2, "©": 3}, merges=[("a", "Ã")]))
    byte_level.decoder = ByteLevelDecoder()
    stream = TextStream(ByteLevelDetokenizer(byte_level))
    assert (stream.push(2), stream.finish()) == (Piece(), Piece("a"))


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=30))
def test_tokens_that_are_no_text_break_nothing(tokenizer, tokens):
    stream = TextMaker(tokenizer).new(EngineRequest("r", ()))
    text = "".join(stream.push(token).text for token in tokens) + stream.finish().text
    known = [token for token in tokens if token < 257]
    assert text.rstrip("\ufffd") == tokenizer.decode(known).rstrip("\ufffd")


def test_other_vocabularies_stay_with_mlx_lms_detokenizer():
    sentence_piece = Tokenizer(BPE(vocab={"<unk>": 0, "▁a": 1, "<0xC3>": 2, "<0xA9>": 3}, merges=[]))
    sentence_piece.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=sentence_piece)
    wrapper = TokenizerWrapper(fast, SPMStreamingDetokenizer)
    assert isinstance(detokenizers(wrapper)(), SPMStreamingDetokenizer)
    stream = TextMaker(wrapper).new(EngineRequest("r", ()))
    assert [stream.push(token).text for token in (1, 2, 3, 1)] == ["a", "", "é", " a"]
