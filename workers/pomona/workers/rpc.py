"""gRPC as every part uses it: one set of channel options, the cluster's token on every call, no shared ports."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

TOKEN_KEY = "pomona-token"  # noqa: S105  the name of the metadata entry, not a secret
MAX_MESSAGE_BYTES = 64 << 20

Options = list[tuple[str, Any]]

if TYPE_CHECKING:  # generic in the stubs only
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

# A peer that was stopped or unplugged is noticed in about 3 s (the keepalive timeout alone took 61 s).
CHANNEL_OPTIONS: Options = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS: Options = [
    # Without it two servers share one port in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    return ((TOKEN_KEY, token),)


def channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to a host of the cluster."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def server(token: str) -> grpc.aio.Server:
    """A server that refuses calls without the cluster's token."""
    return grpc.aio.server(interceptors=[TokenInterceptor(token)], options=SERVER_OPTIONS)


def bind(grpc_server: grpc.aio.Server, host: str, port: int = 0) -> str:
    """Bind and return the `host:port` that peers dial. Raises OSError when the port is taken."""
    try:
        bound = grpc_server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {host}:{port}") from exc
    if not bound:
        raise OSError(f"cannot listen on {host}:{port}")
    return f"{host}:{bound}"


class TokenInterceptor(Interceptor):
    """Compares the caller's token in constant time."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY, "")
        if handler is None or hmac.compare_digest(str(given).encode(), self._token):
            return handler
        return _refusal(handler)


def _refusal(handler: Any) -> Any:
    """A handler of the same shape that answers UNAUTHENTICATED."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the call carries no valid {TOKEN_KEY}")

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[(handler.request_streaming, handler.response_streaming)]
    return make(
        refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
