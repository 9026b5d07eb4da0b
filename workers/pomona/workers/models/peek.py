"""A model's sizes without its weights, from a process of its own: importing mlx-lm lowers the file limit of whoever
does (and on a Mac starts Metal), which the command line must not pass on to Ray.

    python -m pomona.workers.models.peek PATH [--dtype auto] [--kv-bits 8] [--trust-remote-code]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ModelError, PomonaError
from .profile import StateShape

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What `plan` needs to know of a model and of this machine. Bytes and tokens."""

    kv_bytes_per_token: int
    aux_bytes_per_slot: int
    weights_bytes: int
    context_tokens: int
    working_set_bytes: int

    @property
    def shape(self) -> StateShape:
        return StateShape(self.kv_bytes_per_token, self.aux_bytes_per_slot)


def peek(path: Path, *, dtype: str, trust_remote_code: bool, kv_bits: int | None = None) -> Sizes:
    """Ask a child process about a model folder or a GGUF file. Raises ModelError with the child's own sentence."""
    command = [sys.executable, "-m", __name__, str(path), "--dtype", dtype]
    command += ["--trust-remote-code"] if trust_remote_code else []
    command += ["--kv-bits", str(kv_bits)] if kv_bits is not None else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise ModelError(f"{path}: reading its configuration took more than {TIMEOUT_S:.0f} s") from exc
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not answer:
        reason = answer or done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ModelError(reason)
    return Sizes(**json.loads(answer))


def _look(path: Path, *, dtype: str, trust_remote_code: bool, kv_bits: int | None) -> Sizes:
    """What the child does: importing mlx and mlx-lm, but evaluating nothing."""
    from . import profile

    found = (
        profile.peek_gguf(path, dtype=dtype, kv_bits=kv_bits)
        if path.is_file()
        else profile.peek(path, dtype=dtype, trust_remote_code=trust_remote_code, kv_bits=kv_bits)
    )
    return Sizes(
        found.shape.kv_bytes_per_token,
        found.shape.aux_bytes_per_slot,
        found.weights_bytes,
        found.context_tokens,
        profile.working_set_bytes(),
    )


def _main() -> int:
    parser = argparse.ArgumentParser(description="Print a model's sizes as JSON, without loading its weights.")
    parser.add_argument("path", type=Path, help="a model folder or a .gguf file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    try:
        sizes = _look(**vars(args))
    except PomonaError as exc:
        print(exc)
        return 1
    print(json.dumps(asdict(sizes)))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
