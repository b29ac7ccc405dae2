"""What `bench_kernels_static` compiles: decode at one shape, by our kernels and by others."""

from benchmarks.aot import Job
from benchmarks.aot_cases import IMPLEMENTATIONS, attention_job
from benchmarks.aot_peers import ragged_paged_attention_job, tpu_inference_job
from benchmarks.chips import Chip
from paxkv.pallas_kernels.attention_cases import Case

PAGE_SIZES = (16, 64)
TOKENS = 4096  # of each sequence
_JAX_TILE_TOKENS = 256  # above this it spills more than it gains
TPU_INFERENCE_TILE_TOKENS = 2048  # its own choice for such a sequence


def decode_case(page_size: int) -> Case:
    """64 sequences of one new token, at the heads of an 8B Llama 3."""
    return Case(
        lengths=((1, TOKENS),) * 64, num_heads=32, num_kv_heads=8, head_dim=128,
        page_size=page_size, num_rows=64, max_pages=TOKENS // page_size,
    )  # fmt: skip


def prefill_case(page_size: int) -> Case:
    """Two chunks of prompts."""
    return Case(
        lengths=((512, TOKENS),) * 2, num_heads=32, num_kv_heads=8, head_dim=128,
        page_size=page_size,
    )  # fmt: skip


def tile_tokens(name: str) -> int | None:
    """Tokens that a kernel takes at once, where it is a peer's."""
    who = name.split(":")[0]
    return {"jax": _JAX_TILE_TOKENS, "tpu-inference": TPU_INFERENCE_TILE_TOKENS}.get(who)


def jobs(chip: Chip) -> dict[str, Job]:
    """Jobs by `who:what:page size`."""
    found = {}
    for page_size in PAGE_SIZES:
        case = decode_case(page_size)
        implementation = IMPLEMENTATIONS[chip.platform]
        found[f"paxkv:decode:{page_size}"] = attention_job(
            case, max_q_len=1, implementation=implementation
        )
        found[f"paxkv:prefill:{page_size}"] = attention_job(
            prefill_case(page_size), max_q_len=None, implementation=implementation
        )
        if chip.platform == "tpu":
            found[f"jax:decode:{page_size}"] = ragged_paged_attention_job(
                case, tile_tokens=_JAX_TILE_TOKENS
            )
            found[f"tpu-inference:decode:{page_size}"] = tpu_inference_job(
                case, tile_tokens=TPU_INFERENCE_TILE_TOKENS
            )
    return found


def names(platform: str) -> list[str]:
    """The names of `jobs`."""
    peers = ("jax", "tpu-inference") if platform == "tpu" else ()
    whats = [("paxkv", "decode"), ("paxkv", "prefill"), *((peer, "decode") for peer in peers)]
    return [f"{who}:{what}:{size}" for size in PAGE_SIZES for who, what in whats]
