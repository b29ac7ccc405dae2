"""Writes tests/data/smollm2_tokenizer.json: texts, and the ids that transformers gives them.

    python tests/reference/make_tokenizer_cases.py PATH_OF_SMOLLM2_GGUF

Run by an interpreter that has transformers, not paxkv's own.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "Hello",
    " Hello",
    "Hello, world!",
    "Why do operating systems use pages?",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say it's what we've done; he'd do, we're not.",
    "I'M SURE THEY'LL SAY IT'S WHAT WE'VE DONE",
    "don’t “quote” me — it’s…",
    "antidisestablishmentarianism",
    "0",
    "12345",
    "3.14159, 1,000,000 and 1e-10",
    "2024-02-29T23:59:60Z",
    "x 1  2   3    4",
    "\n 12\n  34\n\t56",
    "007 is 0x7f or 0b111",
    "½ ² Ⅷ ٣ ४ 五",
    "a  b   c    d     e",
    "trailing   ",
    "   leading",
    "\n\n\n",
    "line one\nline two\r\nline three\n\n  indented\n\t\ttabbed",
    "non\u00a0breaking\u2003wide\u3000ideographic\u200bzero",
    "def f(x):\n    return x ** 2  # squared\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    "<div class=\"a\">&amp;</div>\n<!-- -->",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "SELECT * FROM t WHERE a = 'b' AND c <> 3;",
    "\\frac{a}{b} = \\sum_{i=0}^{n} x_i^2",
    "https://example.org/path?q=1&r=%20#frag",
    "user@example.org",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "----- ===== ***** ///// \\\\\\\\\\",
    "!!!???...,,,;;;:::",
    "naïve café résumé façade Ångström",
    "e\u0301 combining a\u0308 marks n\u0303",
    "Größe Straße ÄÖÜ",
    "Здравствуй, мир! Как дела?",
    "你好，世界！今天天气很好。",
    "日本語のテキストと カタカナ ー",
    "한국어 텍스트입니다",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "🙂",
    "🙂🙂a",
    "👍🏽👩‍👩‍👧‍👦🇺🇸❤️",
    "text🙂with🎉emoji 🚀 inside",
    "𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹",
    "\ufffd\ufeff\u202e",
    "\x00\x01\x1f\x7f",
    "<|im_end|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "<|im_end|><|im_end|>  <|im_end|>",
    "<|im_end",
    "<|IM_END|>",
    "<|endoftext|>text<|endoftext|>",
    "<repo_name>x<file_sep>y<filename>z",
    "<jupyter_code>print(1)<jupyter_output>1",
    "<s>not special here</s>",
    "Ġ Ċ ĉ are letters of the byte alphabet",
    "▁ <0x0A> are SentencePiece's",
    "a" * 100,
    " " * 50,
    "\n" * 20,
    "ab" * 64,
]  # fmt: skip
NUM_TEXTS = 200


def make_texts() -> list[str]:
    """The list above, and random mixtures of its parts to make up the number."""
    random_source = random.Random(0)
    texts = list(TEXTS)
    while len(texts) < NUM_TEXTS:
        parts = random_source.choices(TEXTS, k=random_source.randint(2, 4))
        cuts = [sorted(random_source.choices(range(len(part) + 1), k=2)) for part in parts]
        text = "".join(part[start:end] for part, (start, end) in zip(parts, cuts, strict=True))
        if text not in texts:
            texts.append(text)
    return texts


def main() -> None:
    gguf_file = Path(sys.argv[1])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # transformers leaves out of the file's "smollm" that digits stand alone, which the model's own
    # tokenizer.json has; it shows where two spaces or more stand before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    cases = []
    for text in make_texts():
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        cases.append({"text": text, "ids": ids, "decoded": decoded})
    target = Path(__file__).parents[1] / "data" / "smollm2_tokenizer.json"
    target.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()
