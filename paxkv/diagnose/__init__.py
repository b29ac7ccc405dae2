"""What a request trace does to the KV memory, before a model is loaded: `paxkv diagnose`.

A trace (`trace`, `readers`, `distributions`) is replayed (`simulate`) against a pool that a policy
hands out (`contiguous`, `paged`). What comes out is judged (`verdict`) and shown (`report`, `html`,
`plots`); `diagnosis` does all of it in order. `live` follows the log of a running engine.
"""
