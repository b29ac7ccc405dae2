"""What a model needs, and what fits in the memory there is."""

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from paxkv.config import page_bytes
from paxkv.memory import format_bytes, free_bytes, parse_bytes
from paxkv.models.bundled import name_or_bundled
from paxkv.models.load import checked_dtype, open_model

_PAGE_SIZES = (8, 16, 32, 64, 128)
_EXAMPLE_LENGTH = 1024  # tokens


def print_info(model: str | None, *, dtype: str, kv_memory: str | None) -> None:
    """Prints a model's sizes and a table of how many tokens fit at which page size.

    Raises:
        ValueError: The model cannot be read.
    """
    path = name_or_bundled(model)
    config = open_model(path).config
    size = checked_dtype(dtype).itemsize
    free = free_bytes()
    weights = config.weight_bytes(size)
    memory = parse_bytes(kv_memory) if kv_memory else max(free - weights, 0)
    console = Console(highlight=False)
    console.print(f"[bold]{path}[/bold]", soft_wrap=True)
    console.print(
        f"{config.num_layers} layers, {config.num_heads} query and {config.num_kv_heads} KV heads "
        f"of {config.head_dim}, vocabulary {config.vocab_size}, "
        f"made for {config.max_position} tokens"
    )
    if config.windowed_layers:
        console.print(
            f"sliding window: {len(config.windowed_layers)} of the layers see "
            f"{config.window} tokens"
        )
    console.print(f"weights: {config.num_parameters:,} numbers, {format_bytes(weights)} in {dtype}")
    console.print(f"KV cache: {format_bytes(config.kv_bytes_per_token(size))} per token in {dtype}")
    console.print(
        f"memory for it: {format_bytes(memory)}"
        + ("" if kv_memory else f", of {format_bytes(free)} free on {jax.devices()[0].platform}")
    )
    console.print(_page_table(config.layer_groups, dtype, memory))


def _page_table(layer_groups, dtype: str, memory: int) -> Table:
    table = Table("page size", "bytes per page", "pages", "tokens", f"x {_EXAMPLE_LENGTH} tokens")
    for page_size in _PAGE_SIZES:
        each = page_bytes(layer_groups, page_size=page_size, dtype=jnp.dtype(dtype))
        pages = max(memory // each - 1, 0)  # the null page serves nobody
        requests = pages // -(-_EXAMPLE_LENGTH // page_size)
        table.add_row(
            str(page_size), format_bytes(each), f"{pages:,}", f"{pages * page_size:,}",
            f"{requests:,} requests",
        )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    return table
