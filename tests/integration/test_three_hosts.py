"""The main job on real parts: three hosts, SmolLM2, HTTP in front, a real Prometheus beside."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from integration.conftest import ROOT, Served, eventually, free_port

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def chat(served: Served, **more: object) -> dict[str, object]:
    return {"model": served.model, "messages": [QUESTION], "temperature": 0, **more}


def test_replicas_are_spread_one_a_host_and_each_keeps_the_full_limit(on_three_hosts: Served):
    cluster = on_three_hosts.cluster()
    assert cluster["hosts"] == ["mac-1", "mac-2", "mac-3"]
    assert sorted(owner["host"] for owner in cluster["owners"]) == cluster["hosts"]
    assert [owner["max_running_requests"] for owner in cluster["owners"]] == [8, 8, 8]
    assert (cluster["attn_dp_size"], cluster["replicas"], cluster["unallocated_running_requests"]) == (1, 3, 0)


def test_the_openai_sdk_gets_the_same_answer_streamed_and_whole(on_three_hosts: Served):
    client = OpenAI(base_url=f"{on_three_hosts.url}/v1", api_key="none")
    arguments = {"model": on_three_hosts.model, "messages": [QUESTION], "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**arguments)
    pieces = client.chat.completions.create(**arguments, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert "Paris" in text
    assert whole.choices[0].message.content == text


async def test_sixteen_chats_run_at_once_and_leave_nothing_behind(on_three_hosts: Served):
    """While they run the head sees them; every scrape adds up; two seconds after the last all is zero."""
    served, scrapes = on_three_hosts, []

    async def watch() -> None:
        while True:
            scrapes.append(await asyncio.to_thread(served.samples))
            await asyncio.sleep(0.1)

    async with httpx.AsyncClient(timeout=120) as client:
        watching = asyncio.create_task(watch())
        bodies = [
            chat(served, max_tokens=24, ignore_eos=True, messages=[{"role": "user", "content": f"Count from {n}."}])
            for n in range(16)
        ]
        replies = await asyncio.gather(*(client.post(f"{served.url}/v1/chat/completions", json=b) for b in bodies))
        ended = time.monotonic()
        await asyncio.to_thread(eventually, lambda: served.total("pomona_running_requests") == 0, 2, "nothing runs")
        await asyncio.to_thread(
            eventually, lambda: served.total("pomona_kv_tokens", state="used") == 0, 2, "no KV token in use"
        )
        assert time.monotonic() - ended < 2
        watching.cancel()
    assert [reply.status_code for reply in replies] == [200] * 16
    assert all(reply.json()["choices"][0]["message"]["content"] for reply in replies)
    assert all(reply.json()["usage"]["completion_tokens"] == 24 for reply in replies)
    assert max(sum(s["pomona_running_requests"].values()) for s in scrapes) == 16
    for scrape in scrapes:
        for pool, capacity in (
            ("pomona_kv_tokens", "pomona_kv_capacity_tokens"),
            ("pomona_aux_state_slots", "pomona_aux_state_capacity_slots"),
        ):
            for owner, size in scrape[capacity].items():
                assert sum(v for labels, v in scrape[pool].items() if owner <= labels) == size


async def test_sixteen_chats_are_spread_over_the_owners_at_once(on_three_hosts: Served):
    """The gateway counts what it has just assigned, before any report: nobody gets more than 6 of 16."""
    async with httpx.AsyncClient(timeout=120) as client:
        body = chat(on_three_hosts, max_tokens=12, ignore_eos=True)
        url = f"{on_three_hosts.url}/v1/chat/completions"
        replies = asyncio.gather(*(client.post(url, json=body) for _ in range(16)))

        def spread() -> list[float]:
            return sorted(on_three_hosts.samples()["pomona_running_requests"].values())

        seen = await asyncio.to_thread(eventually, lambda: (s := spread()) and sum(s) == 16 and s, 20, "16 run")
        assert seen == [5, 5, 6]
        await replies


def test_a_client_that_leaves_frees_its_slots_within_a_second(on_three_hosts: Served):
    served = on_three_hosts
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=chat(served, stream=True, ignore_eos=True, max_tokens=2000)
    ) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(5)]
        eventually(lambda: served.total("pomona_running_requests") == 1, 2, "it runs")
    eventually(lambda: served.total("pomona_running_requests") == 0, 1, "its slot is free")
    assert served.total("pomona_kv_tokens", state="used") == 0


def test_a_client_that_leaves_without_streaming_frees_its_slots_too(on_three_hosts: Served):
    served = on_three_hosts
    body = chat(served, ignore_eos=True, max_tokens=2000)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=1))
    eventually(lambda: served.total("pomona_running_requests") == 0, 1, "its slot is free")


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(on_three_hosts: Served):
    served = on_three_hosts
    body = chat(served, messages=[{"role": "user", "content": "word " * 9000}])
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    assert error["param"] == "messages"
    assert served.total("pomona_kv_tokens", state="used") == 0


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is not installed; CI installs it")
def test_prometheus_finds_every_owner_and_forgets_the_one_that_stops(on_three_hosts: Served, tmp_path: Path):
    """The shipped configuration, but for this test's port and a shorter interval."""
    served = on_three_hosts
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    text = text.replace("127.0.0.1:9400", served.metrics_url.removeprefix("http://"))
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
        "scrape_timeout: 4s", "scrape_timeout: 1s"
    )
    (tmp_path / "prometheus.yml").write_text(text)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
    port = free_port()
    process = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def query(expression: str) -> list[dict[str, object]]:
        try:
            reply = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}, timeout=5)
            return list(reply.raise_for_status().json()["data"]["result"])
        except httpx.HTTPError:  # it is starting
            return []

    try:
        eventually(lambda: len(query("pomona_owner_max_running_requests == 8")) == 3, 40, "three shares of 8")
        for pool in (
            "pomona_running_requests",
            'pomona_kv_tokens{state="free"}',
            'pomona_aux_state_slots{state="free"}',
        ):
            assert len(query(pool)) == 3, pool
        eventually(lambda: len(query("up == 1")) == 2, 20, "head and gateway are scraped")
        victim = next(o for o in served.cluster()["owners"] if o["replica"] == 1)
        os.kill(pid_behind(victim["address"]), signal.SIGKILL)
        eventually(lambda: len(query("pomona_owner_max_running_requests")) == 2, 5, "its series are gone")
        eventually(lambda: len(query("pomona_owner_max_running_requests")) == 3, 60, "it was placed anew")
    finally:
        process.terminate()
        process.wait(20)


def pid_behind(address: str) -> int:
    """The process that listens at host:port."""
    import psutil

    port = int(address.rpartition(":")[2])
    return next(
        c.pid
        for c in psutil.net_connections("tcp")
        if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid
    )
