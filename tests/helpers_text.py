"""Small tokenizers of both kinds, made without files."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from paxkv.models.token_spelling import byte_alphabet
from paxkv.models.tokenizer import Tokenizer

BYTE_LEVEL_WORDS = ("\u0120x", "he", "llo")  # U+0120 writes a space
SENTENCEPIECE_WORDS = ("\u2581", "\u2581leading", "\u2581x", "a", "b", "\u00e9", "<b>")


def byte_level_tokenizer() -> Tokenizer:
    """Id `b` is the byte `b`; 256 is `<s>`, 257 `</s>`, then BYTE_LEVEL_WORDS."""
    vocab = dict(byte_alphabet())
    for token in ("<s>", "</s>", *BYTE_LEVEL_WORDS):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.create(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece_tokenizer(*, strips_space: bool = True) -> Tokenizer:
    """Id `b` is the byte `b`; 256 is `<s>`, 257 `</s>`, then SENTENCEPIECE_WORDS."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("<s>", "</s>", *SENTENCEPIECE_WORDS):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(BPE(vocab, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips_space)
    return Tokenizer.create(backend, {"bos_token": "<s>", "eos_token": "</s>"})
