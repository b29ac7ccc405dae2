"""Builds a tokenizer from what a GGUF file says about it."""

import enum
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paxkv.models.token_spelling import byte_alphabet

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


class _TokenType(enum.IntEnum):
    CONTROL = 3  # never in decoded text
    USER_DEFINED = 4  # kept whole, as `<think>`


def build_backend(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool, bool]:
    """The tokenizer, and whether it begins texts with BOS and ends them with EOS.

    Raises:
        ValueError: A kind of tokenizer that is not understood, or metadata that are missing.
    """
    kind = _get(metadata, "model")
    match kind:
        case "gpt2":
            backend, adds_bos = _byte_level(metadata)
        case "llama":
            backend, adds_bos = _sentencepiece(metadata), True
        case _:
            raise ValueError(
                f"the GGUF file's tokenizer.ggml.model is {kind!r}; understood are 'gpt2'"
                " (byte-level BPE) and 'llama' (SentencePiece BPE): use a Hugging Face folder of"
                " the model"
            )
    _add_whole_tokens(backend, metadata, is_byte_level=kind == "gpt2")
    return (
        backend,
        metadata.get(_PREFIX + "add_bos_token", adds_bos),
        metadata.get(_PREFIX + "add_eos_token", False),
    )


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that have a role, by its name."""
    tokens = _get(metadata, "tokens")
    ids = {role: metadata.get(_PREFIX + key) for role, key in _ROLES.items()}
    for role, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(
                f"the GGUF file's {role} is {token_id}, but it has {len(tokens)} tokens"
            )
    return {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}


def _byte_level(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether it begins texts with BOS where the file does not say."""
    name = _get(metadata, "pre")
    is_llama3 = name in ("llama-bpe", "llama3", "llama-v3")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        steps = [gpt2]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), gpt2]
    elif is_llama3:
        steps = [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), byte_level]
    elif name == "qwen2":
        steps = [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), byte_level]
    else:
        raise ValueError(
            f"the GGUF file's tokenizer.ggml.pre is {name!r}; understood are 'gpt-2', 'smollm',"
            " 'llama-bpe', 'llama3', 'llama-v3', 'qwen2': use a Hugging Face folder of the model"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges")]
    # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
    backend = _bpe(_vocab(metadata), merges, ignore_merges=is_llama3)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend, is_llama3


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocab = _vocab(metadata)
    unknown = gguf_special_tokens(metadata).get("unk_token")
    scores = _get(metadata, "scores")
    if len(scores) != len(vocab):
        raise ValueError(f"the GGUF file has {len(scores)} scores for {len(vocab)} tokens")
    merges = _merges_of_scores(vocab, scores)
    backend = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    adds_space = metadata.get(_PREFIX + "add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(steps + strip)
    return backend


def _bpe(vocab: dict[str, int], merges: list[Any], **settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(BPE(vocab, merges, **settings))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the GGUF file's tokens and merges do not fit: {error}") from error


def _merges_of_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece scores stand for: the best-scored token is made first."""
    ranked = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_whole_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], *, is_byte_level: bool
) -> None:
    """Registers control and user-defined tokens, so that text which holds them is not cut up."""
    alphabet = byte_alphabet()
    control, user_defined = [], []
    tokens, kinds = _get(metadata, "tokens"), _get(metadata, "token_type")
    if len(tokens) != len(kinds):
        raise ValueError(f"the GGUF file has {len(kinds)} token types for {len(tokens)} tokens")
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _TokenType.USER_DEFINED:
            user_defined.append(AddedToken(token, normalized=False))
        # Converters mark some ordinary tokens of byte-level vocabularies as control by mistake;
        # those hold characters in which that kind writes nothing.
        elif kind == _TokenType.CONTROL and (not is_byte_level or alphabet.keys() >= set(token)):
            control.append(AddedToken(token, normalized=False, special=True))
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = _get(metadata, "tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"the GGUF file names {len(tokens) - len(vocab)} tokens more than once")
    return vocab


def _get(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[_PREFIX + key]
    except KeyError:
        raise ValueError(
            f"the GGUF file has no {_PREFIX + key}: use a Hugging Face folder of the model"
        ) from None
