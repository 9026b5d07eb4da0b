"""How many prompt tokens a step may compute: streams keep their rhythm, prompts still come forward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.workers.engine.base import StepTimes
from pomona.workers.engine.pace import CAUTIOUS_TOKENS, MIN_CHUNK_TOKENS, Pace


def measured(max_step_s=0.25, chunk_tokens=512, *, token_s=0.001, decode_s=0.0, pass_s=0.0):
    """A pace that has seen two chunks, of a model that takes `token_s` a prompt token and `pass_s` a pass."""
    pace = Pace(max_step_s, chunk_tokens)
    for tokens in (100, 200):
        pace.observe(StepTimes(decode_s, tokens * token_s, pass_s), prompt_tokens=tokens, decoding=1)
    return pace


@pytest.mark.parametrize("pace", [Pace(0.1, 512), measured(token_s=1.0)], ids=["new", "slow"])
def test_while_nobody_watches_tokens_arrive_prompts_get_the_operators_cap(pace):
    assert pace.budget(streams=False) == 512


@pytest.mark.parametrize(("chunk_tokens", "expected"), [(512, CAUTIOUS_TOKENS), (40, 40)])
def test_before_anything_is_measured_it_is_cautious(chunk_tokens, expected):
    assert Pace(0.25, chunk_tokens).budget(streams=True) == expected


@pytest.mark.parametrize(("decode_s", "expected"), [(0.0, 225), (0.05, 180), (0.15, 90)])
def test_beside_streams_a_step_stays_within_its_time(decode_s, expected):
    assert measured(decode_s=decode_s).budget(streams=True) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("decode_s", [0.2, 0.25, 5.0])
def test_where_decoding_takes_the_time_prompts_get_a_chunk_that_is_worth_its_pass(decode_s):
    assert measured(decode_s=decode_s, pass_s=0.02).budget(streams=True) == pytest.approx(200, abs=1)
    assert measured(decode_s=decode_s, token_s=1.0).budget(streams=True) == MIN_CHUNK_TOKENS


def test_a_budget_is_never_over_the_cap():
    assert measured(token_s=1e-6).budget(streams=True) == 512
    assert measured(chunk_tokens=8, token_s=0.1).budget(streams=True) == 8


def test_a_lasting_change_is_followed():
    pace = measured()
    for tokens in [64, 100] * 10:
        pace.observe(StepTimes(0.0, tokens * 0.002), prompt_tokens=tokens, decoding=1)
    assert pace.budget(streams=True) == pytest.approx(112, abs=2)


@pytest.mark.parametrize(("times", "prompt_tokens"), [(StepTimes(0.0, 0.0), 50), (StepTimes(0.0, 0.5), 0)])
def test_a_step_without_prompt_tokens_or_time_says_nothing_of_chunks(times, prompt_tokens):
    pace = measured()
    before = pace.budget(streams=True)
    pace.observe(times, prompt_tokens, decoding=1)
    assert pace.budget(streams=True) == before


def test_what_many_rows_took_is_forgotten_when_they_are_gone():
    pace = measured(decode_s=0.15)
    pace.observe(StepTimes(), prompt_tokens=0, decoding=0)
    assert pace.budget(streams=True) == measured().budget(streams=True)


seconds = st.just(0.0) | st.floats(1e-6, 10)


@given(
    st.lists(st.tuples(seconds, seconds, st.integers(0, 4096), st.integers(0, 64)), max_size=20),
    st.integers(1, 4096),
    st.booleans(),
)
def test_whatever_was_measured_a_budget_lies_between_its_bounds(samples, chunk_tokens, streams):
    pace = Pace(0.25, chunk_tokens)
    for decode_s, prefill_s, tokens, decoding in samples:
        pace.observe(StepTimes(decode_s, prefill_s), tokens, decoding)
    assert min(MIN_CHUNK_TOKENS, chunk_tokens) <= pace.budget(streams) <= chunk_tokens


@pytest.mark.parametrize(("max_step_s", "chunk_tokens"), [(0, 512), (-1, 512), (0.25, 0)])
def test_a_pace_that_allows_nothing_cannot_be_made(max_step_s, chunk_tokens):
    with pytest.raises(ValueError, match="does nothing"):
        Pace(max_step_s, chunk_tokens)
