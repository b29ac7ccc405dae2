"""What the commands share: options, messages, progress."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import paxkv
from paxkv.memory_trace import MemoryTrace, open_trace

BUNDLED = "SmolLM2-135M-Instruct"  # the model, where none is named

notes = Console(stderr=True, highlight=False, markup=False)  # all but the results themselves

Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder, a .gguf file or a Hugging Face hub id. "
        "(default: SmolLM2-135M-Instruct, where its package is installed)",
        show_default=False,
    ),
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
KVMemory = Annotated[
    str | None,
    typer.Option(
        help='Memory for keys and values, like "512MiB" or "2GB". '
        "(default: a share of what is free, and no more than can be used)",
        show_default=False,
    ),
]
MemoryShare = Annotated[
    float, typer.Option(help="Share of the free memory to take, where --kv-memory names none.")
]
PageSize = Annotated[int, typer.Option(help="Tokens per page.")]
MaxSlots = Annotated[int, typer.Option(min=1, help="Prompts that are served at once.")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Prompt and answer together, in tokens. (default: what the model was made for, up to "
        "4096)",
        show_default=False,
    ),
]


MemoryTraceFile = Annotated[
    Path | None,
    typer.Option(
        "--memory-trace",
        help="Log what the KV memory is used for, step by step, for `paxkv diagnose FILE`, and "
        "`paxkv diagnose --live FILE` meanwhile.",
        show_default=False,
    ),
]


class Refused(typer.BadParameter):
    """What the user asked for cannot be; shown without a traceback."""


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Turns the library's complaints about input into messages without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        # Not wrapped: a path stays in one piece.
        notes.print(Text.assemble(("error: ", "red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from error


def load_llm(model: str | None, **settings) -> "paxkv.LLM":
    """The LLM, behind a progress bar."""
    with progress_bar() as progress:
        task = progress.add_task("loading weights", total=None)
        return paxkv.LLM(
            model,
            **settings,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


@contextlib.contextmanager
def opened_trace(path: Path | None, model: str | None) -> Iterator[MemoryTrace | None]:
    """The log of that name, closed in the end."""
    trace = open_trace(path, model=model or BUNDLED)
    with trace or contextlib.nullcontext():
        yield trace


def progress_bar(*columns) -> Progress:
    """A bar on standard error that leaves nothing behind."""
    shown = [TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn()]
    return Progress(*shown, console=notes, transient=True)


def summary(llm: "paxkv.LLM") -> str:
    """What was done, and how full the memory was, in a line."""
    engine, stats = llm.engine, llm.engine.stats
    prefill = stats.prefill_tokens / max(stats.prefill_seconds, 1e-9)
    decode = stats.decode_tokens / max(stats.decode_seconds, 1e-9)
    share = stats.peak_tokens / engine.capacity
    return (
        f"{stats.prefill_tokens} tokens prefilled at {prefill:.0f}/s, "
        f"{stats.decode_tokens} new tokens at {decode:.1f}/s; "
        f"{stats.peak_pages} of {engine.num_pages} pages used, "
        f"tokens in {share:.1%} of the KV memory; {stats.num_preemptions} preemptions, "
        f"{stats.recomputed_tokens} tokens stored again"
    )
