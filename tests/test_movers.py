"""Moving tokens and pages: the TPU kernels, interpreted, to the bit as the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import DTYPES
from paxkv.pallas_kernels.movers import copy_pages, put_pages, take_pages, write_tokens
from paxkv.pallas_kernels.testing import assert_same_bits

IMPLEMENTATIONS = ("reference", "tpu", "gpu")
KV_HEADS, HEAD_DIM = 3, 24


def i32(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


def half_poisoned(shape: tuple[int, ...], dtype, seed: int = 0) -> np.ndarray:
    """Random numbers, every other one of them NaN: each bit of a pool must stay what it is."""
    rng = np.random.default_rng(seed)
    numbers = np.where(rng.random(shape) < 0.5, np.nan, rng.normal(size=shape))
    return numbers.astype(jnp.dtype(dtype))


def call(mover, implementation: str | None, *arrays) -> jax.Array:
    """The mover's result; a TPU kernel is interpreted, and a race in it raises."""
    return mover(
        *map(jnp.asarray, arrays), implementation=implementation, interpret=implementation == "tpu"
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestMovers:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("page_size", "num_tokens"), [(8, 21), (32, 60)])
    def test_tokens_land_in_their_slots_and_nowhere_else(
        self, implementation, page_size, num_tokens, dtype
    ):
        """Shuffled slots, many of them in one tile; every fourth token is to be dropped."""
        pages = half_poisoned((6, KV_HEADS, page_size, HEAD_DIM), DTYPES[dtype])
        slots = np.random.default_rng(1).permutation(6 * page_size)[:num_tokens]
        page_ids, offsets = slots // page_size, slots % page_size
        page_ids[::4] = 6 + np.arange(num_tokens)[::4]
        tokens = half_poisoned((num_tokens, KV_HEADS, HEAD_DIM), DTYPES[dtype], seed=2)
        right = pages.copy()
        is_kept = page_ids < 6
        right[page_ids[is_kept], :, offsets[is_kept]] = tokens[is_kept]
        found = call(
            write_tokens, implementation, pages, page_ids.astype(np.int32),
            offsets.astype(np.int32), tokens,
        )  # fmt: skip
        assert_same_bits(found, right)

    def test_consecutive_tokens_land_across_blocks_of_the_grid(self, implementation, monkeypatch):
        if implementation == "tpu":
            from paxkv.pallas_kernels import tpu_movers

            monkeypatch.setattr(tpu_movers, "_MAX_BLOCK_TOKENS", 16)
        pages = half_poisoned((7, 1, 16, HEAD_DIM), jnp.bfloat16)
        tokens = half_poisoned((45, 1, HEAD_DIM), jnp.bfloat16, seed=2)
        position = np.arange(5, 50, dtype=np.int32)
        page_ids = np.array([5, 1, 6, 2], np.int32)[position // 16]
        right = pages.copy()
        right[page_ids, :, position % 16] = tokens
        write = jax.jit(functools.partial(call, write_tokens, implementation))
        assert_same_bits(write(pages, page_ids, position % 16, tokens), right)

    def test_tokens_are_rounded_to_the_dtype_of_the_pages(self, implementation):
        pages = np.zeros((2, 1, 8, HEAD_DIM), jnp.bfloat16)
        tokens = np.full((1, 1, HEAD_DIM), 1.001, np.float32)
        found = call(write_tokens, implementation, pages, i32(1), i32(3), tokens)
        np.testing.assert_array_equal(found[1, 0, 3], 1)

    def test_copies_read_all_sources_before_they_write(self, implementation):
        pages = half_poisoned((40, KV_HEADS, 8, HEAD_DIM), jnp.float32)
        source = np.random.default_rng(3).permutation(40)[:33].astype(np.int32)
        target = np.random.default_rng(4).permutation(40)[:33].astype(np.int32)
        target[::5] = 40 + np.arange(33)[::5]
        right = pages.copy()
        right[target[target < 40]] = pages[source[target < 40]]
        assert_same_bits(call(copy_pages, implementation, pages, source, target), right)

    @pytest.mark.parametrize("page_size", [1, 8])
    def test_pages_taken_and_put_back_are_the_same(self, implementation, page_size):
        pages = half_poisoned((40, KV_HEADS, page_size, HEAD_DIM), jnp.bfloat16)
        page_ids = np.random.default_rng(3).permutation(40)[:33].astype(np.int32)
        page_ids[::5] = 40 + np.arange(33)[::5]
        taken = call(take_pages, implementation, pages, page_ids)
        right = np.zeros((33, *pages.shape[1:]), pages.dtype)
        right[page_ids < 40] = pages[page_ids[page_ids < 40]]
        assert_same_bits(taken, right)
        lost = np.full_like(pages, np.nan)
        right = lost.copy()
        kept = page_ids[page_ids < 40]
        right[kept] = pages[kept]
        assert_same_bits(call(put_pages, implementation, lost, page_ids, taken), right)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_that_name_no_page_move_nothing(implementation):
    pages = half_poisoned((4, KV_HEADS, 8, HEAD_DIM), jnp.float32)
    ids, zeros = i32(-1, 4, -(2**31), 2**31 - 1), jnp.zeros((4, *pages.shape[1:]))
    assert_same_bits(call(take_pages, implementation, pages, ids), zeros)
    for changed in (
        call(put_pages, implementation, pages, ids, zeros),
        call(copy_pages, implementation, pages, i32(0, 1, 2, 3), ids),
        call(write_tokens, implementation, pages, ids, i32(0, 1, 2, 3), zeros[:, :, 0]),
    ):
        assert_same_bits(changed, pages)


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, None))
def test_nothing_to_move_is_no_error(implementation):
    pages, none = half_poisoned((4, KV_HEADS, 8, HEAD_DIM), jnp.float32), jnp.zeros(0, jnp.int32)
    taken = call(take_pages, implementation, pages, none)
    assert taken.shape == (0, *pages.shape[1:])
    assert_same_bits(call(put_pages, implementation, pages, none, taken), pages)
    assert_same_bits(call(copy_pages, implementation, pages, none, none), pages)
    assert_same_bits(call(write_tokens, implementation, pages, none, none, taken[:, :, 0]), pages)


def test_too_few_heads_or_pages_are_refused():
    pages = jnp.zeros((3, 2, 8, 16))
    with pytest.raises(ValueError, match=r"tokens must be \(1, 2, 16\).*found \(1, 1, 16\)"):
        write_tokens(pages, i32(1), i32(0), jnp.ones((1, 1, 16)))
    with pytest.raises(
        ValueError, match=r"contents must be \(2, 2, 8, 16\).*found \(1, 2, 8, 16\)"
    ):
        put_pages(pages, i32(1, 2), pages[:1])


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='cpu' is not one of 'reference'"):
        take_pages(jnp.zeros((1, 1, 1, 1)), i32(0), implementation="cpu")  # pyright: ignore


def test_page_of_less_than_a_tile_has_no_tpu_kernel_and_takes_the_reference():
    pages, tokens = jnp.zeros((2, 1, 4, 8)), jnp.ones((1, 1, 8))
    with pytest.raises(ValueError, match="pages hold 4 tokens"):
        write_tokens(pages, i32(1), i32(3), tokens, implementation="tpu")
    assert write_tokens(pages, i32(1), i32(3), tokens)[1, 0, 3, 0] == 1


MOVES = {
    "write_tokens": lambda pages: write_tokens(pages, i32(3), i32(1), jnp.ones((1, 1, 8))),
    "copy_pages": lambda pages: copy_pages(pages, i32(1), i32(2)),
    "put_pages": lambda pages: put_pages(pages, i32(1, 4), jnp.ones((2, *pages.shape[1:]))),
}


@pytest.mark.parametrize("name", MOVES)
def test_donated_pool_is_updated_in_place(name):
    pages = jnp.zeros((4, 1, 8, 8))
    place = pages.unsafe_buffer_pointer()
    assert jax.jit(MOVES[name], donate_argnums=0)(pages).unsafe_buffer_pointer() == place


@pytest.mark.parametrize(
    ("page_size", "dtype", "what"),
    [(24, jnp.bfloat16, "24 tokens"), (40, jnp.bfloat16, "40 tokens"), (16, jnp.int8, "int8")],
)
def test_tpu_kernel_refuses_pages_that_do_not_split_into_tiles(page_size, dtype, what):
    pages = jnp.zeros((3, 2, page_size, 128), dtype)
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=what):
        write_tokens(pages, one, one, pages[:1, :, 0], implementation="tpu", interpret=True)
