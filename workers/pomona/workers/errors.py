"""The error tree, split by who can act.

PomonaError
├── OperatorError       the person at the command line: a flag, a path, a limit; exit code 2
│   ├── ModelError      a model that is not there, is no model, or is of an architecture we do not serve
│   └── CapacityError   limits that give an owner nothing
├── RequestError        the client of the API: HTTP 4xx, with OpenAI's `param` and `code`
├── Unavailable         this owner cannot take the request, another may
│   └── Overloaded      …because its queue is full
├── LostHost            a worker or host went away while it was needed
└── EngineError         our bug, or MLX's: the request failed, the engine goes on
"""

from __future__ import annotations


class PomonaError(Exception):
    """Every error that pomona raises on purpose. Its text is one sentence a person can act on."""


class OperatorError(PomonaError):
    """A flag, path or limit that the operator has to change."""


class ModelError(OperatorError):
    """The model cannot be served as named."""


class CapacityError(OperatorError):
    """Limits that give an owner nothing.

    `kind` names the limit: `requests`, `aux` or `kv`. `at_least` is the least value of the operator's own flag
    that works, in the units of the command line (the whole replica), where there is one.
    """

    def __init__(self, kind: str, message: str, at_least: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.at_least = at_least


class RequestError(PomonaError):
    """The client's request cannot be served as sent; `status` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Unavailable(PomonaError):
    """This owner cannot take the request now; another may."""


class Overloaded(Unavailable):
    """The owner's queue is full."""


class StaleEpoch(Unavailable):
    """The request was routed under an older plan than the one in force."""


class LostHost(PomonaError):
    """A worker or host went away while it was needed."""


class EngineError(PomonaError):
    """A step failed inside the engine; the requests of that step failed, the engine goes on."""
