"""Stop strings: the cut is where the whole text says it is, however the text arrives."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pomona.workers.text.stops import StopMatcher

# Few letters, so that stops match, nest and overlap; one beyond the BMP and one that combines.
letters = st.sampled_from("abcd🍎\u0301")
stop_lists = st.lists(st.text(letters, max_size=5), max_size=4)


def cut(text, stops):
    """The oracle: the text up to the first match, and whether there was one."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def run(chunks, stops):
    """What a client gets: (text, whether it was stopped, each piece)."""
    matcher, sent = StopMatcher(stops), []
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        sent.append(text)
        if stopped:
            return "".join(sent), True, sent
    text, stopped = matcher.flush()
    sent.append(text)
    return "".join(sent), stopped, sent


@st.composite
def chunked(draw, alphabet=letters):
    text = draw(st.text(alphabet, max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(chunked(), stop_lists)
@example(["abc", "x"], ["abcd", "bc"])
@example(["abc"], ["abcd", "bc"])
@example(["abc", "d"], ["abcd", "bc"])
@example(["a", "a", "a", "b"], ["aab"])
def test_the_cut_is_at_the_first_match_of_the_whole_text_however_it_is_chunked(chunks, stops):
    text, stopped, _ = run(chunks, stops)
    assert (text, stopped) == cut("".join(chunks), stops)


@given(st.lists(st.text(max_size=8), max_size=8), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_same_holds_for_any_unicode(chunks, stops):
    text, stopped, _ = run(chunks, stops)
    assert (text, stopped) == cut("".join(chunks), stops)


@given(chunked(), stop_lists)
def test_every_chunking_sends_what_one_chunk_sends(chunks, stops):
    whole = "".join(chunks)
    assert run(chunks, stops)[:2] == run([whole], stops)[:2] == run(list(whole), stops)[:2]


@given(chunked(), stop_lists)
def test_nothing_of_a_stop_string_leaks_before_it_is_known(chunks, stops):
    expected, _ = cut("".join(chunks), stops)
    _, _, sent = run(chunks, stops)
    for upto in range(len(sent) + 1):
        assert expected.startswith("".join(sent[:upto]))


@given(chunked(st.sampled_from("xyz")), st.lists(st.text(st.sampled_from("abc"), min_size=1), max_size=3))
def test_without_a_match_nothing_is_lost_and_nothing_waits(chunks, stops):
    _, stopped, sent = run(chunks, stops)
    assert not stopped
    assert sent == [*chunks, ""]


@given(chunked(), stop_lists)
def test_no_more_is_held_back_than_the_longest_stop_less_one(chunks, stops):
    matcher, pushed, sent = StopMatcher(stops), 0, 0
    longest = max((len(stop) for stop in stops), default=0)
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        if stopped:
            return
        pushed, sent = pushed + len(chunk), sent + len(text)
        assert pushed - sent <= max(0, longest - 1)


@pytest.mark.parametrize(
    ("chunks", "stops", "expected"),
    [
        (["xabc", "d"], ["abcd", "bc"], ("x", True)),
        (["xabc", "e"], ["abcd", "bc"], ("xa", True)),
        (["xabc"], ["abcd", "bc"], ("xa", True)),
        (["xab"], ["abcd", "bc"], ("xab", False)),
        (["ababa", "c"], ["abac"], ("ab", True)),
        (["hello", " wor", "ld"], ["lo w"], ("hel", True)),
        (["hi\n", "\nbye"], ["\n\n"], ("hi", True)),
        (["👩", "\u200d👩"], ["\u200d"], ("👩", True)),
        (["cafe", "\u0301!"], ["e\u0301"], ("caf", True)),
        (["日本", "語です"], ["本語"], ("日", True)),
        (["abc"], [""], ("abc", False)),
        (["abc"], ["abc"], ("", True)),
    ],
)
def test_worked_case(chunks, stops, expected):
    assert run(chunks, stops)[:2] == expected


def test_an_earlier_match_that_may_still_complete_holds_back_a_later_one_that_has():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("!") == ("a", True)


def test_what_is_held_goes_out_as_soon_as_it_can_no_longer_match():
    matcher = StopMatcher(["stop"])
    assert matcher.push("sto") == ("", False)
    assert matcher.push("ry") == ("story", False)
    assert matcher.flush() == ("", False)
