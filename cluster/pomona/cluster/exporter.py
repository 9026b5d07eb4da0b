"""The head's HTTP side: `/metrics` and `/sd/prometheus`, served inside the head's own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import metrics
from .view import ClusterView


def app(view: Callable[[], ClusterView], targets: Callable[[], Sequence[tuple[str, str]]]) -> Starlette:
    """`targets` are (role, host:port) of everything that Prometheus shall scrape."""
    registry = metrics.registry(view)

    async def scrape(_: Request) -> Response:
        return Response(metrics.exposition(registry), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def discovery(_: Request) -> Response:
        return JSONResponse(metrics.service_discovery(targets()))

    return Starlette(routes=[Route("/metrics", scrape), Route("/sd/prometheus", discovery)])
