"""The gateway's Prometheus series; every label comes from a closed set."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4"
UNKNOWN_MODEL = "unknown"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Route(Enum):
    """What the client asked for."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    ABORTED = "aborted"
    SHED = "shed"
    ERROR = "error"


class Shed(Enum):
    """Why a request was turned away."""

    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"


class ModelSeries(NamedTuple):
    """One model's series of what every message counts."""

    first_token: Histogram
    inter_token: Histogram
    generation_tokens: Counter


class GatewayMetrics:
    """All series of one gateway on a registry of their own. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self.requests = self._counter("pomona_requests", "Requests by outcome.", "model", "route", "outcome")
        self.shed = self._counter("pomona_requests_shed", "Requests turned away.", "reason")
        self.retries = self._counter("pomona_request_retries", "Requests sent to another owner after a refusal.")
        self.prompt_tokens = self._counter("pomona_prompt_tokens", "Prompt tokens of answered requests.", "model")
        self.cached_tokens = self._counter(
            "pomona_cached_prompt_tokens", "Prompt tokens that came from a prefix cache.", "model"
        )
        self.generation_tokens = self._counter("pomona_generation_tokens", "Generated tokens.", "model")
        self.first_token = self._seconds("pomona_time_to_first_token_seconds", "Request to first token.")
        self.inter_token = self._seconds("pomona_inter_token_latency_seconds", "Mean gap to the tokens of one message.")
        self.duration = self._seconds("pomona_request_duration_seconds", "Request to the end of the answer.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ("model",), registry=self.registry, buckets=SECONDS)

    @functools.cache  # noqa: B019 - models are few, and a gateway has one of these for life
    def of_model(self, model: str) -> ModelSeries:
        """What every message counts: looking labels up costs more than counting."""
        return ModelSeries(
            self.first_token.labels(model), self.inter_token.labels(model), self.generation_tokens.labels(model)
        )

    def start(self, route: Route) -> RequestRecord:
        """Begins to measure one request."""
        return RequestRecord(self, route)

    def retried(self) -> None:
        """Counts one more try of a request at another owner."""
        self.retries.inc()

    def text(self) -> bytes:
        """The exposition, format 0.0.4."""
        return generate_latest(self.registry)


class RequestRecord:
    """What one request did; `finish` counts it once, however often it is called."""

    def __init__(self, metrics: GatewayMetrics, route: Route) -> None:
        self._metrics = metrics
        self._route = route
        self._model = UNKNOWN_MODEL
        self._began_s = metrics.clock()
        self._last_s: dict[int, float] = {}
        self._finished = False

    def names(self, model: str) -> None:
        """Labels the request with a model that is served here; anything else would let clients make series."""
        self._model = model

    def generated(self, choice: int, tokens: int) -> None:
        """Tokens of one message of one choice."""
        now_s, series = self._metrics.clock(), self._metrics.of_model(self._model)
        if choice in self._last_s:
            series.inter_token.observe((now_s - self._last_s[choice]) / max(1, tokens))
        elif not self._last_s:
            series.first_token.observe(now_s - self._began_s)
        self._last_s[choice] = now_s
        series.generation_tokens.inc(tokens)

    def prompt(self, tokens: int, cached: int) -> None:
        self._metrics.prompt_tokens.labels(self._model).inc(tokens)
        self._metrics.cached_tokens.labels(self._model).inc(cached)

    def finish(self, outcome: Outcome, shed: Shed | None = None) -> None:
        if self._finished:
            return
        self._finished = True
        self._metrics.requests.labels(self._model, self._route.value, outcome.value).inc()
        self._metrics.duration.labels(self._model).observe(self._metrics.clock() - self._began_s)
        if shed is not None:
            self._metrics.shed.labels(shed.value).inc()
