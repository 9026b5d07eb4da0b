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


def test_prefill_gets_all_and_only_steady_steps_are_measured():
    said: list[int] = []
    ticks = iter(range(1000))
    threads = BlasThreads(said.append, 2, clock=lambda: float(next(ticks)))
    for rows, prefilling in [(4, True), (8, True), (8, False)] + [(8, False)] * TRIAL_STEPS:
        threads.before(rows, prefilling=prefilling)
        threads.after()
    assert said == []
    threads.before(8, prefilling=False)
    threads.after()
    assert said == [1]
    threads.before(9, prefilling=True)
    assert said == [1, 2]


def test_without_openblas_nothing_is_set():
    threads = BlasThreads(None, 1)
    threads.before(8, prefilling=False)
    threads.after()
