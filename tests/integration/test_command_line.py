"""The command line as a person uses it: one sentence for what they can mend, and Ctrl-C that leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from integration.conftest import Served, end, eventually, free_port, serving
from tiny import make

POMONA = str(Path(sys.executable).with_name("pomona"))
# What the issue promises is 3 s; the rest is for a machine that does other things at the same time.
REFUSED_WITHIN_S = 3 + 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make(kind, root / kind) for kind in ("llama", "qwen3_next")}


def refused(*arguments: str) -> str:
    """The one sentence on stderr; checks exit code, length and time."""
    start = time.monotonic()
    done = subprocess.run([POMONA, *arguments], capture_output=True, text=True, timeout=60, check=False)
    took = time.monotonic() - start
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("pomona: ")
    assert done.stderr.count("\n") == 1
    assert took < REFUSED_WITHIN_S
    return done.stderr


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_model_that_is_not_there_is_named(command, tmp_path):
    assert str(tmp_path / "nowhere") in refused(command, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_folder_that_is_no_model_says_what_is_missing(command, tmp_path):
    assert "config.json" in refused(command, str(tmp_path))


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_gguf_of_another_architecture_lists_what_is_supported(command, tmp_path):
    name = b"general.architecture"
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    pair = len(name).to_bytes(8, "little") + name + (8).to_bytes(4, "little") + (5).to_bytes(8, "little") + b"qwen9"
    (tmp_path / "other.gguf").write_bytes(head + pair)
    said = refused(command, str(tmp_path / "other.gguf"))
    assert "qwen9" in said
    assert "llama" in said


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_in_use_is_named_with_a_free_one(flag, models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = "--metrics-port" if flag == "--port" else "--port"
        said = refused("serve", str(models["llama"]), flag, port, other, str(free_port()))
    assert f"{flag} {port}" in said
    assert "such as" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "6", "--dp-size", "4", "--enable-dp-attention"], ["--tp-size 6", "--dp-size 4"]),
        (["--dp-size", "0"], ["--dp-size 0", "positive"]),
        (["--max-running-requests", "3", "--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"], ["at least 4"]),
        (["--tp-size", "3"], ["--tp-size 3", "heads"]),
        (["--max-running-requests", "0"], ["--max-running-requests"]),
        (["--context-length", "100000"], ["--context-length 100000", "512"]),
        (["--mem-fraction-static", "2"], ["--mem-fraction-static"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_flag_and_the_fix(flags, words, models):
    said = refused("plan", str(models["llama"]), *flags)
    assert all(word in said for word in words), said


def test_an_auxiliary_pool_that_is_too_small_is_refused_in_the_units_of_the_command_line(models):
    flags = ["--max-running-requests", "8", "--max-mamba-cache-size"]
    split = ["--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"]
    assert "at least 16" in refused("plan", str(models["qwen3_next"]), *flags, "15", *split)
    assert "at least 4" in refused("serve", str(models["qwen3_next"]), *flags, "3", "--port", str(free_port()))


def test_a_replica_of_several_ranks_is_refused_by_serve_and_shown_by_plan(models):
    flags = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    assert "pomona plan" in refused("serve", str(models["llama"]), *flags)
    done = subprocess.run(
        [POMONA, "plan", str(models["llama"]), *flags, "--max-running-requests", "5", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    plan = json.loads(done.stdout)
    assert (plan["attn_dp_size"], plan["replicas"], plan["unallocated_running_requests"]) == (2, 1, 0)
    assert [o["max_running_requests"] for o in plan["owners"]] == [3, 2]
    assert all(o["bound"] == "requested" and o["kv_tokens"] and o["aux_slots"] == 0 for o in plan["owners"])


def test_an_address_where_no_ray_answers_is_named(models):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--address", address, "--port", str(free_port()), "--metrics-port", str(free_port())]
    assert address in refused("serve", str(models["llama"]), *flags)


def test_status_without_a_cluster_says_how_to_start_one():
    assert "pomona serve" in refused("status", "--url", f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def hybrid(models: dict[str, Path]) -> Iterator[Served]:
    """A hybrid model served on a local Ray of its own: 16 auxiliary slots, 4 a request."""
    flags = ["--served-model-name", "tiny", "--max-running-requests", "8", "--max-mamba-cache-size", "16"]
    with serving(models["qwen3_next"], *flags) as served:
        yield served


def test_a_hybrids_auxiliary_slots_bind_and_are_shown(hybrid: Served):
    done = subprocess.run([POMONA, "status", "--url", hybrid.url, "--json"], capture_output=True, text=True, check=True)
    cluster = json.loads(done.stdout)
    (owner,) = cluster["owners"]
    assert (owner["max_running_requests"], owner["aux_slots"], owner["bound"]) == (4, 16, "aux")
    assert owner["pools"]["aux_state_slots"] == {"capacity": 16, "used": 0, "evictable": 0, "free": 16}
    assert cluster["unallocated_running_requests"] == 4
    seen = subprocess.run([POMONA, "status", "--url", hybrid.url], capture_output=True, text=True, check=True).stdout
    assert "0/16" in seen
    assert "unallocated: 4" in seen


def test_a_hybrid_answers_and_gives_its_slots_back(hybrid: Served):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{hybrid.url}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 200
    eventually(lambda: hybrid.total("pomona_aux_state_slots", state="used") == 0, 2, "no slot is used")
    assert hybrid.total("pomona_aux_state_slots", state="evictable") > 0, "snapshots stay until somebody needs the room"


def test_the_memory_in_use_holds_the_weights_and_stays_within_the_limit(hybrid: Served):
    (owner,) = httpx.get(f"{hybrid.url}/cluster", timeout=30).json()["owners"]
    planned = owner["memory"]
    assert planned["weights_bytes"] <= owner["active_bytes"] < owner["limit_bytes"] == planned["budget_bytes"]
    assert hybrid.total("pomona_memory_bytes", state="limit") == owner["limit_bytes"]
    assert [*hybrid.samples()["pomona_preempted_requests_total"].values()] == [owner["preempted_requests"]] == [0]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed; CI installs it")
def test_the_capacity_page_shows_the_pools_in_a_browser(hybrid: Served, tmp_path: Path):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [
        "chromium",
        *flags.split(),
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path}",
    ]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"{hybrid.url}/"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for words in ("Auxiliary slots", "0 of 16", "0 of 4", "Memory", " GiB of ", "reduced from 8 to 4 by aux", "ready"):
        assert words in page


def test_ctrl_c_ends_everything_ray_included(hybrid: Served):
    started = psutil.Process(hybrid.process.pid).children(recursive=True)
    assert any("raylet" in " ".join(p.cmdline()) for p in started)
    output = end(hybrid.process)
    assert hybrid.process.returncode == 0
    assert "stopping" in output
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
    for url in (hybrid.url, hybrid.metrics_url):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 2)
