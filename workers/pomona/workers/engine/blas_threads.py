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
from dataclasses import dataclass

# Passes that each count is tried for, and after how many passes the others are tried again.
TRIAL_PASSES = 5
RETRIAL_PASSES = 400
# One that is so much slower in its first pass is tried no further.
HOPELESS = 1.3
# Nothing is tried on passes over more tokens, since one could take seconds: they use what is best for fewer.
TRIAL_TOKENS = 256
# Twice the threads have to gain so much: they take cores from whatever else has work.
WORTH_DOUBLING = 0.1
SMOOTHING = 0.2


@dataclass(slots=True)
class _Times:
    """Smoothed seconds a token, and how many passes are in it since the last trial."""

    seconds: float = 0.0
    samples: int = 0

    def add(self, seconds: float) -> None:
        weight = max(SMOOTHING, 1 / (self.samples + 1))
        self.seconds += weight * (seconds - self.seconds)
        self.samples += 1


class ThreadChooser:
    """The fastest of `options` for a pass over so many tokens; Pure."""

    def __init__(self, options: Iterable[int]) -> None:
        self._options = tuple(sorted(options, reverse=True))
        self._times: dict[int, dict[int, _Times]] = {}
        self._passes: dict[int, int] = {}

    def choose(self, tokens: int) -> int:
        """Each option in turn for a few passes, most threads first; then the fastest."""
        if tokens > TRIAL_TOKENS:
            return self._best(self._largest_tried())
        times = self._times_of(tokens)
        best = self._best(times)
        for option in self._options:
            samples = times[option].samples
            if not samples or (samples < TRIAL_PASSES and times[option].seconds < HOPELESS * times[best].seconds):
                return option
        return best

    def record(self, tokens: int, threads: int, seconds: float) -> None:
        """A pass over `tokens` took so long. Now and then everything but the present choice is tried anew."""
        if tokens > TRIAL_TOKENS:
            return
        times, bucket = self._times_of(tokens), _bucket(tokens)
        times[threads].add(seconds / tokens)
        self._passes[bucket] = self._passes.get(bucket, 0) + 1
        if self._passes[bucket] % RETRIAL_PASSES == 0:
            for option in self._options:
                times[option].samples = TRIAL_PASSES if option == threads else 0

    def _best(self, times: dict[int, _Times]) -> int:
        """The fastest, where each thread more pays."""
        tried = [option for option in self._options if times[option].samples]
        worth = {option: times[option].seconds * (1 + WORTH_DOUBLING) ** math.log2(option) for option in tried}
        return min(worth, key=lambda option: worth[option], default=self._options[0])

    def _largest_tried(self) -> dict[int, _Times]:
        """Of the longest passes that more than one option was tried on; empty where there are none."""
        for bucket in sorted(self._times, reverse=True):
            if sum(1 for times in self._times[bucket].values() if times.samples) > 1:
                return self._times[bucket]
        return {option: _Times() for option in self._options}

    def _times_of(self, tokens: int) -> dict[int, _Times]:
        return self._times.setdefault(_bucket(tokens), {option: _Times() for option in self._options})


def _bucket(tokens: int) -> int:
    """1, 2, 3 and 4, 5 to 8, ... 129 to 256 tokens are taken together."""
    return (tokens - 1).bit_length()


class BlasThreads:
    """Sets the number for a pass and learns from how long it took. Does nothing where there is no OpenBLAS."""

    def __init__(
        self, set_threads: Callable[[int], None] | None, most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._set = set_threads if most > 1 else None
        self._now = most
        self._clock = clock
        options = {1, max(1, most // 2), most}
        self._decode, self._prefill = ThreadChooser(options), ThreadChooser(options)

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
