"""Named calls of `paged_attention`, on which every implementation is tested and timed.

The list of decode lengths, the ragged pairs and the pairs of heads are those that other engines
and JAX's ragged paged attention are tested on, so that results can be set side by side.
"""

import dataclasses

type Lengths = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The shape and the settings of one call; `paxkv.pallas_kernels.testing` fills it."""

    lengths: Lengths  # (q_len, kv_len) of each sequence; kv_len counts the call's tokens
    num_heads: int = 4  # N
    num_kv_heads: int = 2  # K
    head_dim: int = 64  # H
    page_size: int = 16  # S
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_huge_scores: bool = False  # in the hundreds, where exp(score) is infinite
    num_rows: int | None = None  # T; a few rows of padding more than needed when None
    max_pages: int | None = None  # M; a few columns more than needed when None
    num_pages: int | None = None  # P; a few pages more than needed when None

    @property
    def is_decode(self) -> bool:
        """Whether `max_q_len=1` holds."""
        return all(q_len <= 1 for q_len, _ in self.lengths)


PAGE_SIZES = (1, 8, 16, 128, 256)
HEAD_DIMS = (80, 96, 128, 256)
HEADS = (  # (N, K)
    (32, 8), (32, 16), (16, 2), (4, 4), (8, 1), (12, 2), (5, 1), (3, 3), (9, 3),
    (28, 4), (14, 2), (12, 4), (40, 8), (8, 8),
)  # fmt: skip
WINDOWS = (1, 5, 16)

DECODE_LENGTHS: Lengths = tuple(
    (1, kv_len)
    for kv_len in (
        18, 129, 597, 122, 64, 322, 463, 181, 1107, 123, 31, 18, 1229, 229, 87, 1328
    )
)  # fmt: skip
MIXED_LENGTHS: Lengths = (
    (5, 18), (1, 129), (120, 597), (251, 463), (1, 1107), (3, 1229), (117, 229),
)  # fmt: skip

_SHORT = Case(lengths=(), num_rows=41, max_pages=5, num_pages=20)  # one shape for all below
_SHORT_LENGTHS: dict[str, Lengths] = {
    "decode": ((1, 40), (1, 3), (1, 0), (1, 33), (0, 21), (1, 1), (1, 17)),
    "mixed": ((1, 40), (9, 23), (2, 0), (20, 20), (0, 0), (1, 3), (6, 38)),
    "nothing_stored": ((1, 0), (0, 0), (3, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    "nothing_asked": ((0, 20), (0, 1), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
}
_SETTINGS = {
    "plain": _SHORT,
    "scale": dataclasses.replace(_SHORT, scale=0.3),
    "soft_cap": dataclasses.replace(_SHORT, soft_cap=3.0),
    "sinks": dataclasses.replace(_SHORT, has_sinks=True),
    "huge_scores": dataclasses.replace(_SHORT, has_huge_scores=True, scale=1.0),
    "all_settings": dataclasses.replace(_SHORT, scale=0.2, soft_cap=4.0, has_sinks=True, window=11),
    **{f"window_{window}": dataclasses.replace(_SHORT, window=window) for window in WINDOWS},
}


def _around_a_page(page_size: int) -> dict[str, Case]:
    """Lengths of a page (of some pages, where pages are small), one less and one more."""
    end = max(page_size, 8)
    decode = ((1, 1), (1, end - 1), (1, end), (1, end + 1), (1, 0), (0, 7))
    chunks = ((3, end - 1), (4, end), (5, end + 1), (1, 1), (8, 8), (0, 0))
    return {
        f"{kind}_page_{page_size}": Case(
            lengths=lengths, page_size=page_size, num_rows=24,
            max_pages=end // page_size + 3, num_pages=4 * (end // page_size) + 10,
        )
        for kind, lengths in (("decode", decode), ("chunks", chunks))
    }  # fmt: skip


def _small_cases() -> dict[str, Case]:
    cases = {}
    for page_size in PAGE_SIZES:
        cases |= _around_a_page(page_size)
    for num_heads, num_kv_heads in HEADS:
        cases[f"heads_{num_heads}_{num_kv_heads}"] = Case(
            lengths=((5, 18), (1, 29)), num_heads=num_heads, num_kv_heads=num_kv_heads
        )
    for head_dim in HEAD_DIMS:
        cases[f"head_dim_{head_dim}"] = Case(lengths=((5, 18), (1, 29)), head_dim=head_dim)
    for settings, case in _SETTINGS.items():
        for kind in ("decode", "mixed"):
            lengths = _SHORT_LENGTHS[kind]
            cases[f"{kind}_{settings}"] = dataclasses.replace(case, lengths=lengths)
    for name in ("nothing_stored", "nothing_asked"):
        cases[name] = dataclasses.replace(_SHORT, lengths=_SHORT_LENGTHS[name])
    return cases


SMALL_CASES = _small_cases()  # each a few hundred tokens: quick enough for interpreted kernels

LARGE_CASES = {
    "decode_list": Case(lengths=DECODE_LENGTHS, num_heads=32, num_kv_heads=8, head_dim=128),
    "mixed_list": Case(lengths=MIXED_LENGTHS, num_heads=32, num_kv_heads=8, head_dim=128),
    "decode_list_window_300": Case(lengths=DECODE_LENGTHS, page_size=64, window=300),
    "mixed_list_window_300": Case(lengths=MIXED_LENGTHS, page_size=64, window=300),
    "decode_list_soft_cap_sinks": Case(lengths=DECODE_LENGTHS, soft_cap=5.0, has_sinks=True),
    "mixed_list_soft_cap_sinks": Case(lengths=MIXED_LENGTHS, soft_cap=5.0, has_sinks=True),
    "prefill_pages_of_1": Case(lengths=((300, 300), (130, 650)), page_size=1),
    "prefill_pages_of_256": Case(lengths=((300, 300), (130, 650)), page_size=256),
}

CASES = SMALL_CASES | LARGE_CASES
