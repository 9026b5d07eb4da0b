"""Starts one server, waits until it answers, and ends it: `pomona serve` or `mlx_lm.server`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from client import LoadFailed, Target

from pomona.workers import environment

BIN = Path(sys.executable).parent
START_S, STOP_S = 120, 40
NAMES = ("pomona", "mlx_lm.server")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def threads() -> dict[str, str]:
    """What pomona gives its only worker on this machine; mlx_lm.server gets the same."""
    return environment.worker_environment(
        openblas_path=environment.openblas(), cpus=os.cpu_count() or 1, ranks_on_host=1
    )


@contextmanager
def serving(name: str, model: Path, options: Sequence[str] = ()) -> Iterator[Target]:
    """The server `name` with `model`, from ready to gone; `options` are flags of its own."""
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    if name == "pomona":
        command = [str(BIN / "pomona"), "serve", str(model), "--served-model-name", "m", "--port", str(port)]
        command += ["--metrics-port", str(free_port())]
        env, probe, served = {}, "/ready", "m"
    else:
        command = [str(BIN / "mlx_lm.server"), "--model", str(model), "--port", str(port), "--log-level", "ERROR"]
        env, probe, served = threads(), "/health", str(model)
    with _running([*command, *options], env, f"{root}{probe}"):
        yield Target(f"{root}/v1", served)


@contextmanager
def _running(command: list[str], env: dict[str, str], probe: str) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_S
            while not _answers(probe):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise LoadFailed(f"{' '.join(command)} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, then insist: nothing may run on beside the next server."""
    process.terminate()  # a shell's background jobs, and so their children, ignore SIGINT
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
