"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Two kinds: `gpt2`, byte-level BPE with stored merges, and `llama`, SentencePiece BPE with scores and byte fallback.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelError
from .gguf_config import Metadata

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Names that llama.cpp gives to the same split.
_DIGITS = ("smollm", "starcoder", "refact", "codeshell")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2",)
_GPT2 = ("gpt-2", "default")


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that the metadata describes; ModelError for a kind or a split that we cannot rebuild."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError("This GGUF holds no tokenizer (no tokenizer.ggml.tokens); use a file that does.")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"This GGUF has a tokenizer of kind {kind!r}, but only gpt2 and llama can be rebuilt.")
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    _add_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: special tokens, chat template, context."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get("llama.context_length", 1 << 30)),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(metadata, key)
        if token is not None:
            config[f"{role}_token"] = token
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def generate_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies: every split into two pieces, best score first.

    The order of ties is that of transformers' SentencePiece conversion, so both give the same tokenizer.
    """
    found = []
    for piece, index in vocab.items():
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        splits = sorted(
            (cut for cut in cuts if cut[0] in vocab and cut[1] in vocab), key=lambda c: (vocab[c[0]], vocab[c[1]])
        )
        found += [(left, right, scores[index]) for left, right in splits]
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def _byte_level(metadata: Metadata) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges", [])
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_cut(merge) for merge in merges],
            ignore_merges=name in _LLAMA3,
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name in _GPT2:
        return words
    for names, pattern in ((_LLAMA3, _LLAMA3_SPLIT), (_QWEN2, _QWEN2_SPLIT)):
        if name in names:
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    known = ", ".join((*_GPT2, *_DIGITS, *_LLAMA3, *_QWEN2))
    raise ModelError(f"This GGUF's tokenizer splits text the {name!r} way; supported as GGUF: {known}.")


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("This GGUF's llama tokenizer has no score for each token; convert the model again.")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _token(metadata, "unknown")
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Control and user-defined tokens are found in text before anything else; control ones are special."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(metadata["tokenizer.ggml.tokens"], types, strict=False))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == _CONTROL]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(plain)


def _add_ends(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Puts bos before (and eos after) a text where the metadata, or llama.cpp's default for the kind, says so."""
    by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    bos = _token(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = _token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=ends
    )


def _token(metadata: Metadata, role: str) -> str | None:
    """The text of the `role` token, if the metadata names one that exists."""
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return str(tokens[index]) if index is not None and 0 <= index < len(tokens) else None
