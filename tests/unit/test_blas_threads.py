"""How many BLAS threads a pass uses: tried, measured, chosen, for decode steps and prompts apart."""

from __future__ import annotations

import pytest

from pomona.workers.engine.blas_threads import (
    HOPELESS_PASSES,
    RETRIAL_PASSES,
    TRIAL_PASSES,
    TRIAL_TOKENS,
    BlasThreads,
    ThreadChooser,
    Trial,
)


def chooser_of(*options: int) -> ThreadChooser:
    return ThreadChooser(options, per_octave=4)


def learnt(chooser: ThreadChooser, tokens: int, seconds: dict[int, float], passes: int) -> list[int]:
    """Run so many passes that take `seconds[threads]`; the choices."""
    choices = []
    for _ in range(passes):
        choices.append(chooser.choose(tokens))
        chooser.record(tokens, choices[-1], seconds[choices[-1]])
    return choices


def test_every_count_has_its_turns_and_the_fastest_stays():
    choices = learnt(chooser_of(1, 2, 4), 8, {1: 0.12, 2: 0.1, 4: 0.1}, 3 * TRIAL_PASSES + 10)
    assert choices[: 3 * TRIAL_PASSES] == [4, 2, 1] * TRIAL_PASSES
    assert set(choices[3 * TRIAL_PASSES :]) == {2}


def test_more_threads_have_to_pay() -> None:
    chooser = chooser_of(1, 2)
    learnt(chooser, 8, {1: 0.102, 2: 0.1}, 2 * TRIAL_PASSES)
    assert chooser.choose(8) == 1


def test_one_that_is_far_slower_is_not_tried_to_the_end():
    choices = learnt(chooser_of(1, 2), 8, {1: 0.2, 2: 0.1}, 20)
    assert choices == [2, 1] * HOPELESS_PASSES + [2] * (20 - 2 * HOPELESS_PASSES)


def test_a_machine_that_gets_slower_during_a_trial_favours_none():
    trial = Trial([1, 2])
    for i in range(2 * TRIAL_PASSES):
        threads = trial.choose()
        trial.record(threads, {1: 0.12, 2: 0.1}[threads] * (1 + i / 5))
    assert trial.best == 2


def test_one_that_is_often_disturbed_is_not_chosen_for_its_fastest_pass():
    trial = Trial([1, 2])
    for seconds in (0.1, 0.2, 0.2, 0.25, 0.1):
        trial.record(2, seconds)
        trial.record(1, 0.17)
    assert trial.best == 1


def test_a_choice_does_not_change_with_every_slow_pass():
    trial = Trial([1, 2])
    for _ in range(2 * TRIAL_PASSES):
        threads = trial.choose()
        trial.record(threads, {1: 0.12, 2: 0.1}[threads])
    for _ in range(50):
        trial.record(2, 1.0)
    assert trial.choose() == 2


def test_sizes_are_judged_apart():
    chooser = chooser_of(1, 2)
    learnt(chooser, 8, {1: 0.1, 2: 0.2}, 2 * TRIAL_PASSES)
    learnt(chooser, 1, {1: 0.2, 2: 0.1}, 2 * TRIAL_PASSES)
    assert (chooser.choose(8), chooser.choose(1)) == (1, 2)


def test_fewer_sizes_are_told_apart_where_passes_are_dear():
    chooser = ThreadChooser([1, 2], per_octave=1)
    learnt(chooser, 100, {1: 10.0, 2: 20.0}, 2 * TRIAL_PASSES)
    assert [chooser.choose(tokens) for tokens in (60, 91, 130, 180)] == [2, 1, 1, 1]
    assert chooser.choose(182) == 2, "the next octave is untried"


def test_long_passes_use_what_was_best_for_shorter_ones_and_try_nothing():
    chooser = chooser_of(1, 2)
    assert learnt(chooser, 2 * TRIAL_TOKENS, {1: 1.0, 2: 1.0}, 20) == [2] * 20
    learnt(chooser, TRIAL_TOKENS // 2, {1: 0.1, 2: 0.2}, 2 * TRIAL_PASSES)
    chooser.record(TRIAL_TOKENS, 2, 1.0)  # of these only one was tried
    assert chooser.choose(2 * TRIAL_TOKENS) == 1


def test_a_machine_that_changes_is_measured_again():
    chooser = chooser_of(1, 2)
    learnt(chooser, 8, {1: 0.1, 2: 0.2}, RETRIAL_PASSES)
    learnt(chooser, 8, {1: 0.3, 2: 0.2}, 2 * TRIAL_PASSES)
    assert chooser.choose(8) == 2


class Machine:
    """A clock that passes by what a pass takes, and the numbers of threads that were set."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.said: list[int] = []
        self.threads = BlasThreads(self.said.append, most, clock=lambda: self.now)

    def decode(self, seconds: float) -> None:
        with self.threads.decode(8):
            self.now += seconds

    def prefill(self, seconds: float) -> None:
        with self.threads.prefill(8):
            self.now += seconds


def test_decode_steps_and_prompts_are_measured_apart():
    machine = Machine(2)
    machine.decode(1.0)
    assert machine.said == []
    machine.decode(0.5)
    assert machine.said == [1], "the other count is tried"
    machine.prefill(1.0)
    assert machine.said == [1, 2], "a prompt has not been tried with all yet"
    machine.decode(1.0)
    machine.decode(0.5)
    assert machine.said == [1, 2, 1]


def test_a_pass_that_fails_teaches_nothing():
    machine = Machine(2)
    for _ in range(3 * TRIAL_PASSES):
        with pytest.raises(RuntimeError), machine.threads.decode(8):
            raise RuntimeError
    assert machine.said == []


def test_without_openblas_nothing_is_set():
    threads = BlasThreads(None, 1)
    with threads.prefill(8):
        pass
    with threads.decode(8):
        pass


def test_a_machine_of_one_core_has_no_choice():
    machine = Machine(1)
    for _ in range(2 * TRIAL_PASSES):
        machine.decode(1.0)
    assert machine.said == []
