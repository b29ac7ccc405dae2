"""Beam search shares pages: how many fewer there are than if every beam had its own.

    python -m benchmarks.bench_sharing --json sharing.json

SmolLM2-135M-Instruct, the bundled model, answers 50 prompts with beams of width 2, 4 and 6. After
every step it is counted which pages the beams of a prompt name, each with the page that it writes
next: added up, as caches of their own would have them, and each once, as they are. The saving is
over all steps of a search. The PagedAttention paper (SOSP 2023, section 6.3) reports 37.6 to 55.2 %
for prompts of Alpaca and 44.3 to 66.3 % for ShareGPT, on OPT-13B.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import TINY
from benchmarks.common import describe_run, parse_sizes, spread, tell_results
from benchmarks.serving_load import draw_prompts
from paxkv import LLM
from paxkv.cache import PagedCache
from paxkv.models.llama import LlamaDecoder
from paxkv.reservation import reserve
from paxkv.waste import GroupPages, pages_of_slot_groups

_PAPER = {"Alpaca": (0.376, 0.552), "ShareGPT": (0.443, 0.663)}  # of width 2 and of width 6
_PROMPTS = Path(__file__).parent / "beam_prompts.txt"
_TINY_SIZES = {"widths": [2], "prompts": 3, "max_tokens": 6, "page_size": 4, "slots": 4}


@jax.jit(static_argnames="width")
def count_pages(cache: PagedCache, width: int) -> GroupPages:
    """Pages of each prompt's beams, the one that each writes next among them; 0 while none runs."""
    [(_, table)] = cache
    is_live = table.lengths > 0
    table, _, _ = reserve(table, is_live.astype(jnp.int32))
    num_groups = is_live.shape[0] // width
    is_running = jnp.all(is_live[: num_groups * width].reshape(num_groups, width), axis=1)
    return jax.tree.map(lambda x: jnp.where(is_running, x, 0), pages_of_slot_groups(table, width))


@dataclasses.dataclass(slots=True)
class Searches:
    """Pages of every search so far, summed over its steps.

    Those that run side by side begin together and are given back together.
    """

    alone: list[int] = dataclasses.field(default_factory=list)
    shared: list[int] = dataclasses.field(default_factory=list)
    num_running: int = 0  # the last ones of these lists

    def note(self, pages: GroupPages) -> None:
        """Accounts for a step of all searches that run."""
        alone, shared = np.asarray(pages.alone), np.asarray(pages.shared)
        if self.num_running == 0:
            self.num_running = int(np.count_nonzero(alone))
            self.alone += [0] * self.num_running
            self.shared += [0] * self.num_running
        for i in range(self.num_running):
            self.alone[i - self.num_running] += int(alone[i])
            self.shared[i - self.num_running] += int(shared[i])
        if not np.any(alone):
            self.num_running = 0

    def savings(self) -> list[float]:
        """The share of pages that each search saved."""
        return [1 - ours / alone for ours, alone in zip(self.shared, self.alone, strict=True)]


def search(llm: LLM, prompts: Sequence[list[int]], width: int, max_tokens: int) -> Searches:
    """Searches with the engine's own programs, one step at a time, and counts after each."""
    engine, searches = llm.engine, Searches()
    on_cache = engine.on_cache

    def counted(program: Any) -> list[Any]:
        results = on_cache(program)
        [pages] = on_cache(lambda _, cache, __: (cache, count_pages(cache, width)))
        searches.note(pages)
        return results

    with mock.patch.object(engine, "on_cache", counted):
        answers = llm.beam_search(prompts, width=width, max_tokens=max_tokens)
    assert not any(answer.error for its in answers for answer in its)
    return searches


def summarise(width: int, searches: Searches) -> dict[str, Any]:
    """The saving of all searches together, and its range over prompts."""
    return {
        "width": width,
        "prompts": len(searches.alone),
        "saved": 1 - sum(searches.shared) / sum(searches.alone),
        "of_prompts": spread(searches.savings())._asdict(),
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Pages saved by sharing among beams")
    for heading in ("width", "saved", "by prompt: median (lowest to highest)"):
        table.add_column(heading, justify="right")
    for result in results:
        middle, lowest, highest = (f"{value:.1%}" for value in result["of_prompts"].values())
        table.add_row(
            str(result["width"]), f"{result['saved']:.1%}", f"{middle} ({lowest} to {highest})"
        )
    return table


def make_llm(options: argparse.Namespace) -> LLM:
    """The bundled model, or a tiny one of random weights."""
    sizes = {"page_size": options.page_size, "max_slots": options.slots, "max_burst": 1}
    if not options.tiny:
        return LLM(dtype=options.dtype, max_length=256 + options.max_tokens, **sizes)
    decoder = LlamaDecoder(TINY, dtype=jnp.dtype(options.dtype), rngs=nnx.Rngs(0))
    return LLM(decoder, dtype=options.dtype, max_length=64, compilation_cache=False, **sizes)


def prompts_of(llm: LLM, options: argparse.Namespace) -> Iterator[list[int]]:
    """The prompts as a chat, or random ones for a model without a tokenizer."""
    if options.tiny:
        yield from draw_prompts([5, 9, 14], vocab_size=TINY.vocab_size)
        return
    for line in _PROMPTS.read_text().splitlines()[: options.prompts]:
        yield llm.chat_prompt([{"role": "user", "content": line}])


def main() -> None:
    options = parse_options()
    console, llm, results = Console(), make_llm(options), []
    prompts = list(prompts_of(llm, options))
    for width in options.widths:
        searches = search(llm, prompts, width, options.max_tokens)
        results.append(summarise(width, searches))
        console.print(f"width {width}: {results[-1]['saved']:.1%} of the pages saved")
    console.print(table_of(results))
    for trace, (narrow, wide) in _PAPER.items():
        console.print(f"The paper, {trace}: {narrow:.1%} (width 2) to {wide:.1%} (width 6).")
    prompt_tokens = spread([len(prompt) for prompt in prompts])._asdict()
    tell_results(
        "sharing", describe_run(), options, results=results, prompt_tokens=prompt_tokens,
        paper=_PAPER,
    )  # fmt: skip


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 4, 6])
    parser.add_argument("--prompts", type=int, default=50, help="the first ones of the file")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=24, help="beams that run side by side")
    return parse_sizes(parser, _TINY_SIZES)


if __name__ == "__main__":
    main()
