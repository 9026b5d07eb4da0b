"""`pomona serve`, from checks to Ctrl-C: what is printed, and in what order things come up and go down."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pomona.workers.errors import LostHost, OperatorError

from . import tables
from .config import ServeConfig
from .deployment import Deployment, check_address, check_ports
from .foresight import Foresight, look
from .head import HeadStatus
from .metrics import replica_state
from .replicas import Failure
from .view import ReplicaView

LOAD_POLL_S = 0.2
SERVE_POLL_S = 1.0
FAILED = 1


class Stopped(Exception):
    """Ctrl-C, or SIGTERM."""


class StartFailed(Exception):
    """A replica never came up."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def run(
    config: ServeConfig,
    out: Console,
    err: Console,
    *,
    greet: Callable[[ServeConfig], None] | None = None,
    once: bool = False,
) -> int:
    """The exit code: 0 after Ctrl-C, 1 when something broke. Raises OperatorError for what a person can mend.

    `greet` is called when the endpoint answers, before the table is printed; `once` stops after the table.
    """
    foresight = check(config)
    for line in foresight.topology.warnings:
        err.print(f"warning: {line}", style="yellow")
    config = config.model_copy(update={"served_model_name": foresight.served_name})
    deployment = Deployment(config, weights_bytes=foresight.weights_bytes)
    code = FAILED
    with interruptible() as stop:
        try:
            _bring_up(deployment, config, out, stop)
            if greet is not None:
                greet(config)
            _show(deployment, out)
            if not once:
                out.print("serving; Ctrl-C stops everything", style="green")
                _serve(deployment, err, stop)
            code = 0
        except Stopped:
            out.print("stopping …")
            code = 0
        except StartFailed as exc:
            if exc.failure.operator:
                raise OperatorError(exc.failure.reason) from exc
            err.print(f"pomona: {exc.failure.reason}", style="red")
        except LostHost as exc:
            err.print(f"pomona: {exc}", style="red")
        finally:
            deployment.stop()
    return code


def check(config: ServeConfig) -> Foresight:
    """Everything that can be refused before Ray or weights are touched."""
    topology = config.topology()
    if topology.ranks_per_replica > 1:
        raise OperatorError(
            f"a replica of {topology.ranks_per_replica} ranks (--tp-size {config.tp_size}, --pp-size {config.pp_size}) "
            "cannot be served by this version: use --tp-size 1 --pp-size 1 (`pomona plan` shows larger ones)"
        )
    check_ports(config)
    check_address(config.address)
    return look(config)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event, once; during the shutdown they are ignored, since it is bounded in time."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bring_up(deployment: Deployment, config: ServeConfig, out: Console, stop: threading.Event) -> None:
    with _loading(out) as display:
        display.say("starting Ray" if config.address is None else f"joining Ray at {config.address}")
        deployment.start_ray()
        _check(stop)
        display.say("starting head and gateway")
        deployment.start()
        deadline = time.monotonic() + config.load_timeout_s
        while True:
            _check(stop)
            status = deployment.status()
            display.show(status.view.replicas)
            if _settled(status):
                break
            if time.monotonic() > deadline:
                raise OperatorError(
                    f"loading took longer than --load-timeout-s {config.load_timeout_s:.0f}: give it more, or look at "
                    "the replicas above"
                )
            stop.wait(LOAD_POLL_S)


def _show(deployment: Deployment, out: Console) -> None:
    shown = deployment.status().view.to_json()
    out.print(tables.plan_view(shown))
    out.print(tables.addresses(shown["addresses"]))


def _settled(status: HeadStatus) -> bool:
    """All replicas are ready and their owners known. Raises StartFailed when one never will be."""
    if status.failure is not None:
        raise StartFailed(status.failure)
    states = [replica_state(r.stage, r.problem) for r in status.view.replicas]
    return bool(states) and all(s == "ready" for s in states) and len(status.view.owners) == len(states)


def _serve(deployment: Deployment, err: Console, stop: threading.Event) -> None:
    """Until Ctrl-C, say what happens to replicas."""
    known: dict[int, str] = {}
    while True:
        for replica in deployment.status().view.replicas:
            state = replica_state(replica.stage, replica.problem)
            if known.get(replica.replica, "ready") != state:
                err.print(f"replica {replica.replica} on {replica.host}: {state} {replica.problem or ''}".rstrip())
            known[replica.replica] = state
        stop.wait(SERVE_POLL_S)
        _check(stop)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped


class _Display:
    """One line a replica: a moving bar in a terminal, a line a stage elsewhere."""

    def __init__(self, progress: Progress, out: Console) -> None:
        self._progress = progress
        self._out = out
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def say(self, what: str) -> None:
        self._update("pomona", what, 0, 0)

    def show(self, replicas: tuple[ReplicaView, ...]) -> None:
        if replicas:
            self._update("pomona", "loading", 0, 0)
        for r in replicas:
            self._update(f"replica {r.replica} on {r.host}", r.problem or r.stage, r.done, r.total)

    def _update(self, name: str, stage: str, done: int, total: int) -> None:
        if not self._out.is_terminal:
            if self._said.get(name) != stage:
                self._out.print(f"{name}: {stage}")
            self._said[name] = stage
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, stage=stage)
        self._progress.update(
            self._tasks[name],
            stage=stage,
            completed=done if total else None,
            total=total or (1 if stage == "ready" else None),
        )
        if stage == "ready":
            self._progress.update(self._tasks[name], completed=total or 1)


@contextmanager
def _loading(out: Console) -> Iterator[_Display]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[stage]}"))
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        yield _Display(progress, out)
