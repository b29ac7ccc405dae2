"""The kernels for TPU, interpreted, do what every implementation of paged attention must do."""

from attention_contract import PagedAttentionContract


class TestTpu(PagedAttentionContract):
    implementations = ("tpu",)
