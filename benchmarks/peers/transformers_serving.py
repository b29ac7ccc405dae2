"""Serving with Hugging Face transformers: padded batches, a dynamic cache, greedy `generate`.

Reads a case as JSON from standard input (see `bench_serving.PeerCase`) and prints one line of JSON.
A batch takes the next requests in order, pads their prompts on the left and decodes until its
longest answer is done. Runs in an interpreter that has torch and transformers, which need not have
paxkv.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    case = json.load(sys.stdin)
    torch.set_num_threads(case["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case["folder"], dtype=getattr(torch, case["dtype"])
    ).eval()
    size, prompts, new_tokens = case["batch"], case["prompts"], case["new_tokens"]
    generate(model, prompts[:size], 2)
    begin = time.perf_counter()
    for start in range(0, len(prompts), size):
        generate(model, prompts[start : start + size], max(new_tokens[start : start + size]))
    result = {
        "seconds": time.perf_counter() - begin,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(result))


def generate(model, prompts, new_tokens: int) -> None:
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    is_token = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.tensor(is_token),
            past_key_values=transformers.DynamicCache(config=model.config),
            generation_config=settings,
        )
    assert output.shape[1] == longest + new_tokens


if __name__ == "__main__":
    main()
