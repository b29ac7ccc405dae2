"""Giving back pages that no query of a sliding window can see any more.

table, ok = release_window(table, window=8)  # after tokens were appended
"""

import jax
import jax.numpy as jnp

from paxkv.block_table import BlockTable, drop_entries


def release_window(table: BlockTable, window: int) -> tuple[BlockTable, jax.Array]:
    """Gives back the pages that have left the window of every query to come, or changes nothing.

    A query sees the `window` tokens that end with itself, and the next one stands at position
    `lengths`. With a window of 6 and pages of 4 tokens, the page of tokens 0 to 3 is needed until
    the next query stands at 9: it sees 4 to 9.

    Args:
        table: The state.
        window: Tokens that a query sees, itself counted; at least 1.

    Returns:
        The new table, in which the null page stands for what was given up, and `bool[]`; False if
        a page would be freed twice, so the table is corrupt.
    """
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    first_seen = table.lengths - (window - 1)  # by the next query
    has_left = (column + 1) * table.page_size <= first_seen[:, None]  # bool[B, M]
    return drop_entries(table, has_left)
