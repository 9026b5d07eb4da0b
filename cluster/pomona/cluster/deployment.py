"""Bringing a cluster up and down from the command line: Ray, then the head, then the gateway; down in reverse."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

from pomona.workers.errors import LostHost, OperatorError

from .config import ServeConfig, new_token
from .head import HeadStatus
from .launcher import NAMESPACE

ACTOR_PREFIX = "pomona-"
HEAD_NAME = "pomona-head"
GATEWAY_NAME = "pomona-gateway"
CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
# pomona keeps no data in Ray's object store; Ray's default would take 30 % of the memory.
OBJECT_STORE_BYTES = 100_000_000


def check_ports(config: ServeConfig) -> None:
    """Refuse a port in use before anything is started."""
    from .http_server import listen

    for flag, host, port in (
        ("--port", config.host, config.port),
        ("--metrics-port", config.metrics_host, config.metrics_port),
    ):
        try:
            listen(host, port).close()
        except OSError as exc:
            free = _free_port(host)
            raise OperatorError(
                f"{flag} {port} on {host} cannot be used ({exc.strerror}): stop what uses it, or give another one, "
                f"such as {flag} {free}"
            ) from exc
    if (config.host, config.port) == (config.metrics_host, config.metrics_port):
        raise OperatorError(f"--port and --metrics-port are both {config.port}: give two different ones")


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            sock.bind(("", 0))
        return int(sock.getsockname()[1])


def check_address(address: str | None) -> None:
    """Refuse a Ray address where nothing listens: Ray itself would try for a minute."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as exc:
        raise OperatorError(
            f"--address {address}: no Ray cluster answers there ({exc}): start one with `ray start --head`, "
            "or leave --address out to serve on this machine"
        ) from exc


class Deployment:
    """What one `pomona serve` started. `stop` ends all of it, and Ray where this process started it."""

    def __init__(self, config: ServeConfig, *, weights_bytes: int = 0) -> None:
        self._config = config
        self._weights_bytes = weights_bytes
        self._token = new_token()
        self._head: Any = None
        self._gateway: Any = None

    def start_ray(self) -> None:
        """Start a local Ray, or join the cluster that --address names."""
        config = self._config
        _ray_environment(local=config.address is None)
        import ray

        common: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if config.address is None:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **common)
        else:
            try:
                ray.init(address=config.address, **common)
            except (ConnectionError, RuntimeError) as exc:
                raise OperatorError(f"--address {config.address}: {' '.join(str(exc).split())[:300]}") from exc

    def start(self) -> None:
        """Head, gateway, then the replicas. Raises OperatorError."""
        import ray

        from .gateway.actor import GatewayActor
        from .head import HeadActor

        self._refuse_second()
        options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "scheduling_strategy": _here()}
        self._head = (
            ray.remote(HeadActor)
            .options(name=HEAD_NAME, **options)
            .remote(self._config, self._token, self._weights_bytes)
        )
        registry = self._call(self._head.start.remote())
        self._gateway = (
            ray.remote(GatewayActor).options(name=GATEWAY_NAME, **options).remote(self._config, registry, self._token)
        )
        self._call(self._gateway.start.remote())
        refusal = self._call(self._head.deploy.remote())
        if refusal is not None:
            raise OperatorError(refusal)

    def status(self) -> HeadStatus:
        """Raises LostHost when the head is gone."""
        status: HeadStatus = self._call(self._head.status.remote())
        return status

    def stop(self) -> None:
        """End everything that this deployment started. Bounded in time; whatever does not answer is killed."""
        import ray

        if not ray.is_initialized():
            return
        for actor in (self._gateway, self._head):
            if actor is not None:
                _stop_actor(actor)
        if self._head is not None:
            _end_leftovers()
        ray.shutdown()

    def _refuse_second(self) -> None:
        import ray

        try:
            ray.get_actor(HEAD_NAME, namespace=NAMESPACE)
        except ValueError:
            _end_leftovers()
            return
        raise OperatorError(
            f"pomona already serves on the Ray cluster {self._config.address}: look with `pomona status`, "
            "stop it there, or leave --address out"
        )

    def _call(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as exc:
            cause = exc.cause
            if isinstance(cause, (OSError, OperatorError)):
                raise OperatorError(str(cause)) from exc
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as exc:
            raise LostHost(f"the head or the gateway is gone: {' '.join(str(exc).split())[:300]}") from exc


def _stop_actor(actor: Any) -> None:
    import ray

    try:
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
    except ray.exceptions.RayError as exc:
        logging.getLogger(__name__).warning("stopping: %s", exc)
    ray.kill(actor)


def _end_leftovers() -> None:
    """End pomona's actors that have no head any more: detached ones outlive a head that died."""
    import ray

    for name in ray.util.list_named_actors():
        if name.startswith(ACTOR_PREFIX):
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                continue  # it ended by itself


def _ray_environment(*, local: bool) -> None:
    """Ray reads these when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if local:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray runs its workers at nice 15: whatever else the machine does would come before the model.
        os.environ.setdefault("RAY_worker_niceness", "0")
    elif sys.platform == "darwin":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")


def _here() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
