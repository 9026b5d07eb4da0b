"""Run by test_greedy.py in a process of its own, with the environment of a worker: prints texts as JSON.

python greedy.py FOLDER MAX_TOKENS < prompts.json
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlx_lm import generate, load

from pomona.workers.engine.base import Batch, EngineLoad, EngineRequest, Share
from pomona.workers.engine.engine import Engine
from pomona.workers.setup import prepare
from pomona.workers.spec import WorkerSpec


def reference(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """What mlx-lm itself says, one prompt after the other."""
    model, tokenizer = load(str(folder), tokenizer_config={"trust_remote_code": False})
    return [generate(model, tokenizer, prompt, max_tokens=max_tokens) for prompt in prompts]


class Asking:
    """The real engine on its own thread."""

    def __init__(self, folder: Path) -> None:
        spec = WorkerSpec("m", str(folder), 0, 0, "here", "127.0.0.1", "", "")
        self._done = threading.Condition()
        self._texts: dict[int, str] = {}
        self._cached: dict[int, int] = {}
        self._engine = Engine(lambda: prepare(spec, lambda _: None).parts, self._publish, clock=time.monotonic)
        self._engine.start()
        while self._engine._parts is None:
            time.sleep(0.01)
        self._engine.allocate(Share(1, 8, 100_000, 0, 0))

    def _publish(self, batch: Batch, _: EngineLoad | None) -> None:
        with self._done:
            for sink, delta in batch:
                sink(delta)
            self._done.notify()

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        """All prompts at once."""
        self._texts, self._cached = dict.fromkeys(range(len(prompts)), ""), {}
        for i, prompt in enumerate(prompts):
            request = EngineRequest(str(i), tuple(prompt), max_tokens)
            self._engine.submit(request, lambda delta, i=i: self._take(i, delta))
        with self._done:
            self._done.wait_for(lambda: len(self._cached) == len(prompts), 300)
        return [self._texts[i] for i in range(len(prompts))]

    def _take(self, i: int, delta: Any) -> None:
        assert delta.error is None, delta.error
        self._texts[i] += delta.text
        if delta.last:
            self._cached[i] = delta.usage.cached_tokens

    def cached_tokens(self) -> list[int]:
        """How much of each prompt the last answers reused."""
        return [tokens for _, tokens in sorted(self._cached.items())]

    def stop(self) -> bool:
        return self._engine.stop()


def main() -> None:
    folder, max_tokens = Path(sys.argv[1]), int(sys.argv[2])
    questions = json.load(sys.stdin)
    _, tokenizer = load(str(folder), tokenizer_config={"trust_remote_code": False}, lazy=True)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True) for q in questions
    ]
    asking = Asking(folder)
    result = {
        "together": asking.answers(prompts, max_tokens),
        "alone": [asking.answers([prompt], max_tokens)[0] for prompt in prompts],
        "again": asking.answers(prompts, max_tokens),
        "cached_tokens": asking.cached_tokens(),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "stopped": asking.stop(),
        "reference": reference(folder, prompts, max_tokens),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
