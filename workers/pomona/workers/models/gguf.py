"""GGUF files of the llama architecture, turned into folders that mlx-lm loads.

python -m pomona.workers.models.gguf SRC.gguf OUT_FOLDER --dtype float32
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from ..errors import ModelError
from .gguf_config import Metadata, heads, layer_count, model_config
from .gguf_header import check_gguf, read_header
from .gguf_kinds import check_tensors
from .gguf_tensors import check_complete, convert_tensors, quantization
from .gguf_tokenizer import build_tokenizer, tokenizer_config

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "quantized")

# Longer than the conversion of the largest llama takes: 405B parameters at 1 GB/s are 14 minutes.
LOCK_WAIT_S = 30 * 60.0

_SHARD_BYTES = 4 << 30

Progress = Callable[[float], None]


def resolve_dtype(dtype: str) -> str:
    """What "auto" converts to on this machine; any other known dtype is itself. Raises ModelError.

    Quantised weights stay so on a GPU; on a CPU, where 4-bit is unusably slow (FACTS), they become float32.
    """
    import mlx.core as mx

    if dtype == "auto":
        return "quantized" if mx.metal.is_available() else "float32"
    _check_dtype(dtype)
    return dtype


def convert(gguf: Path, out: Path, *, dtype: str, progress: Progress | None = None) -> None:
    """Writes `gguf` as an mlx-lm folder at `out`, which appears whole or not at all.

    `dtype` dequantises every weight to float32, bfloat16 or float16; "quantized" keeps MLX's quantised tensors as
    they came and the rest in float16. `progress` gets the fraction done, 0 to 1.
    Raises ModelError for anything but a readable GGUF of a supported architecture, and when `out` is already there.
    """
    _check_dtype(dtype)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is already there; remove it or name another folder.")
    check_gguf(gguf)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(out) as partial:
        _write(gguf, partial, dtype, progress or (lambda _: None))
        os.rename(partial, out)


def cached_conversion(gguf: Path, cache: Path, dtype: str, progress: Progress | None) -> Path:
    """The converted folder of `gguf` in `cache`, made on the first call and found on later ones.

    The folder's name holds a hash of the file's size, time and first MiB, so a changed file is converted anew. Of
    several processes one converts and the others wait; ModelError naming the lock file after LOCK_WAIT_S.
    """
    folder = cache / f"{gguf.stem}-{dtype}-{_fingerprint(gguf)}"
    if folder.is_dir():
        return folder
    with _only_one(folder):
        if not folder.is_dir():
            _sweep(folder)
            convert(gguf, folder, dtype=dtype, progress=progress)
    return folder


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the lock beside `folder`, which the system frees when its holder dies."""
    file = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file)
        _acquire(lock)
    except Timeout as exc:
        raise ModelError(
            f"Another process has been converting to {folder} for {LOCK_WAIT_S / 60:.0f} minutes; end it, or remove "
            f"{file} if none is running."
        ) from exc
    except (OSError, NotImplementedError) as exc:
        raise ModelError(f"{file} cannot be locked ({exc}); check the folder's permissions and free space.") from exc
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for another process that converts the same file, as %s says", lock.lock_file)
        lock.acquire(timeout=LOCK_WAIT_S)


def _sweep(folder: Path) -> None:
    """Removes what conversions to `folder` that were killed left behind; call it with the lock held."""
    stale = re.compile(rf"\.{re.escape(folder.name)}\.\w+\.partial")  # as `_sibling` names them
    for path in folder.parent.iterdir():
        if stale.fullmatch(path.name):
            log.info("removing %s, left by a conversion that was cut short", path)
            shutil.rmtree(path, ignore_errors=True)


def weights_and_config(
    tensors: dict[str, Any], metadata: Metadata, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lazy weights under mlx-lm's names, and the config.json that goes with them; takes `rope_freqs` out."""
    factors = tensors.pop("rope_freqs.weight", None)
    config = model_config(
        metadata,
        vocab=int(tensors["token_embd.weight"].shape[0]),
        tied="output.weight" not in tensors,
        rope_factors=None if factors is None else factors.tolist(),
    )
    weights = convert_tensors(tensors, heads(metadata), dtype)
    config["torch_dtype"] = "float16" if dtype == "quantized" else dtype
    if (packing := quantization(weights)) is not None:
        config["quantization"] = packing
    return weights, config


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}.")


def _fingerprint(gguf: Path) -> str:
    check_gguf(gguf)
    stat = gguf.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:12]


@contextmanager
def _sibling(out: Path) -> Iterator[Path]:
    """A folder beside `out`, on the same file system so that a rename is atomic; removed if it is still there."""
    path = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _write(gguf: Path, folder: Path, dtype: str, progress: Progress) -> None:
    tensors, metadata = _read(gguf)
    tokenizer = build_tokenizer(metadata)
    weights, config = weights_and_config(tensors, metadata, dtype)
    tensors.clear()
    _save_weights(weights, folder, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _save_json(folder / "generation_config.json", {k: v for k, v in config.items() if k.endswith("_token_id")})
    _save_json(folder / "config.json", config)


def _read(gguf: Path) -> tuple[dict[str, Any], Metadata]:
    """Tensors, and metadata as plain Python values."""
    import mlx.core as mx

    check_tensors(read_header(gguf), gguf)  # mlx trusts the header
    try:
        loaded: Any = mx.load(str(gguf), return_metadata=True)
    except (RuntimeError, ValueError) as exc:
        raise ModelError(f"{gguf} cannot be read as GGUF ({exc}); fetch the file again or use safetensors.") from exc
    tensors, metadata = loaded
    plain: Metadata = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
    check_complete(tensors, layer_count(plain))
    return tensors, plain


def _save_weights(weights: dict[str, Any], folder: Path, progress: Progress) -> None:
    """Writes model.safetensors, or numbered parts when it is large, holding one part in memory at a time."""
    import mlx.core as mx

    total = sum(int(array.nbytes) for array in weights.values())
    parts, done = list(_parts(weights)), 0
    for number, names in enumerate(parts, start=1):
        part = {name: weights.pop(name) for name in names}
        for array in part.values():
            mx.eval(array)
            done += int(array.nbytes)
            progress(done / total)
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        mx.save_safetensors(str(folder / name), part, {"format": "mlx"})


def _parts(weights: dict[str, Any]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, array in weights.items():
        if names and size + array.nbytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    yield names


def _save_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Converts one file from the command line."""
    parser = argparse.ArgumentParser(prog="pomona.workers.models.gguf", description="Convert GGUF to an mlx-lm folder.")
    parser.add_argument("source", type=Path, help="a .gguf file of the llama architecture")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args()
    try:
        convert(arguments.source, arguments.out, dtype=arguments.dtype)
    except ModelError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
