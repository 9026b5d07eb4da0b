"""How many prompt tokens a step may compute: streams keep their rhythm, prompts still come forward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.workers.engine.base import StepTimes
from pomona.workers.engine.pace import MIN_CHUNK_TOKENS, Pace


def measured(max_step_s=0.1, chunk_tokens=512, *, pass_s=0.01, token_s=0.001, decode_s=0.0, sizes=(10, 110)):
    """A pace that has seen chunks of these sizes, of a model whose chunks take `pass_s` and `token_s` a token."""
    pace = Pace(max_step_s, chunk_tokens)
    for tokens in sizes:
        pace.observe(StepTimes(decode_s, pass_s + tokens * token_s), prompt_tokens=tokens, decoding=1)
    return pace


def beside_streams(pace):
    return pace.budget(streams=True, prompts=1)


@pytest.mark.parametrize("prompts", [1, 5])
@pytest.mark.parametrize("pace", [Pace(0.1, 512), measured(token_s=1.0)], ids=["new", "slow"])
def test_while_nobody_watches_tokens_arrive_prompts_get_the_operators_cap(pace, prompts):
    assert pace.budget(streams=False, prompts=prompts) == 512


@pytest.mark.parametrize(("chunk_tokens", "expected"), [(512, 64), (40, 40)])
def test_before_anything_is_measured_it_is_cautious(chunk_tokens, expected):
    assert beside_streams(Pace(0.1, chunk_tokens)) == expected


@pytest.mark.parametrize(("decode_s", "expected"), [(0.0, 80), (0.06, 26)], ids=["quick streams", "slow streams"])
def test_beside_streams_a_step_stays_within_its_time(decode_s, expected):
    assert beside_streams(measured(decode_s=decode_s)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("decode_s", [0.09, 0.1, 5.0])
def test_where_decoding_takes_the_time_prompts_get_a_chunk_that_is_worth_its_pass(decode_s):
    assert beside_streams(measured(decode_s=decode_s)) == pytest.approx(20, abs=1)


def test_a_budget_is_never_tiny_and_never_over_the_cap():
    assert beside_streams(measured(pass_s=0.0, token_s=0.1)) == MIN_CHUNK_TOKENS
    assert beside_streams(measured(token_s=1e-6)) == 512
    assert beside_streams(measured(chunk_tokens=8, token_s=0.1)) == 8


def test_chunks_of_one_size_count_half_their_time_as_the_pass():
    pace = measured(max_step_s=1.0, pass_s=0.0, sizes=(100, 100))
    assert beside_streams(pace) == min(512, round((0.9 - 0.05) / 0.0005))
    assert beside_streams(measured(max_step_s=0.01, pass_s=0.0, sizes=(100, 100))) == pytest.approx(200, abs=1)


def test_several_chunks_in_one_step_are_several_passes():
    pace = measured(sizes=(110, 110))
    pace.observe(StepTimes(0.0, 0.04), prompt_tokens=20, decoding=1, chunks=2)
    assert beside_streams(pace) == pytest.approx(80, abs=1)


def test_a_lasting_change_is_followed():
    pace = measured()
    for tokens in [10, 60] * 40:
        pace.observe(StepTimes(0.0, 0.02 + tokens * 0.002), prompt_tokens=tokens, decoding=1)
    assert beside_streams(pace) == pytest.approx(35, abs=1)


@pytest.mark.parametrize(("times", "prompt_tokens"), [(StepTimes(0.0, 0.0), 50), (StepTimes(0.0, 0.5), 0)])
def test_a_step_without_prompt_tokens_or_time_says_nothing_of_chunks(times, prompt_tokens):
    pace = measured()
    before = beside_streams(pace)
    pace.observe(times, prompt_tokens, decoding=1)
    assert beside_streams(pace) == before


def test_what_many_rows_took_is_forgotten_when_they_are_gone():
    pace = measured(decode_s=0.08)
    pace.observe(StepTimes(), prompt_tokens=0, decoding=0)
    assert beside_streams(pace) == beside_streams(measured())


seconds = st.just(0.0) | st.floats(1e-6, 10)


@given(
    st.lists(st.tuples(seconds, seconds, st.integers(0, 4096), st.integers(0, 64), st.integers(0, 8)), max_size=20),
    st.integers(1, 4096),
    st.booleans(),
    st.integers(0, 64),
)
def test_whatever_was_measured_a_budget_lies_between_its_bounds(samples, chunk_tokens, streams, prompts):
    pace = Pace(0.25, chunk_tokens)
    for decode_s, prefill_s, tokens, decoding, chunks in samples:
        pace.observe(StepTimes(decode_s, prefill_s), tokens, decoding, chunks)
    assert min(MIN_CHUNK_TOKENS, chunk_tokens) <= pace.budget(streams, prompts) <= chunk_tokens


@pytest.mark.parametrize(("max_step_s", "chunk_tokens"), [(0, 512), (-1, 512), (0.25, 0)])
def test_a_pace_that_allows_nothing_cannot_be_made(max_step_s, chunk_tokens):
    with pytest.raises(ValueError, match="does nothing"):
        Pace(max_step_s, chunk_tokens)
