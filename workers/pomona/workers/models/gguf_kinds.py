"""The GGML tensor types that MLX reads, and what each becomes: MLX's own packing, a float, or an integer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .gguf_header import Header, TensorInfo
from .gguf_tensors import GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Kind:
    """`block` values along a row take `block_bytes` in the file. In MLX they are `dtype`, or packed at `bits` each."""

    name: str
    block: int
    block_bytes: int
    dtype: str = "float16"
    bits: int | None = None


# mlx/io/gguf.cpp and gguflib's gguf_tensor_to_f16; checked against MLX 0.32.4 by the tests.
KINDS = {
    0: Kind("F32", 1, 4, "float32"),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18, bits=4),
    3: Kind("Q4_1", 32, 20, bits=4),
    8: Kind("Q8_0", 32, 34, bits=8),
    10: Kind("Q2_K", 256, 84),
    12: Kind("Q4_K", 256, 144),
    14: Kind("Q6_K", 256, 210),
    24: Kind("I8", 1, 1, "int8"),
    25: Kind("I16", 1, 2, "int16"),
    26: Kind("I32", 1, 4, "int32"),
    30: Kind("BF16", 1, 2),
}
_UNREADABLE = {6: "Q5_0", 7: "Q5_1", 11: "Q3_K", 13: "Q5_K", 20: "IQ4_NL", 23: "IQ4_XS"}
_MAX_DIMENSION = 2**31 - 1


def check_tensors(header: Header, path: Path) -> None:
    """ModelError for the first tensor whose type MLX cannot read, or whose data the file does not hold."""
    for info in header.tensors:
        kind = _kind(info, path)
        blocks, rest = divmod(info.shape[-1], kind.block)
        held = math.prod(info.shape[:-1]) * blocks * kind.block_bytes
        if rest or not all(1 <= size <= _MAX_DIMENSION for size in info.shape):
            raise ModelError(f"{path} announces {info.name} as {kind.name} of {info.shape}; fetch the file again.")
        if info.offset + held > header.data_bytes:
            raise ModelError(f"{path} ends before the data of {info.name}: it is cut short; fetch the file again.")


def placeholders(header: Header) -> dict[str, Any]:
    """What `mx.load` would give for the checked header, as arrays that are never evaluated."""
    import mlx.core as mx

    arrays: dict[str, Any] = {}
    for info in header.tensors:
        kind = KINDS[info.kind]
        if kind.bits is None:
            arrays[info.name] = mx.zeros(info.shape, dtype=getattr(mx, kind.dtype))
            continue
        rows, base = info.shape[:-1], info.name.removesuffix(".weight")
        arrays[info.name] = mx.zeros((*rows, info.shape[-1] * kind.bits // 32), dtype=mx.uint32)
        for part in ("scales", "biases"):
            arrays[f"{base}.{part}"] = mx.zeros((*rows, info.shape[-1] // GROUP_SIZE), dtype=mx.float16)
    return arrays


def _kind(info: TensorInfo, path: Path) -> Kind:
    if info.kind not in KINDS:
        name = _UNREADABLE.get(info.kind, f"GGML type {info.kind}")
        readable = ", ".join(kind.name for kind in KINDS.values() if not kind.dtype.startswith("int"))
        raise ModelError(f"{path} holds {info.name} as {name}, which MLX cannot read; use a file of {readable}.")
    return KINDS[info.kind]
