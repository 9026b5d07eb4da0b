"""What a sampling step costs, in milliseconds, best of six; beside it mlx-lm's samplers called row by row.

Run: python tests/bench/sampling.py [vocabulary size]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from pomona.workers.engine.base import EngineRequest, Sampling
from pomona.workers.engine.sampling import RowSampler, sample

BATCHES = (16, 64)
TOP_P = Sampling(temperature=0.8, top_p=0.9)
CASES: dict[str, tuple[Sampling, ...]] = {
    "greedy": (Sampling(),),
    "temperature 0.8": (Sampling(temperature=0.8),),
    "top_p 0.9": (TOP_P,),
    "top_p 0.9, too flat to be short": (Sampling(temperature=1.5, top_p=0.9),),
    "top_k 40": (Sampling(temperature=0.8, top_k=40),),
    "top_k 20, top_p 0.8": (Sampling(temperature=0.8, top_k=20, top_p=0.8),),
    "min_p 0.05": (Sampling(temperature=0.8, min_p=0.05),),
    "presence and frequency": (Sampling(presence_penalty=0.5, frequency_penalty=0.5),),
    "repetition": (Sampling(repetition_penalty=1.1),),
    "logprobs 5": (Sampling(top_logprobs=5),),
    "3 of 4 greedy, 1 top_p": (Sampling(), Sampling(), Sampling(), TOP_P),
}


def zipf(rows: int, vocab_size: int) -> mx.array:
    """Logits as a model's: a few likely tokens and a long tail, in another order in each row."""
    generator = np.random.default_rng(0)
    tail = -1.3 * np.log(np.arange(1, vocab_size + 1))
    return mx.array(np.stack([generator.permutation(tail) for _ in range(rows)]).astype(np.float32))


def ours(logits: mx.array, settings: tuple[Sampling, ...]) -> Callable[[], object]:
    size, stop = logits.shape[-1], frozenset({2})
    requests = [EngineRequest("bench", prompt=tuple(range(200)), sampling=sampling) for sampling in settings]
    rows = [
        RowSampler(requests[index % len(requests)], (), vocab_size=size, stop_ids=stop, seed=index)
        for index in range(len(logits))
    ]
    return lambda: mx.eval(sample(logits, rows).arrays())


def mlx_lm(logits: mx.array, settings: tuple[Sampling, ...]) -> Callable[[], object]:
    """As its GenerationBatch: log probabilities of all rows, then a sampler a row; no penalties, no alternatives."""
    samplers = [make_sampler(s.temperature, s.top_p % 1, s.min_p, top_k=s.top_k) for s in settings]

    def step() -> None:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        rows = range(len(logits))
        mx.eval(mx.concatenate([samplers[row % len(samplers)](logprobs[row : row + 1]) for row in rows]))

    return step


def best_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main(vocab_size: int) -> None:
    print(f"{'ms, vocabulary ' + str(vocab_size):32}" + "".join(f"{'B=' + str(b):>8}{'mlx-lm':>8}" for b in BATCHES))
    batches = [zipf(rows, vocab_size) for rows in BATCHES]
    for name, settings in CASES.items():
        figures = [best_ms(make(logits, settings)) for logits in batches for make in (ours, mlx_lm)]
        print(f"{name:32}" + "".join(f"{figure:8.1f}" for figure in figures))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 49_152)
