"""The invariants of a block table, checked on the host: for tests and for debugging."""

from collections.abc import Callable

import jax
import numpy as np

from paxkv.block_table import BlockTable
from paxkv.pallas_kernels.layout import NULL_PAGE


def check_integrity(
    table: BlockTable,
    held: np.ndarray | jax.Array | None = None,
    *,
    new_tokens: np.ndarray | jax.Array | None = None,
) -> None:
    """Raises when a block table contradicts itself. Reads the whole table to the host.

    Args:
        table: The state.
        held: `i32[P]`, references from outside the table, such as a prefix index's.
        new_tokens: `i32[B]`, tokens about to be written: the pages they go to must be reserved
            and have one owner.

    Raises:
        AssertionError: An invariant is broken; the message names it, the slot or page, and the
            numbers.
    """
    table = jax.device_get(table)
    _check_rows(table)
    _check_counts(table, np.zeros_like(table.ref_counts) if held is None else np.asarray(held))
    if new_tokens is not None:
        _check_writable(table, np.asarray(new_tokens))


def _refuse(is_wrong: np.ndarray | jax.Array, describe: Callable[..., str]) -> None:
    """Raises with `describe(*index)` of the first place that is wrong."""
    wrong = np.argwhere(is_wrong)
    if len(wrong):
        raise AssertionError(f"{describe(*wrong[0].tolist())} ({len(wrong)} such)")


def _check_rows(table: BlockTable) -> None:
    rows, num_pages, lengths = table.block_tables, table.num_pages, table.lengths
    max_pages, pool_pages = rows.shape[1], len(table.ref_counts)
    _refuse(
        (num_pages < 0) | (num_pages > max_pages),
        lambda b: f"slot {b} counts {num_pages[b]} pages; a row has room for 0 to {max_pages}",
    )
    _refuse(
        (lengths < 0) | (lengths > num_pages * np.int64(table.page_size)),
        lambda b: (
            f"slot {b} stores {lengths[b]} tokens; its {num_pages[b]} pages of "
            f"{table.page_size} have room for 0 to {num_pages[b] * table.page_size}"
        ),
    )
    _refuse(
        (rows < 0) | (rows >= pool_pages),
        lambda b, m: f"slot {b} names page {rows[b, m]} at {m}; the pool has {pool_pages} pages",
    )
    _refuse(
        (np.arange(max_pages) >= num_pages[:, None]) & (rows != NULL_PAGE),
        lambda b, m: (
            f"slot {b} counts {num_pages[b]} pages, yet names page {rows[b, m]} at {m}; "
            f"entries past the count must be the null page {NULL_PAGE}"
        ),
    )
    in_order = np.sort(rows, axis=1)
    _refuse(
        (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NULL_PAGE),
        lambda b, m: f"slot {b} names page {in_order[b, m]} more than once",
    )


def _check_counts(table: BlockTable, held: np.ndarray) -> None:
    counts = table.ref_counts
    entries = np.bincount(table.block_tables.ravel(), minlength=len(counts))
    entries[NULL_PAGE] = 1  # never free, however many entries name it
    _refuse(
        counts != entries + held,
        lambda p: (
            f"page {p} has a reference count of {counts[p]}, but {entries[p]} table entries "
            f"and {held[p]} other holds name it"
        ),
    )


def _check_writable(table: BlockTable, new_tokens: np.ndarray) -> None:
    rows, lengths, counts = table.block_tables, table.lengths, table.ref_counts
    ends = lengths + new_tokens
    _refuse(
        ends > table.num_pages * table.page_size,
        lambda b: (
            f"slot {b} is about to store {ends[b]} tokens; its {table.num_pages[b]} pages of "
            f"{table.page_size} have room for {table.num_pages[b] * table.page_size}"
        ),
    )
    first_tokens = np.arange(rows.shape[1]) * table.page_size  # of each of a row's pages
    is_written = (first_tokens < ends[:, None]) & (
        first_tokens + table.page_size > lengths[:, None]
    )
    is_written &= (new_tokens > 0)[:, None]
    _refuse(
        is_written & ((rows == NULL_PAGE) | (counts[rows] != 1)),
        lambda b, m: (
            f"slot {b} is about to write page {rows[b, m]} at {m}, which has a reference count "
            f"of {counts[rows[b, m]]}; a page that is written has one owner and is not the null "
            "page"
        ),
    )
