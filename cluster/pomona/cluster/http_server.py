"""uvicorn inside an actor's own loop, on a socket that is bound before anything is said to be ready."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.listen(1024)
    return sock


class HttpServer:
    """uvicorn on a socket of ours, as a task of the running loop. It takes no signals: actors have none to give."""

    def __init__(self, asgi: object, sock: socket.socket) -> None:
        config = uvicorn.Config(
            asgi,  # type: ignore[arg-type]
            http="h11",  # bounds a request's head at 64 KiB; httptools took 2 MB (FACTS)
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._sock.close()
