"""The HTTP app: OpenAI's routes over a `Backend`. Answers and errors are made elsewhere; this is the edge."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from pomona.workers.errors import Overloaded, PomonaError, RequestError, Unavailable

from . import answers, schema
from .backend import Backend
from .limits import BodyLimit, ClientGone, WriteTimeout
from .metrics import CONTENT_TYPE, GatewayMetrics, Outcome, RequestRecord, Route, Shed
from .streams import EventStream, Piece, Pieces, merged, while_connected

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
CLIENT_GONE_STATUS = 499  # nginx's number; nobody is there to read it
SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two generating endpoints."""

    route: Route
    body: type[schema.Body]
    answer: type[answers.Answer]


CHAT = Kind(Route.CHAT, schema.ChatBody, answers.ChatAnswer)
COMPLETIONS = Kind(Route.COMPLETIONS, schema.CompletionBody, answers.CompletionAnswer)


def outcome(exc: BaseException) -> tuple[Outcome, Shed | None]:
    """How the metrics count a request that ended with `exc`."""
    if isinstance(exc, RequestError):
        return (Outcome.CLIENT_ERROR if exc.status < 500 else Outcome.ERROR), None
    if isinstance(exc, Overloaded):
        return Outcome.SHED, Shed.QUEUE_FULL
    if isinstance(exc, Unavailable):
        return Outcome.SHED, Shed.UNAVAILABLE
    gone = not isinstance(exc, Exception) or isinstance(exc, ClientGone | ClientDisconnect)
    return (Outcome.ABORTED if gone else Outcome.ERROR), None


class Generation:
    """Requests to generate, from body to last byte."""

    def __init__(self, backend: Backend, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def answer(self, request: Request, kind: Kind) -> Response:
        record = self._metrics.start(kind.route)
        try:
            return await self._answer(request, kind, record)
        except BaseException as exc:
            record.finish(*outcome(exc))
            raise

    async def _answer(self, request: Request, kind: Kind, record: RequestRecord) -> Response:
        body = schema.parse(kind.body, await request.body())
        check_model(self._backend, body.model)
        record.names(body.model)
        answer_id = kind.answer.id_prefix + uuid.uuid4().hex
        requests = schema.to_generate_requests(body, answer_id)
        pieces = merged([self._backend.generate(one) for one in requests])
        answer = kind.answer(
            answer_id,
            int(time.time()),
            body.model,
            choices=len(requests),
            n=body.choices_per_prompt,
            with_usage=body.wants_usage,
            max_calls=body.max_calls(),
        )
        deliver = self._streamed if body.stream else self._whole
        response = await deliver(request, answer, pieces, record)
        response.headers["x-request-id"] = answer_id
        return response

    async def _whole(self, request: Request, answer: answers.Answer, pieces: Pieces, record: RequestRecord) -> Response:
        async def collect() -> None:
            async with aclosing(pieces):
                async for piece in pieces:
                    record.generated(piece.choice, len(piece.message.ids))
                    answer.collect(piece.choice, piece.message)

        await while_connected(request.receive, collect())
        answer.check_complete()
        count_done(record, answer)
        return answers.json_response(answer.whole())

    async def _streamed(
        self, request: Request, answer: answers.Answer, pieces: Pieces, record: RequestRecord
    ) -> Response:
        async def first() -> Piece | None:
            return await anext(pieces, None)

        # Until the first message is there an error can still be an HTTP status.
        return EventStream(events(answer, await while_connected(request.receive, first()), pieces, record))


async def events(
    answer: answers.Answer, first: Piece | None, rest: Pieces, record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    """The stream's events. An error becomes an event, and then no [DONE] follows."""
    ending: tuple[Outcome, Shed | None] = (Outcome.ABORTED, None)
    try:
        async with aclosing(rest):
            piece = first
            while piece is not None:
                record.generated(piece.choice, len(piece.message.ids))
                if chunk := answer.chunk(piece.choice, piece.message):
                    yield chunk
                piece = await anext(rest, None)
        answer.check_complete()
        if usage := answer.usage_chunk():
            yield usage
        count_done(record, answer)
        yield answers.DONE
    except Exception as exc:  # the status is sent: the client can only be told in the stream
        ending = outcome(exc)
        _log(exc)
        yield answers.event(answers.error_body(exc))
    finally:
        record.finish(*ending)


def count_done(record: RequestRecord, answer: answers.Answer) -> None:
    usage = answer.usage()
    record.prompt(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    record.finish(Outcome.OK)


def _log(exc: Exception) -> None:
    if isinstance(exc, PomonaError):
        logger.warning("stream failed: %s", exc)
    else:
        logger.error("stream failed", exc_info=exc)


def check_model(backend: Backend, model: str) -> None:
    if model not in backend.models():
        raise RequestError(
            f"The model '{model[:100]}' does not exist here; GET /v1/models lists those that do.",
            param="model",
            code="model_not_found",
            status=404,
        )


# ---- routes


def openai_routes(backend: Backend, metrics: GatewayMetrics) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    generation = Generation(backend, metrics)
    started = int(time.time())

    def model_json(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": started, "owned_by": "pomona"}

    @router.post("/chat/completions", openapi_extra=documented(schema.ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        return await generation.answer(request, CHAT)

    @router.post("/completions", openapi_extra=documented(schema.CompletionBody))
    async def completions(request: Request) -> Response:
        """Continues one or more prompts, whole or as server-sent events."""
        return await generation.answer(request, COMPLETIONS)

    @router.get("/models")
    async def list_models() -> Response:
        """The models that are served here."""
        return answers.json_response({"object": "list", "data": [model_json(model) for model in backend.models()]})

    @router.get("/models/{model:path}")
    async def one_model(model: str) -> Response:
        """One model, by the name that /v1/models gives it."""
        check_model(backend, model)
        return answers.json_response(model_json(model))

    return router


def operator_routes(backend: Backend, metrics: GatewayMetrics) -> APIRouter:
    router = APIRouter(tags=["Operation"])
    page = resources.files(__package__).joinpath("capacity.html").read_text(encoding="utf-8")

    @router.get("/", include_in_schema=False)
    async def capacity() -> Response:
        """The capacity page: /cluster for people. It asks for the key itself where there is one."""
        return HTMLResponse(page)

    @router.get("/health")
    async def health() -> Response:
        """200 while the process lives."""
        return answers.json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """200 when a model can be served, 503 with the reason otherwise."""
        return readiness(backend)

    @router.get("/metrics")
    async def scrape() -> Response:
        """Prometheus series, text format 0.0.4 whatever the client accepts."""
        # The constructor would add a charset, and a scraper may compare the whole value.
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return router


def cluster_routes(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["Operation"])

    @router.get("/cluster")
    async def cluster() -> Response:
        """Owners, their shares and their load as this gateway knows them."""
        return answers.json_response(await backend.cluster())

    return router


def readiness(backend: Backend) -> Response:
    """Ready while any model is: one model's loss must not take the others out of a load balancer."""
    models = backend.models()
    waiting = [model for model in models if not backend.ready(model)]
    if len(waiting) < len(models):
        return answers.json_response({"ready": True, **({"waiting": waiting} if waiting else {})})
    reason = f"no worker is ready for {', '.join(waiting)}" if waiting else "no model is known yet"
    return answers.json_response({"ready": False, "reason": reason}, 503)


def key_check(api_key: str) -> Any:
    expected = f"Bearer {api_key}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not secrets.compare_digest(given, expected):
            message = "Send the API key as 'Authorization: Bearer KEY'."
            raise RequestError(message, code="invalid_api_key", status=401)

    return Depends(check)


# ---- the app


def documented(body: type[schema.Body]) -> dict[str, Any]:
    """OpenAPI's description of a body that the route parses by itself."""
    content = {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


class Gateway(FastAPI):
    """FastAPI with our limits around everything and the bodies' schemas in the OpenAPI document."""

    def __init__(self, *, write_timeout_s: float, max_body_bytes: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._write_timeout_s = write_timeout_s
        self._max_body_bytes = max_body_bytes

    def build_middleware_stack(self) -> ASGIApp:
        limited = BodyLimit(super().build_middleware_stack(), self._max_body_bytes, self._write_timeout_s)
        return WriteTimeout(limited, self._write_timeout_s)

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for body in (schema.ChatBody, schema.CompletionBody):
            described = body.model_json_schema(ref_template=SCHEMAS + "{model}")
            schemas.update(described.pop("$defs", {}))
            schemas[body.__name__] = described
        return document


def create_app(
    backend: Backend,
    *,
    api_key: str | None,
    metrics: GatewayMetrics,
    version: str,
    write_timeout_s: float = 30.0,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The gateway. With an `api_key`, /v1 and /cluster need it; probes and /metrics never do."""
    app = Gateway(
        write_timeout_s=write_timeout_s,
        max_body_bytes=max_body_bytes,
        title="pomona",
        version=version,
        docs_url=None,  # both pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    guards = [key_check(api_key)] if api_key is not None else []
    app.include_router(openai_routes(backend, metrics), dependencies=guards)
    app.include_router(cluster_routes(backend), dependencies=guards)
    app.include_router(operator_routes(backend, metrics))
    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    async def known(_: Request, exc: Exception) -> Response:
        return answers.error_response(exc)

    async def http(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        response = answers.error_response(RequestError(f"{exc.detail}.", code="http_error", status=exc.status_code))
        response.headers.update(exc.headers or {})
        return response

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    app.add_exception_handler(PomonaError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, known)  # the server logs it: Starlette raises it again
