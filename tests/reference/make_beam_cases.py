"""What transformers' beam search finds with a tiny random Llama.

Writes tests/data/beam_search.json:

    $PAXKV_REFERENCE_PYTHON tests/reference/make_beam_cases.py

Each case has the prompt, the settings, and for each answer the new tokens and the score.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from make_llama_cases import CASES, DATA, make_tokens, make_weights

TINY = "biases_everywhere"
TINY_EOS = (1, 17)


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Expected answers of beam search")
    parser.add_argument("--data", type=Path, metavar="FOLDER", default=DATA)
    args = parser.parse_args()
    lines = ",\n".join(map(json.dumps, _tiny_cases()))
    (args.data / "beam_search.json").write_text(f'{{"{TINY}": [\n{lines}\n]}}\n')


def _tiny_cases() -> list[dict[str, Any]]:
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CASES[TINY]))
        save_file(make_weights(CASES[TINY]), Path(folder, "model.safetensors"), {"format": "pt"})
        model = _load(folder)
        tokens = make_tokens(CASES[TINY]).tolist()
        choices = itertools.product((2, 4, 6), (0.0, 0.7, 1.0, 2.0), (False, True, "never"))
        return [
            _case(
                model, tokens[: 3 + 2 * (i % 9)], width=width, length_penalty=length_penalty,
                early_stopping=early_stopping, eos_ids=TINY_EOS, max_tokens=20,
            )
            for i, (width, length_penalty, early_stopping) in enumerate(choices)
        ]  # fmt: skip


def _load(folder: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _case(model: Any, prompt_ids: list[int], **settings: Any) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    eos_ids = list(settings["eos_ids"])
    found = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        num_beams=settings["width"],
        num_return_sequences=settings["width"],
        length_penalty=settings["length_penalty"],
        early_stopping=settings["early_stopping"],
        max_new_tokens=settings["max_tokens"],
        eos_token_id=eos_ids,
        pad_token_id=eos_ids[0],
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    lengths = (found.beam_indices >= 0).sum(dim=1)  # -1 past the end
    for tokens, length, score in zip(
        found.sequences[:, len(prompt_ids) :], lengths, found.sequences_scores, strict=True
    ):
        answers.append([tokens[: int(length)].tolist(), round(float(score), 5)])
    return {"prompt_ids": prompt_ids, "settings": settings, "answers": answers}


if __name__ == "__main__":
    main()
