"""Finding a model, refusing what is none, and loading what is."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING, save_model

from pomona.workers.errors import ModelError
from pomona.workers.models import architectures, hub, loading, source
from pomona.workers.models.source import SourceKind, resolve
from tiny import CHAT_TEMPLATE, KINDS, make


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "tiny-llama")


def load(folder: Path, dtype: str = "auto", **more: Any) -> loading.LoadedModel:
    more.setdefault("progress", lambda done, total: None)
    return loading.load(folder, trust_remote_code=False, dtype=dtype, **more)


def dtypes(model: Any) -> set[Any]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def test_a_folder_is_found_with_its_config_and_name(llama: Path) -> None:
    found = resolve(str(llama))
    assert (found.kind, found.path, found.served_name) == (SourceKind.FOLDER, llama, "tiny-llama")
    assert found.config is not None
    assert found.config["model_type"] == "llama"


def test_the_served_name_drops_slashes_dots_and_the_gguf_suffix(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama)
    assert resolve(".").served_name == "tiny-llama"
    assert resolve(f"{llama}/").served_name == "tiny-llama"
    assert (
        source.ModelSource(SourceKind.GGUF, "/x/Qwen.Q4_0.gguf", Path("/x/Qwen.Q4_0.gguf")).served_name == "Qwen.Q4_0"
    )
    assert source.ModelSource(SourceKind.HUB, "org/name", None).served_name == "name"


@pytest.mark.parametrize("name", ["/no/such", "./x", "~/nope-not-here", "word", "a/b/c", "dir/x.gguf"])
def test_a_path_that_is_not_there_is_said_to_be_so(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is not there"):
        resolve(name)


def test_an_empty_name_is_not_taken_for_this_folder() -> None:
    with pytest.raises(ModelError, match="name is empty"):
        resolve("")


def write(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(content)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def add_index(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def leave_only_config(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("config.json"), "config.json is missing"),
        (write("{"), "cannot be read as JSON"),
        (write("[" * 100_000), "cannot be read as JSON"),
        (write("[1]"), "not a JSON object"),
        (write("{}"), "no model_type"),
        (write('{"model_type": "lama"}'), "no model type 'lama'.*Closest: llama"),
        (write('{"model_type": "cache"}'), "no model type 'cache'"),
        (remove("model.safetensors"), r"no model\*\.safetensors"),
        (leave_only_config, "tokenizer.json is missing"),
        (add_index, "model-00002-of-00002.safetensors"),
    ],
)
def test_a_folder_that_is_no_model_is_told_what_is_missing(
    llama: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(llama)
    with pytest.raises(ModelError, match=words) as error:
        resolve(str(llama))
    assert str(llama) in str(error.value)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(ModelError, match="not GGUF"):
        resolve(str(file))
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(str(file.rename(tmp_path / "notes.gguf")))


def test_the_tables_read_from_mlx_lms_source_are_those_it_uses() -> None:
    assert architectures._table("MODEL_REMAPPING") == MODEL_REMAPPING
    assert architectures._table("MODEL_ARCHITECTURE_REMAPPING") == MODEL_ARCHITECTURE_REMAPPING
    types = architectures.supported_types()
    assert set(KINDS) <= types
    assert not types & {"base", "cache", "rope_utils", "switch_layers", "ssm"}
    assert all(importlib.util.find_spec(f"mlx_lm.models.{name}") for name in types)


@pytest.mark.parametrize("model_type", ["mistral", "kimi_k2", "falcon_mamba"])
def test_a_type_that_mlx_lm_maps_to_another_is_supported(model_type: str) -> None:
    architectures.check_architecture({"model_type": model_type}, "x")


def test_resolving_imports_neither_mlx_nor_transformers(llama: Path) -> None:
    code = (
        "import sys; from pomona.workers.models import source; source.resolve(sys.argv[1]);"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer())


def info(*files: str, model_type: str = "llama") -> Any:
    siblings = [SimpleNamespace(rfilename=name) for name in files]
    return SimpleNamespace(siblings=siblings, config={"model_type": model_type})


@pytest.mark.usefixtures("empty_cache")
def test_a_hub_that_does_not_answer_is_given_up_within_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, lambda: time.sleep(10))
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"hub could not be asked.*local model folder"):
        resolve("org/name")
    assert time.monotonic() - begin < 3


@pytest.mark.usefixtures("empty_cache")
def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer_with(monkeypatch, lambda: pytest.fail("asked"))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve("org/name")


@pytest.mark.usefixtures("empty_cache")
def test_a_hub_model_is_checked_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, lambda: info("config.json", "model.safetensors", "tokenizer.json"))
    assert resolve("org/name") == source.ModelSource(SourceKind.HUB, "org/name", None)
    answer_with(monkeypatch, lambda: info("config.json", "x.gguf", "tokenizer.json"))
    with pytest.raises(ModelError, match=r"no weights.*gguf"):
        resolve("org/name")
    answer_with(monkeypatch, lambda: info("model.safetensors", "tokenizer.json", model_type="bert"))
    with pytest.raises(ModelError, match="'bert'"):
        resolve("org/name")


def test_a_cached_hub_model_needs_no_network(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(llama / "config.json"))
    answer_with(monkeypatch, lambda: pytest.fail("asked"))
    found = resolve("org/name")
    assert (found.kind, found.path, source.fetch(found)) == (SourceKind.HUB, llama, llama)


def test_a_half_cached_hub_model_is_asked_for_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_index(llama)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(llama / "config.json"))
    answer_with(monkeypatch, lambda: info("config.json", "model.safetensors", "tokenizer.json"))
    assert resolve("org/name").path is None


def test_fetching_reports_bytes_and_fetches_only_what_mlx_lm_reads(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        assert "model*.safetensors" in allow_patterns
        bar = tqdm_class(total=0, initial=0, unit="B", desc="Reconstructing", unit_scale=True)
        bar.total += 10
        bar.update(4)
        bar.set_description("done")
        tqdm_class(total=3, desc="Fetching 3 files").update(1)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    seen: list[tuple[int, int]] = []
    assert source.fetch(source.ModelSource(SourceKind.HUB, "o/n", None), lambda *pair: seen.append(pair)) == llama
    assert seen == [(4, 10)]


def test_the_patterns_are_mlx_lms() -> None:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    assert list(hub.ALLOW_PATTERNS) == DEFAULT_ALLOW_PATTERNS


@pytest.mark.parametrize("kind", KINDS)
def test_every_tiny_model_loads_and_its_greedy_output_wanders(kind: str, tmp_path: Path) -> None:
    loaded = load(make(kind, tmp_path / kind))
    tokens = loaded.tokenizer.encode("hello")
    for _ in range(12):
        tokens.append(int(loaded.model(mx.array([tokens]))[0, -1].argmax().item()))
    assert len(set(tokens[-12:])) > 4
    assert loaded.context_tokens == 512


def test_a_tiny_model_is_the_same_every_time_and_takes_any_text(tmp_path: Path) -> None:
    first, second = (make("qwen3_next", tmp_path / name) for name in "ab")
    other = make("qwen3_next", tmp_path / "c", seed=1)
    files = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert files[0] == files[1] != files[2]
    tokenizer = load(first).tokenizer
    line = "日本 😀 the\t<|im_end|>\x00"
    assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.chat_template == CHAT_TEMPLATE
    chat = [{"role": "anything", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>anything\nx<|im_end|>\n"


def test_progress_rises_layer_by_layer_to_the_whole(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load(llama, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) >= 4  # nothing yet, embedding, each of two layers…
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (loaded.weights_bytes, loaded.weights_bytes)


@pytest.mark.skipif(not loading.on_cpu(), reason="auto keeps halves on a GPU")
def test_auto_casts_halves_to_float32_on_a_cpu(tmp_path: Path) -> None:
    folder = as_bfloat16(make("llama", tmp_path / "half"))
    assert dtypes(load(folder, "auto").model) == {mx.float32}


def as_bfloat16(folder: Path) -> Path:
    file = str(folder / "model.safetensors")
    halves = {name: array.astype(mx.bfloat16) for name, array in mx.load(file).items()}
    mx.eval(halves)
    mx.save_safetensors(file, halves, {"format": "mlx"})
    return folder


def quantize(folder: Path) -> Path:
    model, config = loading.open_model(folder, trust_remote_code=False, dtype="bfloat16")
    nn.quantize(model, group_size=32, bits=4)
    save_model(folder, model, donate_model=False)
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    return folder


def test_an_explicit_dtype_casts_what_is_not_quantised(tmp_path: Path) -> None:
    folder = quantize(make("llama", tmp_path / "q"))
    model = load(folder, "float16").model
    assert model.model.norm.weight.dtype == mx.float16
    assert model.layers[0].mlp.up_proj.weight.dtype == mx.uint32
    assert model.layers[0].mlp.up_proj.scales.dtype == mx.bfloat16


@pytest.mark.skipif(not loading.on_cpu(), reason="4-bit is the normal choice on a GPU")
def test_a_quantised_model_on_a_cpu_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = quantize(make("llama", tmp_path / "q"))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "unusably slow" in caplog.text
    caplog.clear()
    load(make("llama", tmp_path / "plain"))
    assert caplog.text == ""


def test_an_unknown_dtype_is_refused(llama: Path) -> None:
    with pytest.raises(ModelError, match=r"'int3'.*float32"):
        load(llama, "int3")


def test_a_config_that_mlx_lm_cannot_use_is_a_model_error(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    with pytest.raises(ModelError, match="hidden_size"):
        load(llama)


def test_weights_that_do_not_fit_are_a_model_error(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="cannot be loaded by mlx-lm"):
        load(llama)


def test_custom_model_code_is_not_run_unless_trusted(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    (llama / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(llama)
    with pytest.raises(SystemExit, match="ran"):
        loading.open_model(llama, trust_remote_code=True, dtype="auto")


def test_a_broken_tokenizer_is_a_model_error(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer that cannot be loaded"):
        load(llama)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 32768}, 32768),
        ({"text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": None, "text_config": None}, 8192),
        ({}, 8192),
    ],
)
def test_the_context_is_found_under_any_of_its_names(config: dict[str, Any], tokens: int) -> None:
    assert loading.context_tokens(config) == tokens


def test_several_threads_may_look_up_architectures_at_once():
    """Engine threads of one process start together; CPython 3.11 fails when two parse at once."""
    for _ in range(10):
        architectures._table.cache_clear()
        with ThreadPoolExecutor(8) as threads:
            tables = list(threads.map(architectures._table, ["MODEL_REMAPPING"] * 8))
        assert all(table["mistral"] == "llama" for table in tables)
