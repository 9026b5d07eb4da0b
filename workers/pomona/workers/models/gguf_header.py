"""The head of a GGUF file, metadata and tensor descriptions, read with `struct`; no weight is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import ModelError

MAGIC = b"GGUF"
SUPPORTED = ("llama",)

# Real heads are up to 20 MiB, with a thousand tensors and half a million merges (a vocabulary of 262,144 tokens). The
# bounds keep a file that lies from costing more than seconds, or more memory than this.
_MAX_HEAD_BYTES = 64 << 20
_MAX_TENSORS = 1 << 16
_MAX_PAIRS = 1 << 16
_MAX_TEXTS = 1 << 21
_MAX_TEXT_BYTES = 16 << 20
_MAX_KEPT_ITEMS = 1 << 16
_MAX_DIMENSIONS = 4
_BUFFER_BYTES = 1 << 18

_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64, _COUNTS = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQQ")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as announced: `shape` as MLX has it (rows first), `kind` the GGML type, `offset` into the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """Scalars, strings and `llama.*` arrays of the metadata, all tensors, and the bytes that follow for their data."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_bytes: int


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
    found = _read(path, _architecture)
    if not isinstance(found, str):
        raise ModelError(f"{path} is GGUF without general.architecture, so it holds no model; fetch the file again.")
    return found


def read_header(path: Path) -> Header:
    """Everything before the weights; ModelError as `read_architecture` raises, for any part that cannot be read."""
    return _read(path, _header)


class _Reader:
    """Reads forward, never past the end of the file or the longest head; EOFError there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.at = file.tell()
        self._end = min(self.size, _MAX_HEAD_BYTES)

    def take(self, count: int) -> bytes:
        self._advance(count)
        data = self._file.read(count)
        if len(data) != count:
            raise EOFError("the file became shorter while it was read")
        return data

    def skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, 1)

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def text(self) -> str:
        length = self.number(_U64)
        if length > _MAX_TEXT_BYTES:
            raise EOFError("a string longer than any real one")
        return self.take(length).decode("utf-8")

    def skip_texts(self, count: int) -> None:
        """One loop without calls to our own methods: a head holds half a million strings that nothing here needs."""
        read, seek, unpack, end, at = self._file.read, self._file.seek, _U64.unpack, self._end, self.at
        for _ in range(count):
            length = unpack(read(8))[0]
            at += 8 + length
            if at > end:
                raise EOFError("the head runs past the end of the file")
            seek(length, 1)
        self.at = at

    def _advance(self, count: int) -> None:
        self.at += count
        if self.at > self._end:
            raise EOFError("the head runs past the end of the file")


def _read(path: Path, parse: Callable[[_Reader, int, int], T]) -> T:
    """`parse(reader, tensors, pairs)` behind the magic and version, with every failure a ModelError."""
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file (it does not begin with GGUF); give a GGUF file or a folder."
                )
            reader = _Reader(file)
            version, tensors, pairs = _COUNTS.unpack(reader.take(_COUNTS.size))
            if version not in (2, 3):
                raise ModelError(
                    f"{path} is GGUF version {version}, but only versions 2 and 3 are supported; convert it anew."
                )
            _check_count(tensors, _MAX_TENSORS)
            _check_count(pairs, _MAX_PAIRS)
            return parse(reader, tensors, pairs)
    except (EOFError, KeyError, ValueError, struct.error) as exc:
        raise ModelError(f"{path} starts like GGUF but its header cannot be read; fetch the file again.") from exc
    except OSError as exc:
        raise ModelError(f"{path} cannot be read ({exc.strerror}); check the path and its permissions.") from exc


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"the head announces {count} items where real ones have up to {most}")


def _architecture(reader: _Reader, _: int, pairs: int) -> Any:
    return next((value for key, value in _metadata(reader, pairs) if key == "general.architecture"), None)


def _header(reader: _Reader, tensors: int, pairs: int) -> Header:
    metadata = {key: value for key, value in _metadata(reader, pairs) if value is not None}
    infos = tuple(_tensor(reader) for _ in range(tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    return Header(metadata, infos, reader.size - reader.at - -reader.at % alignment)


def _metadata(reader: _Reader, pairs: int) -> Iterator[tuple[str, Any]]:
    """Keys with their values, one at a time; None for an array that is skipped."""
    for _ in range(pairs):
        key, kind = reader.text(), reader.number(_U32)
        if kind == _STRING:
            yield key, reader.text()
        elif kind == _ARRAY:
            yield key, _array(reader, keep=key.startswith("llama."))
        else:
            yield key, reader.number(_SCALARS[kind])


def _array(reader: _Reader, *, keep: bool) -> list[Any] | None:
    """The items, or None once they are passed over. Vocabularies are most of a head, and no size depends on them."""
    kind, count = reader.number(_U32), reader.number(_U64)
    if kind == _STRING:
        _check_count(count, _MAX_TEXTS)
        reader.skip_texts(count)
        return None
    form = _SCALARS[kind]  # KeyError for arrays of arrays too, which MLX does not read either
    if keep and count <= _MAX_KEPT_ITEMS:
        return [value for (value,) in form.iter_unpack(reader.take(count * form.size))]
    reader.skip(count * form.size)
    return None


def _tensor(reader: _Reader) -> TensorInfo:
    name, dimensions = reader.text(), reader.number(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = [reader.number(_U64) for _ in range(dimensions)]
    return TensorInfo(name, tuple(reversed(shape)), reader.number(_U32), reader.number(_U64))
