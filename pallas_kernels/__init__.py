"""Attention over pages, and moving them about. It imports jax and numpy only: usable alone."""

from paxkv.pallas_kernels.attention import paged_attention
from paxkv.pallas_kernels.attention_call import PagedAttention
from paxkv.pallas_kernels.layout import NULL_PAGE

__all__ = ["NULL_PAGE", "PagedAttention", "paged_attention"]
