"""Compiles a client's grammar once in a process of its own, where it may end badly.

llguidance bounds its automata by fuel, but not the reading of a schema: a chain of some thousand references overflows
the stack, and 500 patterns for one string, or a `multipleOf` of two million, keep it busy for minutes. No thread can be
stopped from outside, nor survives the first. What passes here is compiled in the worker with more stack than here, and
takes about the time that it took here.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import EngineError

log = logging.getLogger(__name__)

# Half the smallest stack that a thread of the worker has on any platform that we run on.
STACK_BYTES = 1024 * 1024

# A legitimate mask takes microseconds; under these the worst that a hostile one takes is some 70 ms, once.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)


def build(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """The grammar's automaton before its first token. Raises ValueError with llguidance's reason."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # shows what no answer satisfies, and what branches too much
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if warnings := matcher.get_grammar_warnings():  # it means to go on with a looser grammar
        raise ValueError(warnings[0])
    return matcher


def try_out(source: str, limit_s: float) -> None:
    """Raises ValueError for a grammar that does not compile, within `limit_s` and a small stack."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes longer than {limit_s:g} s to compile") from None
    if done.returncode < 0:
        raise ValueError("it is too large, or nested too deeply, to compile")
    if done.returncode > 0:
        log.error("a grammar's trial could not run: %s", done.stderr.decode(errors="replace"))
        raise EngineError("the grammar could not be tried out")
    if done.stdout:
        raise ValueError(done.stdout.decode())


def _report() -> None:
    try:
        build(LLTokenizer("byte"), sys.stdin.buffer.read().decode())
    except ValueError as exc:
        sys.stdout.buffer.write(str(exc).encode())


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    trial = threading.Thread(target=_report)
    trial.start()
    trial.join()
