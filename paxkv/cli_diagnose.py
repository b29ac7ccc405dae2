"""The command `paxkv diagnose`."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paxkv.cli_common import notes


def diagnose(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace of requests: CSV with a header, JSON lines, an OpenAI batch file, or "
            "what --memory-trace wrote; or built-in lengths: sharegpt, azure-conv, azure-code.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A config.json, a folder with one, or a built-in name such as opt-13b or "
            "llama-3.1-8b.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help='Of one device: a size like "40GB", or a name like a100-40gb, h100 or tpu-v5e.',
            show_default=False,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="For keys and values alone, instead of --memory.", show_default=False),
    ] = None,
    weights: Annotated[
        str, typer.Option(help='Their dtype (bf16, fp8, int4, ...), or their size like "26GiB".')
    ] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Of keys and values.")] = "bf16",
    activations: Annotated[
        str, typer.Option(help="Memory kept free for all but weights, keys and values.")
    ] = "2GB",
    devices: Annotated[int, typer.Option(min=1, help="That share weights and KV heads.")] = 1,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 16,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a request may have at most. [default: the model's]",
            show_default=False,
        ),
    ] = None,
    skip_longer: Annotated[
        bool, typer.Option("--skip-longer", help="Leave out requests longer than that.")
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests that may run at once, memory aside.")
    ] = 1024,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, arriving at random. [default: as the trace says, else all "
            "wait from the start]",
            show_default=False,
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds of a decode step. [default: what reading weights and cache takes on "
            "a known accelerator, else 30]",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to read, or to draw.")] = 50_000,
    steps: Annotated[
        int, typer.Option(min=1, help="Decode steps to simulate, where requests have no times.")
    ] = 20_000,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Which columns are which, like prompt=IN,output=OUT,arrival=T.",
            show_default=False,
        ),
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(help="Of arrival times: s, ms, us or ns.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with pictures.", show_default=False)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Write the pictures into this folder as PNG files (needs the extra `plots`).",
            show_default=False,
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Follow the log of a running engine, which --memory-trace writes."
        ),
    ] = False,
) -> None:
    """Find out what the KV memory is used for, before you touch the model.

    A trace of request lengths is replayed against the memory that is left for keys and values,
    with caches of contiguous rows and of pages, and the waste is measured by kind: reserved (to be
    filled yet), internal (never filled), external (gaps that no request fits into), and copies of
    shared prefixes. The first line says which of them hurts, or that memory is not the problem.

    No model is loaded and no accelerator is needed.

    Examples:
        paxkv diagnose sharegpt --model opt-13b --memory a100-40gb

        paxkv diagnose requests.csv --model path/to/config.json --memory 80GB --html report.html

        paxkv diagnose batch_output.jsonl --model llama-3.1-8b --memory l4 --weights int8

        paxkv diagnose engine.jsonl --live
    """
    if live:
        from paxkv.diagnose.live import watch

        with contextlib.suppress(KeyboardInterrupt):
            watch(trace, Console(highlight=False))
        return
    from paxkv.diagnose import command

    with _no_garbage_collection(), notes.status("reading the trace") as status:
        case = command.make_case(
            trace_name=trace, model=model, memory=memory, kv_memory=kv_memory, weights=weights,
            kv_dtype=kv_dtype, activations=activations, devices=devices, page_size=page_size,
            context=context, skips_longer=skip_longer, concurrency=concurrency, rate=rate,
            step_ms=step_ms, max_requests=requests, max_steps=steps, columns=columns,
            time_unit=time_unit,
        )  # fmt: skip
        command.report(case, html=html, plots=plots, on_progress=status.update)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Jax loses a Ctrl-C that comes while garbage is collected, which a simulation has none of."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
