"""Keys that are equal where two pages hold the same, and come after the same.

Keys and values of a token follow from it and all before it, so a page's content is known by the
tokens up to its end.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from paxkv.prefix_index import PrefixKey


def content_keys(
    tokens: Sequence[int], page_size: int, prefix_key: PrefixKey, *, secret: bytes = b""
) -> Iterator[bytes]:
    """A key for each page that a sequence fills, the last one perhaps in part.

    Args:
        tokens: Those that are stored.
        page_size: Tokens per page.
        prefix_key: What must be equal besides the tokens.
        secret: At most 64 bytes. Who does not know it cannot tell tokens from keys.
    """
    state = hashlib.blake2b(repr(tuple(prefix_key)).encode(), key=secret, digest_size=16)
    for page in itertools.batched(tokens, page_size):
        state.update(np.asarray(page, np.int64).tobytes())
        yield state.digest()
