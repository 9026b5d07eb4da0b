"""From what the operator typed to a model that can be loaded: a folder, a GGUF file, or a name on the hub.

Nothing here imports mlx, mlx-lm or transformers: the command line calls it before anything is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import hub
from .architectures import check_architecture
from .gguf_header import MAGIC, check_gguf

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceKind(Enum):
    """Where a model comes from."""

    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that exists.

    `path` is the folder or the file; for a hub name the snapshot in the local cache, or None until `fetch`.
    `config` is the parsed config.json where there is one at hand: None for GGUF and for a hub name not yet fetched.
    """

    kind: SourceKind
    name: str
    path: Path | None
    config: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def served_name(self) -> str:
        """The name clients use when the operator gives none: the last part of the path, without `.gguf`."""
        if self.kind is SourceKind.HUB:
            return self.name.rsplit("/", 1)[-1]
        return Path(self.name).expanduser().resolve().name.removesuffix(".gguf")


def resolve(name: str) -> ModelSource:
    """Finds the model and checks everything that can be checked without reading weights, within 3 seconds.

    Raises ModelError: the path is not there, the folder lacks a file (named), mlx-lm has no such model type, the
    GGUF is broken or of another architecture, or the hub has no such model or cannot be asked.
    """
    if not name.strip():
        raise ModelError(
            "The model's name is empty; give a model folder, a .gguf file, or a hub name such as org/name."
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource(SourceKind.FOLDER, name, path, check_folder(path))
    if path.is_file():
        _check_file(path)
        return ModelSource(SourceKind.GGUF, name, path)
    if _looks_like_path(name):
        raise ModelError(f"{name} is not there; give a model folder, a .gguf file, or a hub name such as org/name.")
    return _resolve_hub(name)


def fetch(source: ModelSource, progress: Callable[[int, int], None] | None = None) -> Path:
    """The local folder or file of `source`, downloaded from the hub if need be; `progress(done_bytes, total_bytes)`.

    Repository code that comes along is not run: that needs `trust_remote_code` at loading.
    Raises ModelError when the download fails or what came down is not a model.
    """
    if source.path is not None:
        return source.path
    folder = hub.download(source.name, progress)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a complete model folder; ModelError naming the first thing that is wrong."""
    config = read_config(folder)
    check_files({path.name for path in folder.iterdir()}, str(folder))
    if missing := missing_shards(folder):
        raise ModelError(
            f"{folder} is incomplete: {missing[0]} and {len(missing) - 1} more are missing; fetch it again."
        )
    check_architecture(config, str(folder))
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as an object; ModelError when it is missing, unreadable, or something else."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not a model folder: config.json is missing; give the folder that holds it.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelError(f"{file} cannot be read as JSON ({exc}); fetch the model again.") from exc
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object; fetch the model again.")
    return config


def check_files(files: Iterable[str], name: str) -> None:
    """ModelError when the file names hold no weights or no tokenizer that mlx-lm reads."""
    names = set(files)
    if not _any_match(names, ("model*.safetensors",)):
        other = " (there is a .gguf file: give its path)" if _any_match(names, ("*.gguf",)) else ""
        raise ModelError(f"{name} has no weights: no model*.safetensors{other}; give a model in safetensors form.")
    if not _any_match(names, TOKENIZER_FILES):
        raise ModelError(
            f"{name} has no tokenizer: tokenizer.json is missing; fetch the model again with its tokenizer."
        )


def _any_match(names: set[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def missing_shards(folder: Path) -> list[str]:
    """Weight files that the index names and the folder lacks: a download that stopped half way."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        shards = {str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelError(f"{index} cannot be read ({exc}); fetch the model again.") from exc
    return sorted(shard for shard in shards if not (folder / shard).is_file())


def _check_file(path: Path) -> None:
    if path.suffix != ".gguf" and not _begins_with_magic(path):
        raise ModelError(f"{path} is a file but not GGUF; give the folder that holds it, or a .gguf file.")
    check_gguf(path)


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith(".gguf") or not _HUB_NAME.fullmatch(name)


def _resolve_hub(name: str) -> ModelSource:
    snapshot = hub.cached_snapshot(name)
    if snapshot is not None and not missing_shards(snapshot):
        return ModelSource(SourceKind.HUB, name, snapshot, check_folder(snapshot))
    listing = hub.ask(name)
    check_files(listing.files, name)
    if listing.config.get("model_type") is not None:
        check_architecture(listing.config, name)
    return ModelSource(SourceKind.HUB, name, None)
