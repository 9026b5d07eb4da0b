"""What is refused, and what is planned, before Ray is started and before weights are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pomona.cluster import foresight
from pomona.cluster.config import ServeConfig
from pomona.cluster.foresight import look
from pomona.workers.errors import CapacityError, ModelError, OperatorError
from pomona.workers.models.peek import Sizes, peek
from tiny import make

CONTEXT = 512
HUGE_VOCAB = 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(kind, folder / kind, context=CONTEXT) for kind in ("llama", "qwen3_next")}


@pytest.fixture(scope="module")
def sizes(models) -> dict[str, Sizes]:
    """What the real child process says, once a model."""
    return {str(path): peek(path, dtype="auto", trust_remote_code=False) for path in models.values()}


@pytest.fixture
def config(models, sizes, monkeypatch):
    """`config(kind, **flags)`, and a machine with 8 GiB whose models need no child process a test."""

    def known(folder: Path, **_: object) -> Sizes:
        s = sizes[str(folder)]
        return Sizes(s.kv_bytes_per_token, s.aux_bytes_per_slot, s.weights_bytes, s.context_tokens, 8 << 30)

    monkeypatch.setattr(foresight, "peek", known)
    return lambda kind, **flags: ServeConfig(model=str(models[kind]), **flags)


def owners(config: ServeConfig, key: str) -> list[object]:
    plan = look(config).plan
    assert plan is not None
    return [owner[key] for owner in plan.to_json()["owners"]]


def enormous(model: Path) -> Path:
    """Give a model's embeddings 2^30 rows in a sparse file: 512 GiB that no test machine could read."""
    file, config_file = model / "model.safetensors", model / "config.json"
    config = json.loads(config_file.read_text())
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, size = end, tensor["data_offsets"][1] - tensor["data_offsets"][0]
        if tensor["shape"][0] == config["vocab_size"]:
            size = size // tensor["shape"][0] * HUGE_VOCAB
            tensor["shape"][0] = HUGE_VOCAB
        end = begin + size
        tensor["data_offsets"] = [begin, end]
    encoded = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        out.truncate(8 + len(encoded) + end)
    config_file.write_text(json.dumps(config | {"vocab_size": HUGE_VOCAB}))
    return model


def test_the_plan_of_a_dense_model_has_its_real_sizes(models):
    found = look(ServeConfig(model=str(models["llama"]), max_running_requests=8))
    assert found.plan is not None
    plan = found.plan.to_json()
    assert plan["model"] == found.served_name == "llama"
    assert plan["hybrid"] is False
    assert plan["context_tokens"] == CONTEXT
    assert plan["max_running_requests"] == 8
    (owner,) = plan["owners"]
    assert owner["memory"]["kv_bytes_per_token"] == 2 * (2 * 2 * 16 * 4)  # layers x (k, v) x heads x width x float32
    assert owner["memory"]["weights_bytes"] == found.weights_bytes > 0
    assert (owner["max_running_requests"], owner["bound"], owner["aux_slots"]) == (8, "requested", 0)


def test_the_plan_of_a_hybrid_pays_state_slots_beside_kv(config):
    found = look(config("qwen3_next", max_running_requests=8))
    assert found.plan is not None
    plan = found.plan.to_json()
    assert plan["hybrid"] is True
    (owner,) = plan["owners"]
    assert owner["aux_slots"] == 32
    assert owner["memory"]["aux_bytes"] == 32 * owner["memory"]["aux_bytes_per_slot"] > 0


def test_a_hybrid_without_a_request_limit_runs_what_its_slot_limit_holds(config):
    assert owners(config("qwen3_next", max_mamba_cache_size=43), "max_running_requests") == [10]
    assert owners(config("qwen3_next", max_mamba_cache_size=43), "bound") == ["aux"]


def test_pure_dp_keeps_the_full_limit_on_each_replica(config):
    assert owners(config("llama", dp_size=4, max_running_requests=8), "max_running_requests") == [8] * 4


def test_replicas_on_this_machine_share_its_memory(config):
    (alone,) = owners(config("llama"), "kv_tokens")
    four = owners(config("llama", dp_size=4), "kv_tokens")
    assert all(0.2 * alone < tokens < 0.26 * alone for tokens in four)


def test_dp_attention_splits_requests_and_slots(config):
    four = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    assert owners(config("llama", max_running_requests=8, **four), "max_running_requests") == [2] * 4
    hybrid = config("qwen3_next", max_running_requests=8, max_mamba_cache_size=16, **four)
    assert owners(hybrid, "aux_slots") == [4] * 4
    assert owners(hybrid, "max_running_requests") == [1] * 4
    assert look(hybrid).plan.unallocated == 4


def test_15_slots_for_four_owners_are_refused_naming_16_before_weights_are_read(tmp_path):
    model = enormous(make("qwen3_next", tmp_path / "m"))
    with pytest.raises(CapacityError) as caught:
        look(ServeConfig(model=str(model), tp_size=4, dp_size=4, enable_dp_attention=True, max_mamba_cache_size=15))
    assert caught.value.kind == "aux"
    assert caught.value.at_least == 16
    assert "--max-mamba-cache-size 15" in str(caught.value)
    assert "use at least 16" in str(caught.value)


def test_a_dense_model_takes_no_notice_of_a_small_slot_limit(config):
    four = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    assert owners(config("llama", max_mamba_cache_size=1, **four), "aux_slots") == [0] * 4


def test_fewer_requests_than_owners_are_refused_without_even_looking_at_the_model(config):
    nowhere = ServeConfig(model="/nowhere", tp_size=4, dp_size=4, enable_dp_attention=True, max_running_requests=3)
    with pytest.raises(CapacityError) as caught:
        look(nowhere)
    assert (caught.value.kind, caught.value.at_least) == ("requests", 4)


def test_a_context_longer_than_the_models_is_refused_with_the_most_there_is(config):
    with pytest.raises(OperatorError, match=rf"--context-length 513 .*use at most {CONTEXT}"):
        look(config("llama", context_length=513))
    assert look(config("llama", context_length=CONTEXT)).plan.context_tokens == CONTEXT
    assert look(config("llama", context_length=64)).plan.context_tokens == 64


def test_a_model_that_does_not_divide_is_refused_with_a_size_that_does(config):
    with pytest.raises(OperatorError) as caught:
        look(config("llama", tp_size=3))
    assert "--tp-size 3" in str(caught.value)
    assert "4 attention heads" in str(caught.value)
    assert "use --tp-size 2" in str(caught.value)


def test_key_value_heads_need_not_divide_under_dp_attention(config):
    four = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    assert len(owners(config("llama", **four), "owner")) == 4
    with pytest.raises(OperatorError, match="2 key-value heads"):
        look(config("llama", tp_size=4))


def test_max_total_tokens_lowers_what_memory_holds(config):
    capped = config("llama", max_total_tokens=100, max_running_requests=80)
    assert owners(capped, "kv_tokens") == [100]
    assert owners(capped, "max_running_requests") == [50]
    assert owners(capped, "bound") == ["kv"]


def test_quantised_caches_hold_more_tokens_in_the_same_memory(tmp_path):
    wide = str(make("llama", tmp_path / "wide", hidden_size=128))
    plain, quantised = (look(ServeConfig(model=wide, kv_bits=bits)).plan.to_json()["owners"][0] for bits in (None, 8))
    # 32 float32 numbers, or as many bytes with a scale and a bias.
    assert plain["memory"]["kv_bytes_per_token"] * (32 + 8) == quantised["memory"]["kv_bytes_per_token"] * 128
    assert quantised["kv_tokens"] > 3 * plain["kv_tokens"]


def test_bits_that_the_model_cannot_use_are_refused_before_anything_is_started(models):
    with pytest.raises(OperatorError, match="--kv-bits 4 cannot be used with this model"):
        look(ServeConfig(model=str(models["llama"]), kv_bits=4))


def test_slots_that_memory_cannot_hold_are_refused_with_how_many_it_can(config):
    with pytest.raises(CapacityError, match=r"at most [\d,]+"):
        look(config("qwen3_next", max_mamba_cache_size=10**9))


def test_an_exposed_endpoint_is_refused_before_the_model_is_looked_for():
    with pytest.raises(OperatorError, match="--api-key"):
        look(ServeConfig(model="/nowhere", host="0.0.0.0"))


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is not there"):
        look(ServeConfig(model=str(tmp_path / "nothing")))


def test_the_operators_own_name_is_the_one_that_is_served(config):
    found = look(config("llama", served_model_name="mine"))
    assert found.served_name == "mine"
    assert found.plan.model == "mine"
