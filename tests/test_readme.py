"""The README's programs run, and the files that it names are there."""

import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paxkv
from helpers import VOCAB, logits_of, tiny_decoder
from helpers_smollm2 import smollm2_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def sections() -> dict[str, list[tuple[str, str]]]:
    """The language and the text of every fenced block below each heading."""
    found, heading = defaultdict(list), ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^ *```(\w*)\n(.*?)^ *```$", README, re.M | re.S):
        if match[1] is None:
            found[heading].append((match[2], match[3]))
        else:
            heading = match[1]
    return found


PROGRAMS = {
    heading: [text for language, text in blocks if language == "python"]
    for heading, blocks in sections().items()
    if any(language == "python" for language, _ in blocks)
}


def run(heading: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names that a section's blocks define, run in order, one building on the other."""
    names = {} if names is None else names
    for block in PROGRAMS[heading]:
        exec(compile(block, f"README.md: {heading}", "exec"), names)
    return names


def test_every_block_is_a_program_that_a_test_runs_or_no_python():
    """What cannot run here, since it needs a hub, say, stands in a comment and not in a block."""
    assert set(PROGRAMS) == {
        "Use it",
        "In a `jit` of your own",
        "Several answers to one prompt",
        "Serve from a loop of your own",
        "Beam search",
        "Attention kernels",
    }
    languages = {language for blocks in sections().values() for language, _ in blocks}
    assert languages == {"", "python"}
    assert sum(map(len, PROGRAMS.values())) == README.count("```python")


def test_use_it_prints_answers_of_the_bundled_model(monkeypatch, capsys):
    smollm2_path()  # or this is skipped
    # Fewer slots and shorter chunks than by default compile in half the time.
    small = functools.partial(paxkv.LLM, max_slots=4, max_length=512, max_prefill_tokens=16)
    monkeypatch.setattr(paxkv, "LLM", small)
    monkeypatch.setenv("PAXKV_COMPILATION_CACHE", "0")
    names = run("Use it")
    printed = capsys.readouterr().out
    assert printed.startswith(" Paris.") and printed.count(" length\n") == 2
    assert len(names["piece"].completion.text) > 20 and names["piece"].completion.text in printed
    assert printed.endswith(f"{names['score'].perplexity}\n")

    run("Several answers to one prompt", names)
    texts = [sample.text for sample in names["completion"].samples]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)
    assert len(set(texts)) == 3

    run("Beam search", names)
    best, second = names["answers"]
    assert best.score > second.score and best.text != second.text
    assert capsys.readouterr().out == "".join(f"{a.score} {a.text}\n" for a in (best, second))
    check_search(names["search"])


def check_search(search) -> None:
    """Scores are mean log-probabilities, best first, of answers to both prompts."""
    prompts, lengths = jnp.array([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]]), jnp.array([5, 2])
    tokens, counts, scores, fits = search(tiny_decoder(), prompts, lengths)
    assert fits and tokens.shape == (2, 4, 32) and np.all(np.diff(scores, axis=1) < 0)
    for prompt, length, its, count, score in zip(
        prompts, lengths, tokens[:, 0], counts[:, 0], scores[:, 0], strict=True
    ):
        sequence = [*prompt[:length].tolist(), *its[:count].tolist()]
        logprobs = jax.nn.log_softmax(logits_of(tiny_decoder(), sequence))[length - 1 : -1]
        assert score == pytest.approx(float(np.mean(logprobs[np.arange(count), its[:count]])), 1e-4)


def test_a_jit_of_your_own_samples_and_says_how_likely_it_was():
    prompts, lengths = jnp.array([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]]), jnp.array([5, 2])
    rollout = run("In a `jit` of your own")["rollout"]
    tokens, logprobs, counts, fits = rollout(tiny_decoder(), prompts, lengths, jax.random.key(0))
    assert np.all(fits)
    for row, length in enumerate(lengths):
        output = tokens[row, : counts[row]]
        assert counts[row] == 64 or (output[-1] == 2 and counts[row] > 0)
        assert np.all((output >= 0) & (output < VOCAB)) and not np.any(output[:-1] == 2)
        sequence = [*prompts[row, :length].tolist(), *output.tolist()]
        expected = jax.nn.log_softmax(logits_of(tiny_decoder(), sequence, length=128))
        expected = expected[length - 1 : -1][np.arange(len(output)), output]
        np.testing.assert_allclose(logprobs[row, : counts[row]], expected, atol=1e-4)


def test_loop_of_your_own_streams_one_request_beside_another(capsys):
    names = run("Serve from a loop of your own", {"decoder": tiny_decoder(), "paxkv": paxkv})
    first, other = names["first"], names["other"]
    assert len(first.output) == 8 and other.output and not names["engine"].has_work
    assert capsys.readouterr().out.startswith(f"[{first.output[0]}")


def test_files_on_the_map_and_in_the_text_exist():
    [(_, files)] = sections()["Map of the files"]
    named, folder = set(re.findall(r"`([\w.]+/[\w./]+)`", README)), ""
    for line in files.splitlines():
        if start := re.match(r"((?:\w+/)+)", line):
            folder = start[1]
            named.add(folder)
        named.update(folder + name for name in re.findall(r"\w+\.py", line))
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_attention_alone_gives_what_it_says(capsys):
    run("Attention kernels")
    assert capsys.readouterr().out == "(21, 8, 64) (21, 8)\n"
