"""How a tokenizer's token strings stand for the bytes of text."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

_MARK = "\u2581"  # SentencePiece writes a space so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes, each with its byte.

    Printable Latin-1 stands for itself; the other bytes take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in sorted(printable)} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = byte_alphabet()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpelling:
    """What a tokenizer's decoder does, token by token.

    Every token is some bytes, and text is the UTF-8 that they make. That is all a stream needs to
    know: the library's own decoders take a whole text each time.
    """

    is_byte_level: bool  # else SentencePiece: marks for spaces and `<0x0A>` for other bytes
    leading_spaces: int = 0  # that are taken off the beginning of a text

    def bytes_of(self, token: str) -> bytes:
        """The bytes that a token string stands for."""
        if self.is_byte_level:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()  # an added token, which is written as it is
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_MARK, " ").encode()


def token_spelling(backend: tokenizers.Tokenizer) -> TokenSpelling:
    """Reads the spelling off a tokenizer's decoder.

    Raises:
        ValueError: The decoder is neither byte-level nor SentencePiece with byte fallback.
    """
    steps: list[dict[str, Any]] = [{"type": None}]
    if backend.decoder is not None:
        # Pickling gives the decoder's JSON alone; `to_str` would write out the vocabulary too.
        decoder = json.loads(backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [_shape(step) for step in steps]:
        case ["ByteLevel"]:
            return TokenSpelling(is_byte_level=True)
        case ["Replace mark", "ByteFallback", "Fuse"]:
            return TokenSpelling(is_byte_level=False)
        case ["Replace mark", "ByteFallback", "Fuse", "Strip start"]:
            return TokenSpelling(is_byte_level=False, leading_spaces=steps[-1]["start"])
        case shapes:
            raise ValueError(
                f"the tokenizer's decoder is {shapes}; supported are ['ByteLevel'] (byte-level BPE)"
                " and ['Replace mark', 'ByteFallback', 'Fuse'] (SentencePiece, 'Strip start' may"
                " follow): use a model whose tokenizer.json has one of them"
            )


def _shape(step: Mapping[str, Any]) -> str | None:
    match step:
        case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
            return "Replace mark"
        case {"type": "Strip", "content": " ", "stop": 0}:
            return "Strip start"
    return step["type"]
