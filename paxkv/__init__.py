"""paxkv: the paged KV cache for JAX."""
