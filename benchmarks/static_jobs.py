"""What `bench_kernels_static` compiles: decode at one shape, by our kernels and by others.

Prefill on TPU is not among them: its tiles of queries and keys have no one count.
"""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.aot import Job
from benchmarks.aot_attention import IMPLEMENTATIONS, attention_job
from benchmarks.aot_peers import ragged_paged_attention_job, tpu_inference_job
from benchmarks.aot_reports import Scratch
from benchmarks.chips import Chip
from benchmarks.tile_trips import Step, jax_steps, paxkv_steps, tpu_inference_steps
from paxkv.pallas_kernels.attention_cases import Case

PAGE_SIZES = (16, 64)
TOKENS = 4096  # of each sequence
# As many as its own choice for pages of 16, and the fewest bundles a token: there on v6e, 6.4
# with tiles of 256, 4.9 with 1,024, 4.6 with 2,048.
_JAX_TILE_TOKENS = 2048
_JAX_TILE_QUERIES = 8  # no tile takes fewer, and more multiply more that is masked
_TPU_INFERENCE_TILE_TOKENS = 2048  # its own choice for such a sequence


class Tile(NamedTuple):
    """What a TPU kernel does for a tile of keys and values."""

    kernel: str  # how its name begins
    tokens: int
    steps: tuple[Step, ...]


def decode_case(page_size: int, head_dim: int = 128) -> Case:
    """64 sequences of one new token, at the heads of an 8B Llama 3."""
    return Case(
        lengths=((1, TOKENS),) * 64, num_heads=32, num_kv_heads=8, head_dim=head_dim,
        page_size=page_size, num_rows=64, max_pages=TOKENS // page_size,
    )  # fmt: skip


def prefill_case(page_size: int) -> Case:
    """Two chunks of prompts."""
    return Case(
        lengths=((512, TOKENS),) * 2, num_heads=32, num_kv_heads=8, head_dim=128,
        page_size=page_size,
    )  # fmt: skip


def tile_of(name: str, scratch: Iterable[Scratch]) -> Tile:
    """The tile of one of `jobs` for decode on TPU.

    Args:
        name: Of the job.
        scratch: What its kernels ask for, which says how long ours made its tiles.
    """
    who, _, size = name.split(":")
    page_size = int(size)
    if who == "jax":
        tokens = _JAX_TILE_TOKENS
        steps = jax_steps(
            pages=tokens // page_size, tiles=TOKENS // tokens, sequences=_JAX_TILE_QUERIES
        )
        return Tile("ragged_paged_attention", tokens, steps)
    if who == "tpu-inference":
        tokens = _TPU_INFERENCE_TILE_TOKENS
        steps = tpu_inference_steps(pages=tokens // page_size, tiles=TOKENS // tokens)
        return Tile("RPAd", tokens, steps)  # "RPAm" is that for prefill
    return paxkv_tile(page_size, scratch)


def paxkv_tile(page_size: int, scratch: Iterable[Scratch]) -> Tile:
    """The tile of our decode kernel on TPU, which asks for such memory."""
    shapes = [x.shape for x in scratch if x.space == "vmem"]
    pages = next(shape[2] for shape in shapes if len(shape) == 5 and shape[3] == page_size)
    part_tokens = next(columns for rows, columns in (x for x in shapes if len(x) == 2) if rows == 8)
    tokens = pages * page_size
    steps = paxkv_steps(pages=pages, parts=tokens // part_tokens, tiles=TOKENS // tokens)
    return Tile("paged_decode", tokens, steps)


def jobs(chip: Chip) -> dict[str, Job]:
    """Jobs by `who:what:page size`."""
    found = {}
    for page_size in PAGE_SIZES:
        case = decode_case(page_size)
        implementation = IMPLEMENTATIONS[chip.platform]
        found[f"paxkv:decode:{page_size}"] = attention_job(
            case, max_q_len=1, implementation=implementation
        )
        if chip.platform == "tpu":
            found[f"paxkv:decode_float16:{page_size}"] = attention_job(
                case, max_q_len=1, implementation=implementation, dtype="float16"
            )
            found[f"jax:decode:{page_size}"] = ragged_paged_attention_job(
                case, tile_tokens=_JAX_TILE_TOKENS, tile_queries=_JAX_TILE_QUERIES
            )
            found[f"tpu-inference:decode:{page_size}"] = tpu_inference_job(
                case, tile_tokens=_TPU_INFERENCE_TILE_TOKENS
            )
        else:
            found[f"paxkv:prefill:{page_size}"] = attention_job(
                prefill_case(page_size), max_q_len=None, implementation=implementation
            )
    return found


def names(platform: str) -> list[str]:
    """The names of `jobs`."""
    whats = ["paxkv:decode", "paxkv:decode_float16", "jax:decode", "tpu-inference:decode"]
    if platform == "cuda":
        whats = ["paxkv:decode", "paxkv:prefill"]
    return [f"{what}:{size}" for size in PAGE_SIZES for what in whats]
