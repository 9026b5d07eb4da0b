"""A batch's tokens against a plain numpy reference: a row gets what its request asks for, whoever sits beside it."""

import math
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pomona.workers.engine import nucleus
from pomona.workers.engine import sampling as sampling_module
from pomona.workers.engine.base import EngineRequest, Sampling
from pomona.workers.engine.nucleus import SHORTLIST
from pomona.workers.engine.sampling import RowSampler, sample

SMALL, LARGE = 24, 5003  # LARGE: more than the shortlist's blocks, and a multiple of no block size
MARGIN = 1e-5  # how far float32 may be from the reference, in probability
EOS = 2

PLAIN = Sampling(temperature=0.9)
KINDS = (
    Sampling(),
    PLAIN,
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=1.0, top_k=400, top_p=0.95),
    Sampling(temperature=1.0, min_p=0.02),
    Sampling(frequency_penalty=0.7, presence_penalty=0.3),
    Sampling(temperature=1.0, repetition_penalty=1.3, top_p=0.7),
    Sampling(logit_bias=((3, 50.0), (10**9, 1.0))),
)


def a_row(sampling=PLAIN, seed=0, generated=(), vocab_size=LARGE, prompt=(1, 5, 5), min_tokens=0, stop_ids=(EOS,)):
    request = EngineRequest("r", prompt=prompt, sampling=sampling, min_tokens=min_tokens)
    return RowSampler(request, generated, vocab_size=vocab_size, stop_ids=frozenset(stop_ids), seed=seed)


class At(RowSampler):
    """A row that always draws one given number."""

    def uniform(self):
        return self.number


def rows_across(sampling, count, vocab_size):
    """`count` rows whose numbers divide [0, 1) evenly."""
    request = EngineRequest("r", prompt=(1,), sampling=sampling)
    rows = [At(request, (), vocab_size=vocab_size, stop_ids=frozenset(), seed=0) for _ in range(count)]
    for index, row in enumerate(rows):
        row.number = (index + 0.5) / count
    return rows


def tokens_of(logits, rows, masks=None):
    return sample(mx.array(logits), rows, masks).tokens.tolist()


def model(step, count, vocab_size=LARGE):
    """The logits of `count` rows at a step: every other row has a few likely tokens, the rest are nearly flat."""
    logits = np.random.default_rng(step).normal(size=(count, vocab_size)).astype(np.float32)
    return np.where(np.arange(count)[:, None] % 2, logits * 0.5, logits * 4)


def answers(rows, logits_of, steps):
    """What each row says over `steps` steps; `logits_of(row, step)` are the model's."""
    said = [[] for _ in rows]
    for _ in range(steps):
        logits = np.stack([logits_of(index, row.position) for index, row in enumerate(rows)])
        for answer, token in zip(said, tokens_of(logits, rows), strict=True):
            answer.append(token)
    return said


def reference(logits, sampling):
    """Weights after the filters, in double precision, and the smallest distance of a filter's edge."""
    scaled = np.asarray(logits, dtype=np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    ranked = np.sort(weights)[::-1]
    kth = ranked[sampling.top_k - 1] if 0 < sampling.top_k < len(ranked) else 0
    kept = ranked[ranked >= kth]
    before = (np.cumsum(kept) - kept) / kept.sum()
    pth = kept[(before < sampling.top_p).sum() - 1]
    edges = [np.abs(before - sampling.top_p).min()] if sampling.top_p < 1 else []
    edges += [np.abs(weights - sampling.min_p).min()] if sampling.min_p else []
    limit = max(kth, pth, sampling.min_p) * (1 - 1e-9)
    return np.where(weights >= limit, weights, 0), min(edges, default=1)


def assert_drawn(token, number, logits, sampling):
    """The token is where the kept tokens' distribution function reaches the number."""
    weights, _ = reference(logits, sampling)
    probabilities = weights / weights.sum()
    before = probabilities[:token].sum()
    assert probabilities[token] > 0
    assert before - MARGIN <= number <= before + probabilities[token] + MARGIN


def test_greedy_rows_get_the_largest_logit_and_the_first_of_equals():
    logits = model(0, 3)
    logits[2, [7, 40]] = 99
    rows = [a_row(Sampling()) for _ in range(3)]
    assert tokens_of(logits, rows) == [*logits[:2].argmax(axis=-1), 7]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_any_float_type_is_sampled(dtype):
    logits = mx.zeros((len(KINDS), LARGE), dtype=dtype)
    logits[:, 3] = 60
    assert sample(logits, [a_row(sampling) for sampling in KINDS]).tokens.tolist() == [3] * len(KINDS)


def test_a_seeded_request_is_the_same_alone_and_in_a_batch_and_after_it_was_resumed():
    def logits_of(index, position):
        return model(position, len(KINDS))[index]

    together = answers([a_row(sampling, seed=7) for sampling in KINDS], logits_of, steps=8)
    for index, sampling in enumerate(KINDS):
        resumed = a_row(sampling, seed=7, generated=together[index][:3])
        alone = [a_row(sampling, seed=7)]
        assert answers(alone, lambda _, position, i=index: logits_of(i, position), steps=8) == [together[index]]
        assert answers([resumed], lambda _, position, i=index: logits_of(i, position), 5) == [together[index][3:]]


def test_other_seeds_and_positions_give_other_numbers_spread_evenly():
    numbers = [a_row(seed=seed, generated=(0,) * length).uniform() for seed in range(50) for length in range(40)]
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert len(set(numbers)) > 1_990
    assert ((counts - 200) ** 2 / 200).sum() < 21.7  # the 99th percentile for 9 degrees of freedom


def test_answers_are_distributed_as_the_model_says():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]]))
    rows = [a_row(Sampling(temperature=1.0), seed=seed, vocab_size=4) for seed in range(4_000)]
    counts = np.bincount(tokens_of(np.repeat(logits, 4_000, axis=0), rows), minlength=4)
    expected = np.array([2_000, 1_000, 500, 500])
    assert ((counts - expected) ** 2 / expected).sum() < 11.3  # the 99th percentile for 3 degrees of freedom


some_filters = st.builds(
    Sampling,
    temperature=st.floats(0.7, 3),
    top_p=st.sampled_from([1.0]) | st.floats(0.05, 0.99),
    top_k=st.integers(0, SMALL),
    min_p=st.sampled_from([0.0]) | st.floats(0.01, 0.9),
)


@settings(deadline=None, max_examples=40)
@given(
    # quarters, so that there are equals
    logits=st.lists(st.integers(-4, 4).map(lambda n: n / 4), min_size=SMALL, max_size=SMALL),
    sampling=some_filters,
)
@example([n / 16 for n in range(SMALL)], Sampling(1.0, min_p=0.5))
@example([n / 16 for n in range(SMALL)], Sampling(1.0, top_p=0.5))
@example([n // 4 / 4 for n in range(SMALL)], Sampling(1.0, top_k=6))
@example([n // 4 / 4 for n in range(SMALL)], Sampling(1.0, top_p=0.7, top_k=10, min_p=0.4))
def test_the_tokens_that_can_come_are_those_the_filters_keep(logits, sampling):
    weights, edge = reference(logits, sampling)
    assume(edge > MARGIN)
    drawn = tokens_of([logits] * 1_024, rows_across(sampling, 1_024, SMALL))
    assert set(drawn) == set(np.flatnonzero(weights))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    sampling=some_filters,
    top_k=st.sampled_from([0, 0, 5, 100, SHORTLIST, 1_000]),
    on_gpu=st.booleans(),
)
@example(seed=1, sampling=Sampling(0.9, top_p=0.9), top_k=0, on_gpu=False)
@example(seed=1, sampling=Sampling(0.9, top_p=0.9), top_k=0, on_gpu=True)
@example(seed=1, sampling=Sampling(0.9, min_p=0.05), top_k=0, on_gpu=True)
def test_a_large_vocabulary_is_drawn_as_the_reference_says_wherever_the_nucleus_ends(seed, sampling, top_k, on_gpu):
    """A GPU's way also runs on a CPU."""
    sampling = replace(sampling, top_k=top_k)
    logits = model(seed, 8)
    assume(all(reference(row, sampling)[1] > MARGIN / 100 for row in logits))
    with patch.object(nucleus, "on_gpu", return_value=on_gpu):
        rows = rows_across(sampling, 8, LARGE)
        tokens = tokens_of(logits, rows)
    for row, token, line in zip(rows, tokens, logits, strict=True):
        assert_drawn(token, row.number, line, sampling)


def test_rows_with_settings_of_their_own_each_get_theirs():
    logits = model(3, 6)
    settings_of_rows = [Sampling(temperature=0.5 + i / 4, top_p=0.4 + i / 10, min_p=i / 1000) for i in range(6)]
    rows = [rows_across(sampling, 6, LARGE)[i] for i, sampling in enumerate(settings_of_rows)]
    for row, token, line, sampling in zip(rows, tokens_of(logits, rows), logits, settings_of_rows, strict=True):
        assert_drawn(token, row.number, line, sampling)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.0), Sampling(1.0, top_k=1), Sampling(1.0, min_p=1.0)])
def test_the_tightest_filters_keep_the_likeliest_token(sampling):
    logits = model(4, 16)
    assert tokens_of(logits, rows_across(sampling, 16, LARGE)) == logits.argmax(axis=-1).tolist()


def test_equals_stand_or_fall_together():
    logits = np.full((64, LARGE), -9.0)
    logits[:, [10, 2_000, 4_000]] = 5.0
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.1), Sampling(1.0, top_p=0.5)):
        assert set(tokens_of(logits, rows_across(sampling, 64, LARGE))) == {10, 2_000, 4_000}


def test_equals_stand_or_fall_together_also_where_there_are_more_than_a_shortlist_of_them():
    logits = np.full((640, LARGE), -20.0)
    logits[:, ::16] = 5.0
    drawn = tokens_of(logits, rows_across(Sampling(1.0, top_p=0.5), 640, LARGE))
    assert set(drawn) == set(range(0, LARGE, 16))


@pytest.mark.parametrize(
    "sampling", [PLAIN, Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=5), Sampling(1.0, min_p=0.1)]
)
@pytest.mark.parametrize("number", [0.0, 1 - 2**-24, 1.0])
def test_a_number_at_the_edge_draws_no_token_of_probability_0(sampling, number):
    """1.0 is none of ours, but a product with it is what rounding makes of a number just below."""
    logits = np.full((1, LARGE), -math.inf)
    logits[0, 2_500:2_503] = 0
    row = rows_across(sampling, 1, LARGE)[0]
    row.number = number
    assert tokens_of(logits, [row]) == [2_500 if number == 0 else 2_502]


def test_a_nearly_cold_temperature_is_greedy():
    logits = model(5, 4)
    rows = rows_across(Sampling(temperature=1e-30), 4, LARGE)
    assert tokens_of(logits, rows) == logits.argmax(axis=-1).tolist()


def penalised(logits, sampling, prompt, answer):
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(answer):
        logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
    for token in set(answer):
        logits[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    return logits


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(repetition_penalty=0.8),
        Sampling(presence_penalty=0.6),
        Sampling(frequency_penalty=0.4),
        Sampling(repetition_penalty=1.2, presence_penalty=-0.2, frequency_penalty=0.3),
    ],
)
def test_penalties_count_prompt_and_answer_as_the_reference_does(sampling):
    logits = np.random.default_rng(0).normal(size=(1, SMALL)).astype(np.float32)
    prompt = (int(logits.argmax()), 4, 10**6)
    generated = [int(np.argsort(logits[0])[-2])]
    row = a_row(sampling, vocab_size=SMALL, prompt=prompt, generated=generated)
    answer = list(generated)
    for _ in range(12):
        expected = penalised(logits[0], sampling, set(prompt) - {10**6}, answer).argmax()
        answer += tokens_of(logits, [row])
        assert answer[-1] == expected
    assert len(set(answer)) > 1 or sampling.repetition_penalty < 1


def test_a_penalty_lifts_nothing_that_is_forbidden():
    mask = np.array([0b11], dtype=np.uint32)
    row = a_row(Sampling(repetition_penalty=0.1, frequency_penalty=-2.0), vocab_size=SMALL, prompt=(7,), generated=(7,))
    logits = np.zeros((1, SMALL), dtype=np.float32)
    logits[0, 7] = 9
    assert tokens_of(logits, [row], [mask]) == [0]


def test_stop_tokens_wait_for_min_tokens_also_after_a_resume():
    logits = np.zeros((2, SMALL), dtype=np.float32)
    logits[:, EOS], logits[:, 5] = 9, 8
    fresh = a_row(Sampling(), min_tokens=3, vocab_size=SMALL, stop_ids=(EOS, 10**6))
    resumed = a_row(Sampling(), min_tokens=3, generated=(5,), vocab_size=SMALL)
    steps = [tokens_of(logits, [fresh, resumed]) for _ in range(4)]
    assert steps == [[5, 5], [5, 5], [5, EOS], [EOS, EOS]]


def test_a_bias_adds_and_an_unknown_id_counts_for_nothing():
    logits = np.zeros((2, SMALL), dtype=np.float32)
    biased = a_row(Sampling(logit_bias=((4, 1.0), (9, 2.0), (4, 1.5), (SMALL, 50.0))), vocab_size=SMALL)
    assert tokens_of(logits, [biased, a_row(Sampling(), vocab_size=SMALL)]) == [4, 0]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=5)])
def test_a_grammar_mask_leaves_only_what_it_allows(sampling):
    allowed = [1, 31, 32, 95]
    mask = np.zeros(3, dtype=np.uint32)  # shorter than the vocabulary: the rest is forbidden
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    rows = rows_across(sampling, 40, LARGE)
    drawn = tokens_of(model(6, 40), rows, [mask, None] * 20)
    assert set(drawn[::2]) <= set(allowed)
    assert not set(drawn[1::2]) <= set(allowed)


def test_a_mask_may_be_longer_than_the_vocabulary():
    mask = np.full(9, 0xFFFF_FFF0, dtype=np.uint32)
    assert tokens_of(np.zeros((1, SMALL), dtype=np.float32), [a_row(Sampling())], [mask]) == [4]


@pytest.mark.parametrize("sampling", KINDS)
def test_a_row_without_any_allowed_token_still_gets_one_of_the_vocabulary(sampling):
    forbid = np.zeros(1, dtype=np.uint32)
    result = sample(mx.zeros((1, LARGE)), [a_row(sampling)], [forbid])
    assert 0 <= result.tokens.item() < LARGE
    assert result.bad().tolist() == [False]


def test_rows_of_nan_are_bad_and_leave_the_others_alone():
    logits = model(8, 2 * len(KINDS))
    rows = [a_row(sampling, seed=1) for sampling in KINDS for _ in range(2)]
    whole = tokens_of(logits, [a_row(sampling, seed=1) for sampling in KINDS for _ in range(2)])
    logits[::2] = math.nan
    result = sample(mx.array(logits), rows)
    assert result.bad().tolist() == [True, False] * len(KINDS)
    assert result.tokens.tolist()[1::2] == whole[1::2]
    assert max(result.tokens.tolist()) < LARGE


def test_logprobs_are_the_models_own_before_any_setting():
    logits = model(9, 4)
    exact = logits.astype(np.float64)
    logprobs = (
        exact
        - np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - exact.max(-1, keepdims=True)
    )
    rows = [
        a_row(Sampling(temperature=2.0, logit_bias=((11, 60.0),), top_logprobs=20)),
        a_row(Sampling()),
        a_row(Sampling(temperature=0.5, top_p=0.5, top_logprobs=0)),
        a_row(Sampling(top_logprobs=3)),
    ]
    result = sample(mx.array(logits), rows)
    mx.eval(result.arrays())
    assert result.scores(1) is None
    for row, count in ((0, 20), (2, 0), (3, 3)):
        chosen, top = result.scores(row)
        best = np.argsort(-logprobs[row])[:count]
        assert chosen == pytest.approx(logprobs[row, result.tokens.tolist()[row]], abs=1e-4)
        assert [alternative.token for alternative in top] == best.tolist()
        assert [alternative.logprob for alternative in top] == pytest.approx(logprobs[row, best].tolist(), abs=1e-4)
    assert result.tokens.tolist()[0] == 11
    assert result.scores(3)[0] == result.scores(3)[1][0].logprob


def test_more_alternatives_than_tokens_are_all_of_them():
    result = sample(mx.zeros((1, 3)), [a_row(Sampling(top_logprobs=20), vocab_size=3)])
    _, top = result.scores(0)
    assert [alternative.token for alternative in top] == [0, 1, 2]


def test_a_greedy_batch_makes_nothing_of_the_logits_size():
    logits = mx.zeros((8, LARGE))
    mx.eval(logits)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(sample(logits, [a_row(Sampling()) for _ in range(8)]).arrays())
    assert mx.get_peak_memory() - before < logits.nbytes / 8


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("gpu", [False, True])
def test_greedy_takes_the_first_of_the_largest_on_any_device(dtype, gpu, monkeypatch):
    monkeypatch.setattr(sampling_module, "on_gpu", lambda: gpu)
    logits = mx.zeros((3, LARGE), dtype=dtype)
    for row, token in enumerate((7, 0, LARGE - 1)):
        logits[row, token] = 2.0
    logits[0, 9] = 2.0
    assert sample(logits, [a_row(Sampling()) for _ in range(3)]).tokens.tolist() == [7, 0, LARGE - 1]


LAZY = (
    Sampling(),
    Sampling(temperature=0.8, min_p=0.1),
    Sampling(temperature=0.8, top_k=40, top_p=0.9),
    Sampling(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
    Sampling(temperature=0.8, logit_bias=((3, 1.0),), top_logprobs=5),
)


ON_ITS_OWN = [(sampling,) for sampling in LAZY]


# On a CPU a greedy row looks at its logits.
@pytest.mark.parametrize(
    ("gpu", "batch"), [*((True, batch) for batch in [*ON_ITS_OWN, LAZY]), *((False, batch) for batch in ON_ITS_OWN[1:])]
)
def test_nothing_is_computed_before_it_is_read_over_several_steps(gpu, batch, monkeypatch):
    monkeypatch.setattr(nucleus, "on_gpu", lambda: gpu)
    monkeypatch.setattr(sampling_module, "on_gpu", lambda: gpu)
    rows = [a_row(sampling, min_tokens=2) for sampling in batch]
    result = sample(mx.zeros((len(rows), LARGE)), rows)
    mx.eval(result.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        logits = mx.random.normal((len(rows), LARGE)) + result.tokens[:, None]
        result = sample(logits, rows)
    assert mx.get_peak_memory() - before < logits.nbytes / 2
    mx.eval(result.arrays())
    assert mx.get_peak_memory() - before >= logits.nbytes
