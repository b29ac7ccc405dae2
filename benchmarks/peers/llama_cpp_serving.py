"""Serving with llama.cpp: continuous batching over one cache that has room for all requests.

Reads a case as JSON from standard input (see `bench_serving.PeerCase`) and prints one line of JSON.
Prompts are stored one after the other, then all sequences decode together, and those that end
leave the batch. Runs in an interpreter that has llama-cpp-python, which need not have paxkv. The
cache is in float32 for float32 weights and in float16, llama.cpp's default, for 16-bit ones.
"""

import json
import sys
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
from llama_cpp_decode import step

_LENGTH_STEP = 256  # llama.cpp rounds the room for tokens up to this
_MAX_BATCH = 2048  # tokens in one call


def main() -> None:
    case = json.load(sys.stdin)
    model = llama_cpp.llama_model_load_from_file(
        case["gguf"].encode(), llama_cpp.llama_model_default_params()
    )
    context = llama_cpp.llama_init_from_model(model, context_settings(case))
    if not context:
        raise RuntimeError("llama.cpp made no context: its own message is above")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    serve(context, case["prompts"], [2] * len(case["prompts"]), vocab_size)
    begin = time.perf_counter()
    serve(context, case["prompts"], case["new_tokens"], vocab_size)
    result = {
        "seconds": time.perf_counter() - begin,
        "versions": {"llama-cpp-python": llama_cpp.__version__},
    }
    print(json.dumps(result))


def context_settings(case):
    """One room for all sequences together."""
    tokens = sum(map(len, case["prompts"])) + sum(case["new_tokens"])
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = -(-tokens // _LENGTH_STEP) * _LENGTH_STEP
    settings.n_seq_max = len(case["prompts"])
    settings.kv_unified = True
    settings.n_batch = _MAX_BATCH
    settings.n_threads = settings.n_threads_batch = case["num_threads"]
    if case["dtype"] == "float32":
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    return settings


def serve(context, prompts, new_tokens, vocab_size: int) -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(_MAX_BATCH, 0, 1)
    newest = {}
    for sequence, prompt in enumerate(prompts):
        last = len(prompt) - 1
        rows = [(token, place, sequence, place == last) for place, token in enumerate(prompt)]
        [newest[sequence]] = step(context, batch, rows, vocab_size)
    for i in range(1, max(new_tokens)):
        newest = {s: token for s, token in newest.items() if new_tokens[s] > i}
        rows = [(token, len(prompts[s]) + i - 1, s, True) for s, token in newest.items()]
        newest = dict(zip(newest, step(context, batch, rows, vocab_size), strict=True))
    llama_cpp.llama_batch_free(batch)


if __name__ == "__main__":
    main()
