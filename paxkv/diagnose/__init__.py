"""What a request trace does to the KV memory, before a model is loaded: `paxkv diagnose`.

A trace (`trace`, `readers`, `distributions`) is replayed (`simulate`) against a pool that an
allocator hands out (`allocators`, `policies`). What comes out is judged (`verdict`) and shown
(`report`, `html`, `plots`); `diagnosis` does all of it in order.
"""
