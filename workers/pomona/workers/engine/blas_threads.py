"""How many OpenBLAS threads a pass uses, chosen from measured passes. Linux only: on a Mac there is no OpenBLAS.

A pass over few tokens is bound by memory, and OpenBLAS' threads wait for each other by spinning: with as many threads
as cores, whatever else the machine does makes all of them wait. How many are best depends on machine, model and tokens,
so it is measured.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

# In a trial the counts take turns for so many passes each, and after so many passes there is another trial.
TRIAL_PASSES = 5
RETRIAL_PASSES = 100
# One that is so much slower in its first passes is tried no further.
HOPELESS_PASSES = 2
HOPELESS = 1.3
# Nothing is tried on passes over more tokens, since one could take seconds: they use what is best for fewer.
TRIAL_TOKENS = 256
# Twice the threads have to gain so much: they take cores from whatever else has work.
WORTH_DOUBLING = 0.03


class Trial:
    """Which of `options` (numbers of threads) is best for passes of about one size. Pure."""

    def __init__(self, options: Iterable[int]) -> None:
        # Seconds a token, most threads first.
        self._seen: dict[int, list[float]] = {option: [] for option in sorted(options, reverse=True)}
        self._passes = 0

    @property
    def over(self) -> bool:
        """It is time for another."""
        return self._passes >= RETRIAL_PASSES

    @property
    def compared(self) -> bool:
        return all(self._seen.values())

    @property
    def best(self) -> int:
        """By the median: a single disturbed pass says nothing, but being disturbed often is what many threads cost."""
        worth = {n: median(seen) * (1 + WORTH_DOUBLING) ** math.log2(n) for n, seen in self._seen.items() if seen}
        return min(worth, key=lambda option: worth[option], default=max(self._seen))

    def choose(self) -> int:
        """In turns, so that a machine that gets slower or faster meanwhile favours none; then the best."""
        untried = [option for option in self._seen if self._is_worth_a_try(option)]
        return min(untried, key=lambda option: len(self._seen[option]), default=self.best)

    def record(self, threads: int, seconds: float) -> None:
        self._passes += 1
        if len(self._seen[threads]) < TRIAL_PASSES:
            self._seen[threads].append(seconds)

    def _is_worth_a_try(self, option: int) -> bool:
        seen = self._seen[option]
        if len(seen) < HOPELESS_PASSES:
            return True
        return len(seen) < TRIAL_PASSES and median(seen) < HOPELESS * min(
            map(median, filter(None, self._seen.values()))
        )


class ThreadChooser:
    """The best number of threads for a pass over so many tokens, judged `per_octave` times in each. Pure."""

    def __init__(self, options: Iterable[int], per_octave: int) -> None:
        self._options = frozenset(options)
        self._per_octave = per_octave
        self._trials: dict[int, Trial] = {}

    def choose(self, tokens: int) -> int:
        if tokens <= TRIAL_TOKENS:
            return self._trial(tokens).choose()
        compared = [bucket for bucket, trial in self._trials.items() if trial.compared]
        return self._trials[max(compared)].best if compared else max(self._options)

    def record(self, tokens: int, threads: int, seconds: float) -> None:
        """A pass over `tokens` took so long."""
        if tokens <= TRIAL_TOKENS:
            self._trial(tokens).record(threads, seconds / tokens)

    def _trial(self, tokens: int) -> Trial:
        bucket = round(self._per_octave * math.log2(tokens))
        if bucket not in self._trials or self._trials[bucket].over:
            self._trials[bucket] = Trial(self._options)
        return self._trials[bucket]


class BlasThreads:
    """Sets the number for a pass and learns from how long it took. Does nothing where there is no OpenBLAS."""

    def __init__(
        self, set_threads: Callable[[int], None] | None, most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._set = set_threads if most > 1 else None
        self._now = most
        self._clock = clock
        options = {1, max(1, most // 2), most}
        # Steps are many and cost little each; prompts are few, and a pass of them is dear.
        self._decode, self._prefill = ThreadChooser(options, per_octave=4), ThreadChooser(options, per_octave=1)

    @contextmanager
    def decode(self, rows: int) -> Iterator[None]:
        """Around a decode step of so many rows."""
        with self._measured(self._decode, rows):
            yield

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Around a pass over so many prompt tokens."""
        with self._measured(self._prefill, tokens):
            yield

    @contextmanager
    def _measured(self, chooser: ThreadChooser, tokens: int) -> Iterator[None]:
        if self._set is None:
            yield
            return
        threads = chooser.choose(tokens)
        if threads != self._now:
            self._set(threads)
            self._now = threads
        began = self._clock()
        yield  # one that fails teaches nothing
        chooser.record(tokens, threads, self._clock() - began)


def of_this_process() -> BlasThreads:
    """OpenBLAS as it was preloaded into this process, if it was."""
    loaded = ctypes.CDLL(None)
    try:
        return BlasThreads(loaded.openblas_set_num_threads, int(loaded.openblas_get_num_threads()))
    except AttributeError:
        return BlasThreads(None, 1)
