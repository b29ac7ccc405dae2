"""`paxkv batch`: a file of requests to a file of results."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn

from paxkv.batch import Results, missing, read_requests, run_batch
from paxkv.cli_common import (
    BUNDLED,
    Dtype,
    KVMemory,
    MaxLength,
    MaxSlots,
    MemoryShare,
    MemoryTraceFile,
    Model,
    PageSize,
    errors_told,
    load_llm,
    notes,
    opened_trace,
    progress_bar,
    summary,
)


def batch(
    file: Annotated[
        Path, typer.Argument(help="Requests in OpenAI's batch format, a JSON object per line.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where results go, and where those of an earlier run stand. "
            "(default: FILE with .results.jsonl for its ending)",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    dtype: Dtype = "bfloat16",
    kv_memory: KVMemory = None,
    memory_share: MemoryShare = 0.5,
    page_size: PageSize = 16,
    max_slots: MaxSlots = 32,
    max_length: MaxLength = None,
    memory_trace: MemoryTraceFile = None,
) -> None:
    """Serve a file of requests; run again, it goes on where it was stopped.

    A line is {"custom_id": "a", "method": "POST",
    "url": "/v1/chat/completions", "body": {"messages": [...]}}; the url
    /v1/completions takes a "prompt". Each result is written as soon as its
    request ends, so that Ctrl-C, or a machine that dies, loses only what was
    under way. The exit status is 1 if a request was refused, whose result
    says why; it is not tried again, except into another file of results.

    Examples:
        paxkv batch requests.jsonl
        paxkv batch requests.jsonl --output answers.jsonl --max-slots 64
    """
    output = file.with_suffix(".results.jsonl") if output is None else output
    with errors_told():
        requests = read_requests(file)
        with contextlib.closing(Results(output)) as results:
            if before := len(results.done):
                notes.print(f"{before} results stand in {output} already")
            if left := missing(requests, results):
                with opened_trace(memory_trace, model) as trace:
                    _serve(
                        requests, results, model=model, dtype=dtype, kv_memory=kv_memory,
                        memory_share=memory_share, page_size=page_size, max_length=max_length,
                        max_slots=min(max_slots, len(left)), memory_trace=trace,
                    )  # fmt: skip
            refused = results.num_refused
    told = f", of which {refused} say why there is no answer" if refused else ""
    notes.print(f"{len(requests)} results in {output}{told}")
    if refused:
        raise typer.Exit(1)


def _serve(requests, results: Results, *, model: str | None, **settings) -> None:
    """Runs what is missing."""
    llm = load_llm(model, **settings)
    try:
        with progress_bar(MofNCompleteColumn()) as progress:
            total, before = len(requests), len(results.done)
            task = progress.add_task("serving", total=total, completed=before)
            for ended in run_batch(llm, requests, results, model=model or BUNDLED):
                progress.advance(task)
                if ended.error is not None:
                    notes.print(f"{ended.custom_id} was not served: {ended.error}", style="red")
    except KeyboardInterrupt:
        notes.print(f"\nstopped with {len(results.done)} of {len(requests)} results; run it again")
        raise typer.Exit(130) from None
    finally:
        notes.print(summary(llm), style="dim", soft_wrap=True)
