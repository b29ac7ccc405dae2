"""Decode speed of llama.cpp: parallel sequences in one batch, greedy.

Reads a case as JSON from standard input (see `bench_decode.Case`) and prints one line of JSON.
Runs in an interpreter that has llama-cpp-python, which need not have paxkv. The cache is in
float32 for float32 weights and in float16, llama.cpp's default, for 16-bit ones.
"""

import json
import sys
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

_LENGTH_STEP = 256  # llama.cpp rounds the room of a sequence up to this


def main() -> None:
    case = json.load(sys.stdin)
    model = llama_cpp.llama_model_load_from_file(
        case["gguf"].encode(), llama_cpp.llama_model_default_params()
    )
    context = llama_cpp.llama_init_from_model(model, context_settings(case))
    if not context:
        raise RuntimeError("llama.cpp made no context: its own message is above")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    decode(context, case["prompts"], min(8, case["new_tokens"]), vocab_size)
    runs = [
        decode(context, case["prompts"], case["new_tokens"], vocab_size)
        for _ in range(case["repeats"])
    ]
    result = {
        "seconds": [seconds for seconds, _ in runs],
        "tokens": runs[0][1],
        "versions": {"llama-cpp-python": llama_cpp.__version__},
    }
    print(json.dumps(result))


def context_settings(case):
    """Room for every sequence, each in a stream of its own."""
    num_sequences, length = len(case["prompts"]), len(case["prompts"][0]) + case["new_tokens"]
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = num_sequences * -(-length // _LENGTH_STEP) * _LENGTH_STEP
    settings.n_seq_max = num_sequences
    settings.n_threads = settings.n_threads_batch = case["num_threads"]
    if case["dtype"] == "float32":
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    return settings


def decode(context, prompts, new_tokens: int, vocab_size: int) -> tuple[float, list[list[int]]]:
    """Seconds of `new_tokens` decode steps after the first token, and all tokens."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(max(len(prompts), len(prompts[0])), 0, 1)
    first = []
    for sequence, prompt in enumerate(prompts):
        last = len(prompt) - 1
        rows = [(token, place, sequence, place == last) for place, token in enumerate(prompt)]
        first.append(step(context, batch, rows, vocab_size)[0])
    steps = [first]
    begin = time.perf_counter()
    for i in range(new_tokens):
        position = len(prompts[0]) + i
        rows = [(token, position, sequence, True) for sequence, token in enumerate(steps[-1])]
        steps.append(step(context, batch, rows, vocab_size))
    seconds = time.perf_counter() - begin
    llama_cpp.llama_batch_free(batch)
    return seconds, [list(tokens) for tokens in zip(*steps, strict=True)]


def step(context, batch, rows, vocab_size: int) -> list[int]:
    """Runs (token, position, sequence, wants its logits) rows; the best token of each wanted."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wants_logits) in enumerate(rows):
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = wants_logits
    if status := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")
    num_wanted = sum(wants_logits for *_, wants_logits in rows)
    logits = np.ctypeslib.as_array(
        llama_cpp.llama_get_logits(context), shape=(num_wanted, vocab_size)
    )
    return np.argmax(logits, axis=1).tolist()


if __name__ == "__main__":
    main()
