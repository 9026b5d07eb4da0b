"""The Hugging Face hub: what is in the local cache, what a name means there, and how it is fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

# The same files that mlx-lm fetches (mlx_lm.utils.DEFAULT_ALLOW_PATTERNS, not imported: that would import mlx).
ALLOW_PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Listing:
    """What the hub says about a model: its file names and the short form of its config."""

    files: tuple[str, ...]
    config: dict[str, Any]


def cached_snapshot(name: str) -> Path | None:
    """The snapshot folder of `name` in the local cache, when it holds a config and weights; None otherwise."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if any(folder.glob("model*.safetensors")) else None


def ask(name: str) -> Listing:
    """What the hub knows of `name`, within about `ASK_TIMEOUT_S`; ModelError when it has none or cannot be asked."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, "HF_HUB_OFFLINE is set")
    answers: list[Listing | Exception] = []
    # A thread, since a name server that does not answer outlasts every timeout that can be given to the request.
    thread = threading.Thread(target=_ask_into, args=(name, answers), daemon=True)
    thread.start()
    thread.join(ASK_TIMEOUT_S + 0.5)
    answer = answers[0] if answers else TimeoutError(f"no answer in {ASK_TIMEOUT_S:g} s")
    if isinstance(answer, Exception):
        raise _explain(name, answer) from answer
    return answer


def download(name: str, progress: Callable[[int, int], None] | None = None) -> Path:
    """The snapshot folder of `name` after fetching what mlx-lm would; `progress(done_bytes, total_bytes)`."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=list(ALLOW_PATTERNS), tqdm_class=_bar(progress))
    # huggingface_hub raises its own tree, its HTTP library's, OSError and RuntimeError; all mean: not downloaded.
    except Exception as exc:
        raise _explain(name, exc) from exc
    return Path(folder)


def _ask_into(name: str, answers: list[Listing | Exception]) -> None:
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, timeout=ASK_TIMEOUT_S)
        answers.append(Listing(tuple(file.rfilename for file in info.siblings or ()), dict(info.config or {})))
    except Exception as exc:  # this thread has nobody to raise to; `ask` raises what it left
        answers.append(exc)


def _explain(name: str, error: Exception) -> ModelError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(f"{name} is gated on the Hugging Face hub; accept its terms there and set HF_TOKEN.")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"{name} is neither a local folder nor a model on the Hugging Face hub (if it is private, set HF_TOKEN)."
        )
    return _unreachable(name, str(error).splitlines()[0] if str(error) else type(error).__name__)


def _unreachable(name: str, reason: str) -> ModelError:
    return ModelError(
        f"{name} is not whole in the local Hugging Face cache and the hub could not be asked ({reason}); "
        "give the path of a local model folder, or fetch the model where there is a network."
    )


def _bar(progress: Callable[[int, int], None] | None) -> Any:
    """A tqdm class that prints nothing and passes the byte counts on."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of its two byte bars, `snapshot_download` counts files already in the cache only in this one.
            self._bytes = kwargs.get("unit") == "B" and str(kwargs.get("desc", "")).startswith("Reconstruct")
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
            # A disabled bar counts nothing, and this one is read, not shown.
            self.n, self.total = 0, kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> bool | None:
            self.n += int(n or 0)
            if progress is not None and self._bytes:
                progress(int(self.n), max(int(self.total or 0), int(self.n)))
            return None

    return Bar
