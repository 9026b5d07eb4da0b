"""What the operator asks for: flags, YAML, and the sentence for what is wrong with them."""

from __future__ import annotations

import pytest

from pomona.cluster.config import ServeConfig, is_file, load, new_token
from pomona.workers.errors import OperatorError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "pomona.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refusal(model: str, **flags: object) -> str:
    with pytest.raises(OperatorError) as caught:
        load(model, flags)
    return str(caught.value)


def test_flags_that_were_given_win_over_the_file(yaml_file):
    path = yaml_file("model: some/model\nport: 9000\ndp_size: 2\ndisable_radix_cache: true\n")
    config = load(path, {"port": 9001, "dp_size": None, "disable_radix_cache": None})
    assert (config.port, config.dp_size, config.disable_radix_cache) == (9001, 2, True)
    assert config.model == "some/model"


def test_a_flag_can_turn_off_what_the_file_turns_on(yaml_file):
    assert (
        load(yaml_file("model: m\ntrust_remote_code: true\n"), {"trust_remote_code": False}).trust_remote_code is False
    )


def test_a_file_can_ask_for_quantised_caches_and_shorter_steps(yaml_file):
    config = load(yaml_file("model: m\nkv_bits: 8\nmax_step_s: 1\n"), {"max_step_s": 0.1})
    assert (config.kv_bits, config.max_step_s) == (8, 0.1)
    assert (ServeConfig(model="m").kv_bits, ServeConfig(model="m").max_step_s) == (None, 0.25)


def test_a_model_that_is_no_file_needs_no_file():
    config = load("org/name", {"max_running_requests": 8})
    assert config == ServeConfig(model="org/name", max_running_requests=8)


@pytest.mark.parametrize(
    ("model", "expected"), [("a.yaml", True), ("a.yml", True), ("org/name", False), ("yaml", False), ("m.gguf", False)]
)
def test_a_configuration_file_is_known_by_its_ending(model, expected):
    assert is_file(model) is expected


def test_an_unknown_key_is_named_with_the_file_and_the_known_ones(yaml_file):
    path = yaml_file("model: m\nmax_runing_requests: 8\n")
    text = refusal(path)
    assert path in text
    assert "unknown key max_runing_requests" in text
    assert "max_running_requests" in text


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("port", 0, "--port 0"),
        ("port", 70000, "--port 70000"),
        ("max_running_requests", 0, "--max-running-requests 0"),
        ("max_mamba_cache_size", -1, "--max-mamba-cache-size -1"),
        ("max_total_tokens", 1, "--max-total-tokens 1"),
        ("mem_fraction_static", 1.5, "--mem-fraction-static 1.5"),
        ("mem_fraction_static", float("nan"), "--mem-fraction-static nan"),
        ("mamba_full_memory_ratio", 0, "--mamba-full-memory-ratio 0"),
        ("chunked_prefill_size", 8, "--chunked-prefill-size 8"),
        ("max_step_s", 0, "--max-step-s 0"),
        ("max_step_s", float("inf"), "--max-step-s inf"),
        ("kv_bits", 3, "--kv-bits 3"),
        ("kv_bits", 16, "--kv-bits 16"),
        ("dtype", "int8", "--dtype 'int8'"),
        ("load_timeout_s", 0, "--load-timeout-s 0"),
    ],
)
def test_a_bad_value_names_its_flag_the_value_and_the_rule(flag, value, says):
    text = refusal("m", **{flag: value})
    assert text.startswith(says)
    assert "is wrong: input should be" in text


@pytest.mark.parametrize(
    "line", ["port: 70000", "tp_size: two", "dp_size: 1.5", "dtype: int8", "kv_bits: 6", "model: [a]"]
)
def test_a_bad_value_in_a_file_names_its_key(yaml_file, line):
    key, _, _ = line.partition(":")
    assert refusal(yaml_file(f"model: m\n{line}\n")).startswith(f"{key} ")


def test_a_bad_flag_beside_a_file_is_named_as_a_flag(yaml_file):
    assert refusal(yaml_file("model: m\nport: 9000\n"), port=70000).startswith("--port 70000")


@pytest.mark.parametrize("line", ["dp_size: yes", "port: true", "max_running_requests: true"])
def test_a_truth_value_is_no_number(yaml_file, line):
    refusal(yaml_file(f"model: m\n{line}\n"))


def test_a_ratio_is_a_finite_number():
    refusal("m", mamba_full_memory_ratio=float("inf"))


@pytest.mark.parametrize("name", ["nowhere.yaml", "nowhere.yml"])
def test_a_missing_file_is_named(tmp_path, name):
    path = str(tmp_path / name)
    assert refusal(path) == f"{path} is not there: name a configuration file or a model"


@pytest.mark.parametrize("content", ["model: [\n", "model: m\n  port: 3\n", "\tmodel: m", b"\xff\xfe\x00\x80"])
def test_a_file_that_is_no_yaml_is_one_sentence_with_its_path(yaml_file, content):
    path = yaml_file(content)
    text = refusal(path)
    assert text.startswith(f"{path} cannot be read as YAML")
    assert "\n" not in text


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "just text\n", "port: 9000\n"])
def test_a_file_without_a_model_says_what_it_needs(yaml_file, content):
    assert "it needs at least a line `model: …`" in refusal(yaml_file(content))


def test_a_folder_with_the_name_of_a_file_is_refused(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in refusal(str(tmp_path / "folder.yaml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "studio.local", ""])
@pytest.mark.parametrize("key", [None, ""])
def test_a_host_that_is_not_loopback_is_refused_without_a_key(host, key):
    with pytest.raises(OperatorError, match="--api-key") as caught:
        ServeConfig(model="m", host=host, api_key=key).check_exposure()
    assert f"--host {host}" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "key"), [("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", "secret")]
)
def test_loopback_or_a_key_is_enough(host, key):
    ServeConfig(model="m", host=host, api_key=key).check_exposure()


def test_limits_are_those_of_one_replica_with_four_slots_a_request():
    limits = ServeConfig(model="m", max_running_requests=8, max_mamba_cache_size=16).limits
    assert (limits.max_running_requests, limits.max_mamba_cache_size, limits.aux_slots_per_request) == (8, 16, 4)


def test_without_the_prefix_cache_a_request_needs_one_slot():
    assert ServeConfig(model="m", disable_radix_cache=True).limits.aux_slots_per_request == 1


def test_sizes_that_do_not_go_together_are_refused_with_their_flags():
    with pytest.raises(OperatorError, match="--tp-size 3 does not divide among --dp-size 2"):
        ServeConfig(model="m", tp_size=3, dp_size=2, enable_dp_attention=True).topology()


def test_every_cluster_has_a_secret_of_its_own():
    assert len({new_token() for _ in range(50)}) == 50
    assert len(new_token()) >= 32
