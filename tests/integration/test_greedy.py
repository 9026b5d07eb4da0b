"""Greedy text is mlx-lm's own, alone, in a batch of 8, and from a reused prefix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pomona.workers import environment

QUESTIONS = [
    "What is the capital of France?",
    "Say hi.",
    "Write one sentence about the sea, with the word 'salt' in it, as an old sailor would say it.",
    "List three colours.",
    "What is 2 + 2?",
    "Who wrote Hamlet? Answer with the name only, and nothing else at all, please.",
    "Translate 'good morning' into German.",
    "Draw a smiling face with emoji: 😀😃😄",
]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> dict[str, Any]:
    env = environment.worker_environment(
        openblas_path=environment.openblas(), cpus=os.cpu_count() or 1, ranks_on_host=1
    )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "greedy.py"), str(smollm2), str(MAX_TOKENS)],
        input=json.dumps(QUESTIONS), capture_output=True, text=True, env=os.environ | env, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))


def test_the_model_makes_sense(texts):
    assert "Paris" in texts["reference"][0]


@pytest.mark.parametrize("how", ["alone", "together", "again"])
def test_greedy_text_equals_mlx_lms_generate(texts, how):
    assert texts[how] == texts["reference"]


def test_a_prompt_that_comes_again_is_reused_but_for_its_last_token(texts):
    assert texts["cached_tokens"] == [tokens - 1 for tokens in texts["prompt_tokens"]]


def test_the_engine_stops(texts):
    assert texts["stopped"]
