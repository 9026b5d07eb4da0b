"""Compiles the grammars of requests off the engine's thread and the event loop, and keeps those in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pomona.v1 import inference_pb2

from ..errors import Overloaded, RequestError
from ..text.grammars import invalid_grammar, source_of
from .grammar import CompiledGrammar, Vocabulary
from .grammar_trial import build, try_out

TRIAL_S = 5.0
THREADS = 2
MAX_WAITING = 16
KEPT = 32


class GrammarCompiler:
    """Two threads and a cache. A grammar that a client wrote is tried in a process of its own first: that is killed
    after `trial_s`, so no thread is ever lost, and a request waits for at most MAX_WAITING others' grammars."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int], *, trial_s: float = TRIAL_S, kept: int = KEPT
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._trial_s = trial_s
        self._kept = kept
        self._threads = ThreadPoolExecutor(THREADS, "pomona-grammar")
        self._cache: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()

    def compile(self, spec: inference_pb2.Grammar) -> CompiledGrammar:
        """The grammar, waited for. Raises RequestError for one that cannot be used, Overloaded as `submit` does."""
        return self.submit(spec).result()

    def submit(self, spec: inference_pb2.Grammar) -> Future[CompiledGrammar]:
        """The grammar, shared by all who ask for the same. Raises Overloaded while too many others wait."""
        key = spec.SerializeToString(deterministic=True)
        with self._cache_lock:
            future = self._cache.get(key)
            if future is None or _spent(future):
                if sum(not other.done() for other in self._cache.values()) >= MAX_WAITING:
                    raise Overloaded("too many grammars are waiting to be compiled")
                future = self._threads.submit(self._compile, spec)
            self._cache[key] = future
            self._cache.move_to_end(key)
            while len(self._cache) > self._kept:
                self._cache.popitem(last=False)
        return future

    def close(self) -> None:
        """Drop what waits; what is being compiled ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: inference_pb2.Grammar) -> CompiledGrammar:
        source = source_of(spec)
        vocabulary = self._read_vocabulary(source.param)
        try:
            if source.foreign:
                try_out(source.text, self._trial_s)
            return CompiledGrammar(build(vocabulary.native, source.text), vocabulary)
        except ValueError as exc:
            raise invalid_grammar(str(exc), source.param) from exc

    def _read_vocabulary(self, param: str) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_ids)
                except ValueError as exc:
                    raise RequestError(
                        f"this model's tokenizer does not allow structured output: {exc}", param=param
                    ) from exc
            return self._vocabulary


def _spent(future: Future[CompiledGrammar]) -> bool:
    if not future.done():
        return False
    return future.cancelled() or future.exception() is not None or future.result().worn
