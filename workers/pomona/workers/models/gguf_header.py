"""The head of a GGUF file, read with `struct` only as far as the architecture.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelError

MAGIC = b"GGUF"
SUPPORTED = ("llama",)

_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_gguf(path: Path) -> None:
    """Raises ModelError when `path` is not GGUF, or is GGUF of an architecture we do not convert."""
    architecture = read_architecture(path)
    if architecture not in SUPPORTED:
        raise ModelError(
            f"{path} is GGUF of architecture {architecture!r}, but only {', '.join(SUPPORTED)} is supported as GGUF; "
            "use the same model in safetensors form instead."
        )


def read_architecture(path: Path) -> str:
    """The value of `general.architecture`; ModelError when the file is not GGUF, is cut short, or has none."""
    try:
        with path.open("rb") as file:
            return _architecture(file, path)
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as exc:
        raise ModelError(f"{path} starts like GGUF but its header cannot be read; fetch the file again.") from exc
    except OSError as exc:
        raise ModelError(f"{path} cannot be read ({exc.strerror}); check the path and its permissions.") from exc


def _architecture(file: BinaryIO, path: Path) -> str:
    if file.read(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it does not begin with GGUF); give a GGUF file or a folder.")
    version, _, pairs = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}, but only versions 2 and 3 are supported; convert it anew.")
    for _ in range(pairs):
        key = _string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if key == "general.architecture" and kind == _STRING:
            return _string(file)
        _skip(file, kind)
    raise ModelError(f"{path} is GGUF without general.architecture, so it holds no model; fetch the file again.")


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(length) if length < 1 << 24 else b""
    if len(data) != length:
        raise struct.error("string runs past the end of the file")
    return data.decode("utf-8")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _skip_string(file)
    elif kind == _ARRAY:
        item, count = struct.unpack("<IQ", file.read(12))
        if item in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[item] * count, 1)
            return
        for _ in range(count):
            _skip(file, item)
    else:
        file.seek(_SCALAR_BYTES[kind], 1)


def _skip_string(file: BinaryIO) -> None:
    (length,) = struct.unpack("<Q", file.read(8))
    file.seek(length, 1)
