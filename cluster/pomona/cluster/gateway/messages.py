"""The conversation of a chat request: its messages and the tools it offers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .fields import JsonObject, Lenient


class ContentPart(Lenient):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type != "text" or self.text is None:
            raise PydanticCustomError("not_text", "This model takes parts of type 'text' only")
        return self


class Message(Lenient):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        extra = self.model_extra or {}
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "A message of this role needs content")
        if any(extra.get(name) is not None for name in ("function_call", "audio")):
            raise PydanticCustomError("not_yet", "This version does not take 'function_call' or 'audio' in messages")
        return self

    def for_template(self) -> JsonObject:
        """The message as chat templates expect it: content joined to text, only what was sent."""
        content = self.content if isinstance(self.content, str) else "".join(p.text or "" for p in self.content or [])
        # Templates know no `developer`: it is the newer name of `system`.
        role = "system" if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": content}
        optional = self.model_dump(include={"name", "tool_calls", "tool_call_id", "reasoning_content"})
        return message | {name: value for name, value in optional.items() if value is not None}


class Function(Lenient):
    """What a tool does: its parameters are described by a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(Lenient):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> JsonObject:
        """The tool as it was sent, without what is null there."""
        sent: JsonObject = self.model_dump(exclude_none=True)
        return sent
