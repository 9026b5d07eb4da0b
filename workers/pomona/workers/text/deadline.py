"""Work that may take for ever, waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Gives up on work after `seconds`. The work must let go of the interpreter's lock, as the regex package does.

    A thread cannot be ended from outside: the work runs on behind, on a core of its own, and while `left_behind`
    pieces of work do, more is refused.
    """

    def __init__(self, seconds: float, left_behind: int = 2) -> None:
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(left_behind)

    def wait(self, work: Callable[[], T]) -> T:
        """What work() returns or raises; TimeoutError if that takes too long or is refused."""
        if not self._places.acquire(blocking=False):
            raise TimeoutError("earlier work is still running")
        future: Future[T] = Future()

        def run() -> None:  # the place is free before the caller can come back for the next
            try:
                result = work()
            except BaseException as exc:  # the caller's, who asked for the work
                self._places.release()
                future.set_exception(exc)
            else:
                self._places.release()
                future.set_result(result)

        threading.Thread(target=run, name="deadline", daemon=True).start()
        return future.result(timeout=self._seconds)
