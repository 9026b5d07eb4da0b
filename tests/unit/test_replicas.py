"""Keeping the wanted replicas running: a launcher that starts nothing, and pauses that end when the test says so."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from dataclasses import asdict

import pytest

from pomona.cluster import replicas as module
from pomona.cluster.cluster import Cluster
from pomona.cluster.config import ServeConfig
from pomona.cluster.launcher import Handle, Launcher
from pomona.cluster.membership import Identity, Memory, OwnerKey
from pomona.cluster.placement import Host
from pomona.cluster.replicas import BACKOFF_S, PROGRESS_INTERVAL_S, Failure, Replicas, backoff_s
from pomona.workers.errors import OperatorError
from pomona.workers.spec import Ended, Progress, Stage, WorkerSpec

WAIT_S = 5.0
CRASH = Ended("the worker process ended: killed")


def host(name: str, gib: int = 64) -> Host:
    return Host(f"id-{name}", name, f"10.0.0.{len(name)}{name[-1]}", gib << 30, 8)


class FakeHandle:
    """A rank that is at the stage, and ends for the reason, that the test names."""

    def __init__(self, spec: WorkerSpec, placed: Host, name: str) -> None:
        self.spec, self.host, self.name = spec, placed, name
        self.at = Progress()
        self.stops = 0
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def progress(self) -> Progress:
        return self.at

    async def ended(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self.stops += 1
        self.end(Ended("stopped"))

    def end(self, why: Ended = CRASH) -> None:
        if not self._ended.done():
            self._ended.set_result(why)


class FakeLauncher:
    """Hosts that the test can change; every start is a handle, or an error where the test says so."""

    def __init__(self, *names: str) -> None:
        self.there = [host(name) for name in names]
        self.started: list[FakeHandle] = []
        self.error: Exception | None = None

    def hosts(self) -> list[Host]:
        return self.there

    async def start(self, spec: WorkerSpec, host: Host, name: str) -> Handle:
        if self.error is not None:
            raise self.error
        self.started.append(FakeHandle(spec, host, name))
        return self.started[-1]


class Pauses:
    """Stands in for asyncio.sleep: pauses between polls are short, backoffs end at once unless they are held."""

    def __init__(self) -> None:
        self.backoffs: list[float] = []
        self.polling = asyncio.Event()
        self.backing_off = asyncio.Event()
        self.polling.set()
        self.backing_off.set()

    async def sleep(self, seconds: float) -> None:
        if seconds == PROGRESS_INTERVAL_S:
            await self.polling.wait()
            await asyncio.sleep(0.001)
            return
        self.backoffs.append(seconds)
        await self.backing_off.wait()
        await asyncio.sleep(0)


@pytest.fixture
async def pauses(monkeypatch):
    """asyncio.sleep of the module under test alone."""
    made = Pauses()
    names = {name: getattr(asyncio, name) for name in asyncio.__all__} | {"sleep": made.sleep}
    monkeypatch.setattr(module, "asyncio", types.SimpleNamespace(**names))
    return made


@pytest.fixture
async def run(pauses):
    """`run(launcher, **flags)` starts replicas; all are stopped at the end."""
    made: list[Replicas] = []

    def start(launcher: Launcher, *, weights_bytes: int = 0, **flags: object) -> tuple[Replicas, Cluster]:
        config = ServeConfig(model="org/model", **flags)  # type: ignore[arg-type]
        cluster = Cluster("M", config.topology(), config.limits, lambda: 0.0)
        replicas = Replicas(
            config, cluster, launcher, registry="10.0.0.1:7", token="secret", weights_bytes=weights_bytes
        )
        made.append(replicas)
        replicas.start()
        return replicas, cluster

    yield start
    for replicas in made:
        await replicas.stop()


async def until(true: Callable[[], object]) -> None:
    """Let the loop run until it is so; an error when it is not within WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 - what it waits for are plain fields
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let everything that can run now, run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def ready(handle: FakeHandle, cluster: Cluster) -> None:
    handle.at = Progress(Stage.READY)
    await until(lambda: cluster.replica_views[handle.spec.replica].stage == "ready")


def test_backoff_grows_to_a_minute_and_stays_there():
    assert backoff_s(0) == 0
    assert [backoff_s(failures) for failures in range(1, 8)] == [1, 2, 5, 15, 60, 60, 60]
    assert list(BACKOFF_S) == sorted(BACKOFF_S)


async def test_every_replica_is_placed_on_a_host_of_its_own_and_started(run):
    launcher = FakeLauncher("mac1", "mac2", "mac3", "mac4")
    _, cluster = run(launcher, dp_size=4)
    await until(lambda: len(launcher.started) == 4)
    assert [h.host.name for h in launcher.started] == ["mac1", "mac2", "mac3", "mac4"]
    assert [h.spec.replica for h in launcher.started] == [0, 1, 2, 3]
    assert [cluster.replica_views[r].host for r in range(4)] == ["mac1", "mac2", "mac3", "mac4"]
    assert cluster.hosts == ("mac1", "mac2", "mac3", "mac4")


async def test_the_spec_says_everything_a_worker_needs(run):
    launcher = FakeLauncher("mac1", "mac2")
    run(
        launcher, dp_size=2, max_mamba_cache_size=43, max_total_tokens=999, context_length=77, dtype="float32",
        chunked_prefill_size=64, max_queued_requests=5, mem_fraction_static=0.5, mamba_full_memory_ratio=0.7,
        disable_radix_cache=True, trust_remote_code=True, max_step_s=0.5, kv_bits=8,
    )  # fmt: skip
    await until(lambda: len(launcher.started) == 2)
    expected = {
        "model": "M",
        "source": "org/model",
        "replica": 1,
        "owner": 0,
        "host": "mac2",
        "bind_host": "10.0.0.42",
        "registry_address": "10.0.0.1:7",
        "token": "secret",
        "aux_slots": 43,
        "aux_slots_per_request": 1,
        "ranks_on_host": 1,
        "mem_fraction_static": 0.5,
        "mamba_full_memory_ratio": 0.7,
        "max_total_tokens": 999,
        "context_length": 77,
        "chunked_prefill_size": 64,
        "max_step_s": 0.5,
        "kv_bits": 8,
        "max_queued_requests": 5,
        "dtype": "float32",
        "trust_remote_code": True,
    }
    given = asdict(launcher.started[1].spec)
    assert {name: given[name] for name in expected} == expected


async def test_pure_dp_hands_the_whole_slot_limit_to_every_replica(run):
    launcher = FakeLauncher("mac1")
    run(launcher, dp_size=3, max_mamba_cache_size=16)
    await until(lambda: len(launcher.started) == 3)
    assert [h.spec.aux_slots for h in launcher.started] == [16, 16, 16]


async def test_without_a_slot_limit_memory_decides(run):
    launcher = FakeLauncher("mac1")
    run(launcher)
    await until(lambda: launcher.started)
    assert launcher.started[0].spec.aux_slots is None
    assert launcher.started[0].spec.aux_slots_per_request == 4


async def test_ranks_that_share_a_host_know_how_many_they_are(run):
    launcher = FakeLauncher("mac1", "mac2")
    run(launcher, dp_size=3)
    await until(lambda: len(launcher.started) == 3)
    assert {(h.host.name, h.spec.ranks_on_host) for h in launcher.started} == {("mac1", 2), ("mac2", 1)}


async def test_a_cluster_of_one_machine_binds_loopback(run):
    launcher = FakeLauncher("mac1")
    run(launcher)
    await until(lambda: launcher.started)
    assert launcher.started[0].spec.bind_host == "127.0.0.1"


async def test_how_far_a_start_is_can_be_seen(run):
    launcher = FakeLauncher("mac1")
    _, cluster = run(launcher)
    await until(lambda: launcher.started)
    launcher.started[0].at = Progress(Stage.READING, 3, 10)
    await until(lambda: cluster.replica_views[0].stage == "reading weights")
    view = cluster.replica_views[0]
    assert (view.done, view.total, view.host, view.problem) == (3, 10, "mac1", None)
    await ready(launcher.started[0], cluster)


@pytest.mark.parametrize("operator", [True, False])
async def test_a_first_start_that_fails_is_a_failure_and_is_not_tried_again(run, pauses, operator):
    launcher = FakeLauncher("mac1")
    replicas, cluster = run(launcher)
    await until(lambda: launcher.started)
    launcher.started[0].end(Ended("no such model", operator))
    await until(lambda: replicas.failure)
    assert replicas.failure == Failure("no such model", operator)
    await settle()
    assert len(launcher.started) == 1
    assert pauses.backoffs == []
    assert launcher.started[0].stops == 1
    assert (cluster.replica_views[0].stage, cluster.replica_views[0].problem) == ("failed", "no such model")


async def test_the_first_failure_is_the_one_that_is_kept(run):
    launcher = FakeLauncher("mac1", "mac2")
    replicas, _ = run(launcher, dp_size=2)
    await until(lambda: len(launcher.started) == 2)
    launcher.started[1].end(Ended("first", operator=True))
    await until(lambda: replicas.failure)
    launcher.started[0].end(Ended("second"))
    await settle()
    assert replicas.failure == Failure("first", operator=True)


async def test_a_replica_that_was_ready_and_died_is_placed_anew(run, pauses):
    launcher = FakeLauncher("mac1", "mac2")
    replicas, cluster = run(launcher)
    await until(lambda: launcher.started)
    first = launcher.started[0]
    await ready(first, cluster)
    pauses.backing_off.clear()
    first.end()
    await until(lambda: pauses.backoffs)
    assert (cluster.replica_views[0].stage, cluster.replica_views[0].problem) == ("failed", CRASH.reason)
    launcher.there = [host("mac2")]  # the host went with it
    pauses.backing_off.set()
    await until(lambda: len(launcher.started) == 2)
    assert replicas.failure is None
    assert pauses.backoffs == [1.0]
    assert launcher.started[1].host.name == launcher.started[1].spec.host == "mac2"
    assert launcher.started[1].name != first.name
    assert first.stops == 1
    assert cluster.replica_views[0].problem is None
    assert cluster.hosts == ("mac2",)


async def test_one_that_died_leaves_the_others_running_and_goes_where_the_fewest_are(run):
    launcher = FakeLauncher("mac1", "mac2")
    _, cluster = run(launcher, dp_size=2)
    await until(lambda: len(launcher.started) == 2)
    for handle in launcher.started:
        await ready(handle, cluster)
    launcher.started[0].end()
    await until(lambda: len(launcher.started) == 3)
    again = launcher.started[2]
    assert (again.spec.replica, again.host.name, again.spec.ranks_on_host) == (0, "mac1", 1)
    assert launcher.started[1].stops == 0


async def test_the_member_behind_an_ended_process_is_dropped_at_once(run):
    launcher = FakeLauncher("mac1")
    _, cluster = run(launcher)
    await until(lambda: launcher.started)
    cluster.register(Identity("M", OwnerKey(0, 0), "life", "mac1", "127.0.0.1:1"), Memory(kv_tokens=100))
    await ready(launcher.started[0], cluster)
    launcher.started[0].end()
    await until(lambda: not cluster.members.all())


async def test_backoff_grows_while_starts_fail_and_begins_anew_after_one_that_was_ready(run, pauses):
    launcher = FakeLauncher("mac1")
    replicas, cluster = run(launcher)
    await until(lambda: launcher.started)
    await ready(launcher.started[0], cluster)
    for count in range(1, 7):
        launcher.started[-1].end()
        await until(lambda count=count: len(launcher.started) == count + 1)
    assert pauses.backoffs == [1, 2, 5, 15, 60, 60]
    await ready(launcher.started[-1], cluster)
    launcher.started[-1].end()
    await until(lambda: len(launcher.started) == 8)
    assert pauses.backoffs[-1] == 1
    assert replicas.failure is None


async def test_a_replica_waits_for_a_host_when_none_is_left_and_says_so(run, pauses):
    launcher = FakeLauncher("mac1")
    _, cluster = run(launcher)
    await until(lambda: launcher.started)
    await ready(launcher.started[0], cluster)
    launcher.there = []
    launcher.started[0].end()
    await until(lambda: "no host is alive" in (cluster.replica_views[0].problem or ""))
    assert cluster.replica_views[0].host is None
    launcher.there = [host("mac9")]
    await until(lambda: len(launcher.started) == 2)
    assert launcher.started[1].host.name == "mac9"


async def test_a_replica_that_fits_no_host_is_refused_before_anything_is_started(run):
    launcher = FakeLauncher("mac1")
    with pytest.raises(OperatorError, match="mac1 has"):
        run(launcher, dp_size=2, weights_bytes=40 << 30)
    await settle()
    assert launcher.started == []


async def test_stop_ends_everything_and_starts_nothing_anew(run):
    launcher = FakeLauncher("mac1", "mac2")
    replicas, cluster = run(launcher, dp_size=2)
    await until(lambda: len(launcher.started) == 2)
    await ready(launcher.started[0], cluster)  # one is ready, the other still loads
    tasks = asyncio.all_tasks()
    await replicas.stop()
    assert [h.stops for h in launcher.started] == [1, 1]
    await settle()
    assert len(launcher.started) == 2
    assert not [t for t in tasks if not t.done() and "Replicas" in t.get_coro().__qualname__]


async def test_stop_does_not_wait_for_a_backoff(run, pauses):
    launcher = FakeLauncher("mac1")
    replicas, cluster = run(launcher)
    await until(lambda: launcher.started)
    await ready(launcher.started[0], cluster)
    pauses.backing_off.clear()
    launcher.started[0].end()
    await until(lambda: pauses.backoffs)
    async with asyncio.timeout(WAIT_S):
        await replicas.stop()
    assert len(launcher.started) == 1


async def test_stop_ends_the_others_when_one_cannot_be_stopped(run, monkeypatch):
    launcher = FakeLauncher("mac1", "mac2")
    replicas, _ = run(launcher, dp_size=2)
    await until(lambda: len(launcher.started) == 2)

    async def breaks() -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(launcher.started[0], "stop", breaks)
    await replicas.stop()
    assert launcher.started[1].stops == 1


async def test_a_start_that_raises_is_a_failure_too(run):
    launcher = FakeLauncher("mac1")
    launcher.error = RuntimeError("the node is gone")
    replicas, _ = run(launcher)
    await settle()
    assert replicas.failure is not None


async def test_a_restart_that_raises_is_tried_again(run, pauses):
    launcher = FakeLauncher("mac1")
    _, cluster = run(launcher)
    await until(lambda: launcher.started)
    await ready(launcher.started[0], cluster)
    pauses.backing_off.clear()
    launcher.error = RuntimeError("the node is gone")
    launcher.started[0].end()
    await until(lambda: pauses.backoffs)
    pauses.backing_off.set()
    await settle()
    launcher.error = None
    await settle()
    assert len(launcher.started) == 2


async def test_a_replica_that_dies_right_after_it_became_ready_is_placed_anew(run, pauses):
    launcher = FakeLauncher("mac1")
    replicas, cluster = run(launcher)
    pauses.polling.clear()
    await until(lambda: launcher.started)
    await settle()
    handle = launcher.started[0]
    handle.at = Progress(Stage.READY)
    cluster.register(Identity("M", OwnerKey(0, 0), "life", "mac1", "127.0.0.1:1"), Memory(kv_tokens=100))
    handle.end()
    await settle()
    assert replicas.failure is None
    assert len(launcher.started) == 2
