"""How many OpenBLAS threads a decode step uses, chosen from measured steps. Linux only: on a Mac there is no OpenBLAS.

A step of few rows is bound by memory, and OpenBLAS' threads wait for each other by spinning: with as many threads as
cores, whatever else the machine does makes all of them wait. How many are best depends on machine and rows, so it is
measured. Prefill is bound by compute and always gets all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Steps that each count is tried for, and after how many steps the others are tried again.
TRIAL_STEPS = 5
RETRIAL_STEPS = 400
SMOOTHING = 0.2


@dataclass(slots=True)
class _Times:
    """Smoothed seconds a step, and how many steps are in it since the last trial."""

    seconds: float = 0.0
    samples: int = 0

    def add(self, seconds: float) -> None:
        weight = max(SMOOTHING, 1 / (self.samples + 1))
        self.seconds += weight * (seconds - self.seconds)
        self.samples += 1


class ThreadChooser:
    """The fastest of `options` for a number of rows; row counts of one power of two are taken together. Pure."""

    def __init__(self, options: Iterable[int]) -> None:
        self._options = tuple(sorted(options, reverse=True))
        self._times: dict[int, dict[int, _Times]] = {}
        self._steps: dict[int, int] = {}

    def choose(self, rows: int) -> int:
        """Each option in turn for a few steps, most threads first; then the fastest."""
        times = self._bucket(rows)
        untried = next((option for option in self._options if times[option].samples < TRIAL_STEPS), None)
        return untried or min(self._options, key=lambda option: times[option].seconds)

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """A step of `rows` took so long. Now and then everything but the present choice is tried anew."""
        times, bucket = self._bucket(rows), rows.bit_length()
        times[threads].add(seconds)
        self._steps[bucket] = self._steps.get(bucket, 0) + 1
        if self._steps[bucket] % RETRIAL_STEPS == 0:
            for option in self._options:
                times[option].samples = TRIAL_STEPS if option == threads else 0

    def _bucket(self, rows: int) -> dict[int, _Times]:
        return self._times.setdefault(rows.bit_length(), {option: _Times() for option in self._options})


class BlasThreads:
    """Sets the number before each step and learns from how long it took. Does nothing where there is no OpenBLAS."""

    def __init__(self, set_threads: Callable[[int], None] | None, most: int) -> None:
        self._set = set_threads if most > 1 else None
        self._most = self._now = most
        self._chooser = ThreadChooser({1, max(1, most // 2), most})
        self._rows = 0

    def decode(self, rows: int) -> None:
        """A decode step of so many rows comes."""
        self._rows = rows
        self._use(self._chooser.choose(rows))

    def decoded(self, seconds: float) -> None:
        """It took so long."""
        if self._set is not None:
            self._chooser.record(self._rows, self._now, seconds)

    def prefill(self) -> None:
        """A prompt chunk comes."""
        self._use(self._most)

    def _use(self, threads: int) -> None:
        if self._set is not None and threads != self._now:
            self._set(threads)
            self._now = threads


def of_this_process() -> BlasThreads:
    """OpenBLAS as it was preloaded into this process, if it was."""
    loaded = ctypes.CDLL(None)
    try:
        return BlasThreads(loaded.openblas_set_num_threads, int(loaded.openblas_get_num_threads()))
    except AttributeError:
        return BlasThreads(None, 1)
