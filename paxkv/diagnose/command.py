"""From the words of a command line to a case, and from a case to what is shown."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from paxkv.diagnose.accelerators import Accelerator, find_memory
from paxkv.diagnose.budget import Budget, make_budget, parse_weights
from paxkv.diagnose.diagnosis import Case, diagnose
from paxkv.diagnose.distributions import DISTRIBUTIONS, sample_trace, with_arrivals
from paxkv.diagnose.known_models import MODELS, find_sizes
from paxkv.diagnose.readers import read_trace
from paxkv.diagnose.report import print_report
from paxkv.diagnose.simulate import STEP_SECONDS
from paxkv.diagnose.trace import Trace, fit_to_context
from paxkv.memory import parse_bytes


def make_case(
    *,
    trace_name: str,
    model: str | None,
    memory: str | None,
    kv_memory: str | None,
    weights: str,
    kv_dtype: str,
    activations: str,
    devices: int,
    page_size: int,
    context: int | None,
    skips_longer: bool,
    concurrency: int,
    rate: float | None,
    step_ms: float | None,
    max_requests: int,
    max_steps: int,
    columns: str | None,
    time_unit: str | None,
) -> Case:
    """What `paxkv diagnose` was asked, with everything looked up.

    Raises:
        ValueError: Something that was named is not there or cannot be.
    """
    if model is None:
        raise ValueError(
            "name the --model that the requests are for: its config.json, or one of "
            f"{', '.join(MODELS)}"
        )
    if (memory is None) == (kv_memory is None):
        raise ValueError("give either --memory, of a device, or --kv-memory, of its KV cache")
    if step_ms is not None and not 0 < step_ms < float("inf"):
        raise ValueError(f"--step-ms {step_ms:g}: a decode step takes more than 0 milliseconds")
    sizes = find_sizes(model)
    weight_bytes, activation_bytes = parse_weights(weights, sizes), parse_bytes(activations)
    accelerator = None
    if memory is not None:
        memory_bytes, accelerator = find_memory(memory)
    else:
        assert kv_memory is not None
        memory_bytes = parse_bytes(kv_memory) + activation_bytes + -(-weight_bytes // devices)
    max_length = context or sizes.max_length
    trace = fit_to_context(
        _find_trace(trace_name, _columns(columns), time_unit, max_requests),
        max_length,
        skips_longer=skips_longer,
    )
    if rate is not None:
        trace = with_arrivals(trace, rate)
    budget = make_budget(
        sizes, memory_bytes=memory_bytes, weight_bytes=weight_bytes,
        activation_bytes=activation_bytes, kv_dtype=kv_dtype, num_devices=devices,
    )  # fmt: skip
    return Case(
        trace=trace,
        sizes=sizes,
        budget=budget,
        max_length=max_length,
        page_size=page_size,
        max_running=concurrency,
        max_steps=max_steps,
        step_seconds=step_ms / 1000 if step_ms else _step_seconds(budget, accelerator),
    )


def report(
    case: Case, *, html: Path | None, plots: Path | None, on_progress: Callable[[str], None]
) -> None:
    """Prints the diagnosis, and writes its pictures.

    Raises:
        ValueError: No request fits, or a file cannot be written.
    """
    if html is not None:
        _check_can_be_written(html)
    found = diagnose(case, on_progress=on_progress)
    print_report(found, Console(highlight=False))
    if html is None and plots is None:
        return
    from paxkv.diagnose.memory_map import map_memory

    on_progress("drawing")
    pages = map_memory(case)
    if html is not None:
        from paxkv.diagnose.html import html_page

        html.write_text(html_page(found, pages), "utf-8")
    if plots is not None:
        from paxkv.diagnose.plots import save_plots

        save_plots(found, pages, plots)


def _find_trace(
    name: str, columns: dict[str, str], time_unit: str | None, max_requests: int
) -> Trace:
    if name in DISTRIBUTIONS:
        return sample_trace(name, num_requests=max_requests)
    if not Path(name).exists():
        raise ValueError(
            f"there is no file {name}: name a trace (CSV or JSON lines), or built-in lengths: "
            f"{', '.join(DISTRIBUTIONS)}"
        )
    return read_trace(name, columns=columns, time_unit=time_unit, max_requests=max_requests)


def _check_can_be_written(file: Path) -> None:
    """Tells before the simulation what would fail after it."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it, such as {file / 'report.html'}")
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} to write {file.name} to: make it first")


def _columns(text: str | None) -> dict[str, str]:
    """What each column is called, from text such as prompt=IN,output=OUT."""
    if not text:
        return {}
    parts = [part.partition("=") for part in text.split(",")]
    if wrong := [key for key, _, name in parts if not name]:
        raise ValueError(f"--columns {text}: {wrong[0]!r} has no name, as in prompt=IN,output=OUT")
    return {key.strip(): name.strip() for key, _, name in parts}


def _step_seconds(budget: Budget, accelerator: Accelerator | None) -> float:
    """A decode step with a full cache reads all weights and all of it."""
    if accelerator is None:
        return STEP_SECONDS
    bytes_per_second = accelerator.bandwidth_gb_per_second * 1e9
    return (budget.weight_bytes + budget.kv_bytes) / bytes_per_second
