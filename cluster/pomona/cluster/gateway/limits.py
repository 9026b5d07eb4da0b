"""Limits that uvicorn lacks, as plain ASGI: the size of a body, and how long a client may stop reading or sending."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pomona.workers.errors import RequestError

from .answers import error_response

logger = logging.getLogger(__name__)

# Linger for 0 s: without it the kernel keeps megabytes for a reader that may never come.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientGone(Exception):
    """The client left, or stopped reading for longer than it may."""


class BodyLimit:
    """Refuses bodies of more than `max_bytes` with 413, and bodies that pause for `timeout_s` with 408.

    A declared length is refused before a byte is read; an undeclared one as soon as it is too long.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif declared_bytes(scope) > self._max_bytes:
            response = error_response(self._too_large())
            # What the client still sends would otherwise be read as its next request.
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        seen_bytes, more = 0, True

        async def receive_limited() -> Message:
            nonlocal seen_bytes, more
            message = await (self._in_time(receive) if more else receive())
            seen_bytes += len(message.get("body", b""))
            more = more and message["type"] == "http.request" and message.get("more_body", False)
            if seen_bytes > self._max_bytes:
                raise self._too_large()
            return message

        return receive_limited

    async def _in_time(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receive()
        except TimeoutError as exc:
            raise RequestError("The body did not arrive in time.", code="body_timeout", status=408) from exc

    def _too_large(self) -> RequestError:
        return RequestError(f"The body is larger than {self._max_bytes:,} bytes.", code="request_too_large", status=413)


def declared_bytes(scope: Scope) -> int:
    """The request's Content-Length; 0 when it has none. uvicorn has refused lengths that are no numbers."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


class WriteTimeout:
    """Ends a connection whose client has not read for `timeout_s`: what the app sends then raises ClientGone.

    It has to be the outermost layer: only there does `send` still belong to the server's connection.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError as exc:
                abort_connection(send)
                raise ClientGone(f"The client read nothing for {self._timeout_s:g} s.") from exc

        try:
            await self._app(scope, receive, send_in_time)
        except ClientGone as exc:
            logger.info("connection ended: %s", exc)


def abort_connection(send: Send) -> None:
    """Drops the connection with what is buffered for it.

    ASGI has no word for this, and a server that merely closes waits for ever to flush to a client that does not
    read. uvicorn's `send` is a method of the object that holds the transport; other servers are left alone.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is not None and hasattr(transport, "abort"):  # asyncio's or uvloop's
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        transport.abort()
