"""What a client wants its answer to look like: OpenAI's, vLLM's and SGLang's names for one grammar."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Json, model_validator
from pydantic_core import PydanticCustomError

from pomona.v1 import inference_pb2

from .fields import JsonObject, Lenient, Text, refuse, to_json

Schema = JsonObject | Json[JsonObject]
Choices = list[Text]


class NamedSchema(Lenient):
    """OpenAI's wrapping of a JSON schema."""

    name: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is enforced either way.")


class ResponseFormat(Lenient):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "Type 'json_schema' needs 'json_schema', and no other type takes one")
        return self

    def grammar(self) -> inference_pb2.Grammar | None:
        if self.json_schema is not None:
            return schema_grammar(self.json_schema.schema_, "response_format")
        return inference_pb2.Grammar(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(Lenient):
    """vLLM's structured_outputs, of which one part is to be set."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[Choices, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> StructuredOutputs:
        # Whatever else it holds would change the answer, be it a grammar or a misspelt name.
        if any(value not in (None, False) for value in (self.model_extra or {}).values()):
            raise PydanticCustomError("unknown_part", "It can hold 'json', 'json_object', 'regex' or 'choice' only")
        if sum(map(bool, (self.json_ is not None, self.json_object, self.regex, self.choice))) != 1:
            raise PydanticCustomError("one_part", "It has to hold one of 'json', 'json_object', 'regex' and 'choice'")
        return self

    def grammar(self) -> inference_pb2.Grammar:
        if self.json_ is not None:
            return schema_grammar(self.json_, "structured_outputs")
        if self.json_object:
            return inference_pb2.Grammar(json_object=True)
        return choice_grammar(self.choice) if self.choice else inference_pb2.Grammar(regex=self.regex)


class Formatted(Lenient):
    """The fields of a body that say what the answer has to look like. At most one of them does."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's name.")
    guided_json: Schema | None = Field(None, description="vLLM's older name.")
    guided_regex: Text | None = Field(None, description="vLLM's older name.")
    guided_choice: Choices | None = Field(None, description="vLLM's older name.")
    json_schema: Schema | None = Field(None, description="SGLang's name.")
    regex: Text | None = Field(None, description="SGLang's name.")

    @model_validator(mode="after")
    def _has_one_format(self) -> Formatted:
        match list(self.grammars()):
            case [first, second, *_]:
                raise refuse(second, f"'{first}' and '{second}' both say what the answer looks like: send one of them.")
        return self

    def grammars(self) -> dict[str, inference_pb2.Grammar]:
        """What is asked for, by the field that asks."""
        asked = {
            "response_format": self.response_format and self.response_format.grammar(),
            "structured_outputs": self.structured_outputs and self.structured_outputs.grammar(),
            "guided_json": None if self.guided_json is None else schema_grammar(self.guided_json, "guided_json"),
            "guided_regex": self.guided_regex and inference_pb2.Grammar(regex=self.guided_regex),
            "guided_choice": choice_grammar(self.guided_choice) if self.guided_choice else None,
            "json_schema": None if self.json_schema is None else schema_grammar(self.json_schema, "json_schema"),
            "regex": self.regex and inference_pb2.Grammar(regex=self.regex),
        }
        return {field: grammar for field, grammar in asked.items() if grammar}

    def grammar(self) -> inference_pb2.Grammar | None:
        """The one grammar that is asked for, if any."""
        return next(iter(self.grammars().values()), None)


def schema_grammar(schema: JsonObject, param: str) -> inference_pb2.Grammar:
    return inference_pb2.Grammar(json_schema=to_json(schema, param))


def choice_grammar(choices: Choices) -> inference_pb2.Grammar:
    return inference_pb2.Grammar(choice=inference_pb2.Grammar.Choice(choices=choices))
