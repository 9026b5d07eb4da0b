"""The types that request bodies are made of."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from pomona.workers.errors import RequestError

UINT32_MAX = 2**32 - 1

TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Text = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, JsonValue]


class Lenient(BaseModel):
    """Strict about the types of what it knows, silent about the rest."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


def refuse(param: str, message: str) -> PydanticCustomError:
    """An error about `param` that a validator of the whole body raises."""
    return PydanticCustomError("refused", "{text}", {"text": message, "param": param})


def to_json(value: Any, param: str) -> str:
    """The value as JSON. RequestError about `param` for NaN and infinities, which JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as exc:
        raise RequestError(f"{param}: numbers have to be finite.", param=param) from exc
