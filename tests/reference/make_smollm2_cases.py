"""What transformers generates with SmolLM2-135M-Instruct: greedy tokens, and how sure they are.

Writes tests/data/smollm2_greedy.json:

    $PAXKV_REFERENCE_PYTHON tests/reference/make_smollm2_cases.py FOLDER

FOLDER is what `export_smollm2.py` wrote. For each prompt there are its token ids, the greedy
tokens (the end-of-text token is one like any other), the gap between the two best logits at each
step, and the largest logits of some steps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
NUM_TOKENS = 64  # new ones, of each prompt
LOGIT_STEPS = (0, 31, 63)  # whose largest logits are stored
NUM_TOP = 8

_LIBRARY = (
    "The town library keeps its oldest books in a cellar where the air is cold and dry. Every "
    "spring two students carry them upstairs, open each one at the middle, and write down which "
    "pages have turned yellow. It takes nine days, and nobody has ever asked them to hurry. "
)
_PAGING = (
    "An operating system divides memory into pages of equal size. A program sees one long row of "
    "addresses, and a table says which page of real memory stands behind each piece of it. Because "
    "all pages are alike, any free one will do, and no gap is ever too small to be used. "
)
_STORM = (
    "When the storm came over the hill, the ferry had just left the pier. The captain looked at "
    "the sky, then at the eleven passengers, then at the rope that still hung over the rail. "
    '"Sit down, all of you," she said, "and hold on to something that does not belong to you." '
)
_RECIPE = (
    "To bake a plain loaf you need 500 grams of flour, 325 grams of water, 10 grams of salt and 3 "
    "grams of dry yeast. Mix them, wait 20 minutes, knead for 8, and let the dough rise for 90. "
    "Shape it, let it rest for 45 minutes more, and bake it at 230 degrees for 35. "
)
_LETTER = (
    "Dear Ms. Okafor, thank you for your letter of 14 March. We have looked into the matter of "
    "the missing umbrella and found that it was sent to the wrong office, where it has been "
    "standing in a corner ever since. It will be on your desk by Thursday at the latest. "
)
_PLANETS = (
    "Mercury has no moon and Venus has none either. Earth has one, Mars has two small ones, and "
    "Jupiter has so many that astronomers are still counting. A moon keeps its path because it "
    "falls towards its planet all the time and always misses it. "
)
_MARKET = (
    "On Saturdays the market opens at six. Farmers from the valley sell carrots, onions, honey and "
    "eggs; a man with a green hat sells nothing but knives. By ten o'clock the square is full, by "
    "one the stalls are gone, and the pigeons walk where the people stood an hour before. "
)
_CLOCK = (
    "The clock in the tower is three minutes slow, and everybody in the street knows it. Trains "
    "are missed by strangers only. Once the council paid for a repair, but so many people came too "
    "early to everything that the clock was set back to its old, familiar time within a week. "
)
_CODE = '''def mean(values):
    """The arithmetic mean of a list of numbers."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    """The population variance of a list of numbers."""
'''

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village between two rivers, there lived a girl who",
    "<|im_start|>user\nWhy do operating systems use pages?<|im_end|>\n<|im_start|>assistant\n",
    "Der Zug nach Hamburg fährt um acht Uhr ab, aber",
    "La bibliothèque est fermée le lundi, parce que",
    "今日はとても天気がいいので、",
    "Question: What is 17 + 25?\nAnswer:",
    "SELECT name, COUNT(*) FROM orders WHERE price > 10 GROUP BY",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "known_for":',
    _CODE,
    _STORM,
    _PAGING + "This is why",
    _RECIPE + _RECIPE[:61],
    "<|im_start|>user\nSum this up in one sentence: "
    + _LETTER
    + "<|im_end|>\n<|im_start|>assistant\n",
    _LIBRARY + _STORM + "\n\nIn short,",
    _PAGING + _PLANETS + _RECIPE,
    _LETTER + _LIBRARY + _PLANETS + _STORM + _PAGING + "\n\nFrom all this we learn that",
    _LIBRARY + _PAGING + _STORM + _RECIPE + _LETTER + _PLANETS + _MARKET + _CLOCK + _CODE,
)  # fmt: skip


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Expected greedy tokens of SmolLM2")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, metavar="FOLDER", default=DATA)
    args = parser.parse_args()
    cases = make_cases(args.folder)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (args.data / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


def make_cases(folder: Path) -> list[dict[str, Any]]:
    """Each prompt's tokens, and what comes after them."""
    import torch  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # transformers loses on the way from GGUF that digits stand alone (see make_tokenizer_cases).
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [_case(model, tokenizer.encode(prompt).ids) for prompt in PROMPTS]


def _case(model: Any, prompt_ids: list[int]) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    token_ids, gaps, largest, cache = [], [], {}, None
    step_ids = prompt_ids
    for step in range(NUM_TOKENS):
        output = model(torch.tensor([step_ids]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits, ids = torch.topk(output.logits[0, -1], NUM_TOP)
        token_ids.append(int(ids[0]))
        gaps.append(round(float(logits[0] - logits[1]), 4))
        if step in LOGIT_STEPS:
            rounded = [round(float(logit), 4) for logit in logits]
            largest[step] = {"token_ids": ids.tolist(), "logits": rounded}
        step_ids = token_ids[-1:]
    return {"prompt_ids": prompt_ids, "token_ids": token_ids, "gaps": gaps, "largest": largest}


if __name__ == "__main__":
    main()
