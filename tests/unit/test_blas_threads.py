"""The number of BLAS threads of a decode step: tried, measured, chosen; prefill gets all."""

from __future__ import annotations

from pomona.workers.engine.blas_threads import RETRIAL_STEPS, TRIAL_STEPS, BlasThreads, ThreadChooser


def learnt(chooser: ThreadChooser, rows: int, seconds: dict[int, float], steps: int) -> list[int]:
    """Run so many steps that take `seconds[threads]`; the choices."""
    choices = []
    for _ in range(steps):
        choices.append(chooser.choose(rows))
        chooser.record(rows, choices[-1], seconds[choices[-1]])
    return choices


def test_every_count_is_tried_and_the_fastest_stays():
    choices = learnt(ThreadChooser([1, 2, 4]), 8, {1: 0.3, 2: 0.1, 4: 0.2}, 3 * TRIAL_STEPS + 10)
    assert choices[: 3 * TRIAL_STEPS] == [4] * TRIAL_STEPS + [2] * TRIAL_STEPS + [1] * TRIAL_STEPS
    assert set(choices[3 * TRIAL_STEPS :]) == {2}


def test_row_counts_are_judged_apart():
    chooser = ThreadChooser([1, 2])
    learnt(chooser, 8, {1: 0.1, 2: 0.2}, 2 * TRIAL_STEPS)
    learnt(chooser, 1, {1: 0.2, 2: 0.1}, 2 * TRIAL_STEPS)
    assert (chooser.choose(8), chooser.choose(1)) == (1, 2)


def test_a_machine_that_changes_is_measured_again():
    chooser = ThreadChooser([1, 2])
    learnt(chooser, 8, {1: 0.1, 2: 0.2}, RETRIAL_STEPS)
    learnt(chooser, 8, {1: 0.3, 2: 0.2}, 40 * TRIAL_STEPS)
    assert chooser.choose(8) == 2


def test_decode_steps_are_measured_and_prefill_gets_all():
    said: list[int] = []
    threads = BlasThreads(said.append, 2)
    for _ in range(TRIAL_STEPS):
        threads.decode(8)
        threads.decoded(1.0)
    assert said == []
    threads.decode(8)
    assert said == [1], "the other count is tried"
    threads.prefill()
    threads.prefill()
    assert said == [1, 2]
    threads.decode(8)
    threads.decoded(0.5)
    assert said == [1, 2, 1]


def test_a_prefill_between_two_decode_steps_changes_nothing_that_was_learnt():
    said: list[int] = []
    threads = BlasThreads(said.append, 2)
    for _ in range(2 * TRIAL_STEPS):
        threads.prefill()
        threads.decode(8)
        threads.decoded({1: 0.1, 2: 0.2}[said[-1] if said else 2])
    threads.prefill()
    threads.decode(8)
    assert said[-1] == 1


def test_without_openblas_nothing_is_set():
    threads = BlasThreads(None, 1)
    threads.prefill()
    threads.decode(8)
    threads.decoded(1.0)
    threads.decode(8)


def test_a_machine_of_one_core_has_no_choice():
    said: list[int] = []
    threads = BlasThreads(said.append, 1)
    for _ in range(2 * TRIAL_STEPS):
        threads.decode(8)
        threads.decoded(1.0)
    assert said == []
