"""Decode speed of Hugging Face transformers: a dynamic cache and batched greedy `generate`.

Reads a case as JSON from standard input (see `bench_decode.Case`) and prints one line of JSON.
Runs in an interpreter that has torch and transformers, which need not have paxkv.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


class TokenTimes:
    """A streamer that notes when each step's tokens are known."""

    def __init__(self):
        self.seconds = []

    def put(self, tokens):
        self.seconds.append(time.perf_counter())

    def end(self):
        pass


def main() -> None:
    case = json.load(sys.stdin)
    torch.set_num_threads(case["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case["folder"], dtype=getattr(torch, case["dtype"])
    ).eval()
    prompts = torch.tensor(case["prompts"])
    decode(model, prompts, min(8, case["new_tokens"]))
    runs = [decode(model, prompts, case["new_tokens"]) for _ in range(case["repeats"])]
    result = {
        "seconds": [seconds for seconds, _ in runs],
        "tokens": runs[0][1],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(result))


def decode(model, prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds of `new_tokens` decode steps after the first token, and all tokens."""
    times = TokenTimes()
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens + 1,  # the first comes from prefill
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.inference_mode():
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=transformers.DynamicCache(config=model.config),
            generation_config=settings,
            streamer=times,
        )
    _, first, *_ = times.seconds  # the prompt is put too
    assert len(times.seconds) == new_tokens + 2
    return times.seconds[-1] - first, tokens[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main()
