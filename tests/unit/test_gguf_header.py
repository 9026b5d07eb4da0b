"""GGUF headers read whole: what is kept, what is passed over, and files that lie about their sizes."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from pomona.workers.errors import ModelError
from pomona.workers.models.gguf_header import TensorInfo, read_architecture, read_header

HUGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def head(*parts: bytes, tensors: int = 0, pairs: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(parts) - tensors if pairs is None else pairs) + b"".join(parts)


def test_scalars_and_llama_arrays_are_kept_and_other_arrays_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    parts = [
        pair("tokens", 9, array(8, 2, text("a") + text("bc"))),
        pair("scores", 9, array(6, 3, bytes(12))),
        pair("llama.kv", 9, array(5, 2, struct.pack("<ii", 3, -4))),
        pair("yes", 7, b"\1"),
        pair("half", 12, struct.pack("<d", 0.5)),
        pair("name", 8, text("x")),
    ]
    tensor = text("w") + struct.pack("<IQQIQ", 2, 8, 5, 0, 64)
    content = head(*parts, tensor, tensors=1)
    file.write_bytes(content + bytes(-len(content) % 32) + bytes(100))
    found = read_header(file)
    assert found.metadata == {"llama.kv": [3, -4], "yes": True, "half": 0.5, "name": "x"}
    assert found.tensors == (TensorInfo("w", (5, 8), 0, 64),)
    assert found.data_bytes == 100


@pytest.mark.parametrize(
    "content",
    [
        head(pairs=HUGE),
        head(tensors=HUGE, pairs=0),
        head(pairs=(1 << 16) + 1),
        head(tensors=1 << 16, pairs=0),
        head(pair("llama.k", 9, array(4, HUGE))),
        head(pair("k", 9, array(12, HUGE))),
        head(pair("k", 9, array(8, HUGE))),
        head(pair("k", 9, array(8, HUGE, text("a") * 3))),
        head(pair("k", 9, array(9, HUGE))),
        head(pair("k", 9, array(9, 1) * 5000)),
        head(pair("k", 8, struct.pack("<Q", HUGE))),
        head(pair("general.alignment", 4, bytes(4))),
        head(text("w") + struct.pack("<I", 1 << 30), tensors=1),
        head(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8)),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("hole", [0, 1 << 40])
def test_counts_that_lie_cost_neither_memory_nor_time(content: bytes, hole: int, tmp_path: Path) -> None:
    """With a hole of a TiB behind it, a file is as long as it claims."""
    file = tmp_path / "x.gguf"
    with file.open("wb") as out:
        out.write(content)
        out.truncate(len(content) + hole)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ModelError, match="cannot be read; fetch the file again"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 3


def test_the_architecture_needs_no_more_than_the_first_pair(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(head(pair("general.architecture", 8, text("llama")), tensors=1 << 16, pairs=2))
    assert read_architecture(file) == "llama"
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(file)
