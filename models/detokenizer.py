"""Turns tokens into text while they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxkv.models.tokenizer import Tokenizer


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece's way: a mark for each stray byte, where others have one for each run."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("paxkv.replace_each_byte", _replace_each_byte)


class Detokenizer:
    """The text of a sequence's output, piece by piece.

    A piece never ends inside a character: bytes that may still become one are held back. All pieces
    together are `decode(prompt + output)` without its beginning `decode(prompt)`; where the prompt
    ends inside a character, that character comes with the output that completes it. The cost of a
    token does not depend on how many came before.

        detokenizer = Detokenizer(tokenizer, tokenizer.encode("Once"))
        text = "".join(detokenizer.push(token_id) for token_id in output)
        text += detokenizer.finish()
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Iterable[int] = (),
        *,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._leading_spaces = tokenizer.spelling.leading_spaces  # still to be taken off
        errors = "replace" if tokenizer.spelling.is_byte_level else "paxkv.replace_each_byte"
        self._characters = codecs.getincrementaldecoder("utf-8")(errors)
        self.push(prompt_ids)

    def push(self, token_ids: int | Iterable[int]) -> str:
        """Takes the next token or tokens and returns the text that they complete."""
        token_ids = (token_ids,) if isinstance(token_ids, int) else token_ids
        spelled = b"".join(self._bytes_of(token_id) for token_id in token_ids)
        return self._strip(self._characters.decode(spelled))

    def finish(self) -> str:
        """Returns what was held back, an unfinished character as replacement marks."""
        return self._strip(self._characters.decode(b"", final=True))

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:  # models may have more ids than tokens
            return b""
        return self._tokenizer.spelling.bytes_of(token)

    def _strip(self, text: str) -> str:
        while self._leading_spaces and text:
            if text[0] != " ":
                self._leading_spaces = 0
                break
            self._leading_spaces -= 1
            text = text[1:]
        return text
