"""Attention over pages, and moving pages about. Imports jax only, so it can be used alone."""

from paxkv.pallas_kernels.attention import PagedAttention, paged_attention
from paxkv.pallas_kernels.layout import NULL_PAGE

__all__ = ["NULL_PAGE", "PagedAttention", "paged_attention"]
