"""The diagnosis in a terminal: the verdict first, then the figures. 80 columns are enough."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paxkv.diagnose.diagnosis import Diagnosis
from paxkv.diagnose.simulate import Simulation
from paxkv.diagnose.tails import table_percent
from paxkv.memory import format_bytes

CACHE_NAMES = {
    "max": "full rows",
    "pow2": "power-of-2 rows",
    "oracle": "exact rows",
    "first fit": "exact, first fit",
    "best fit": "exact, best fit",
    "pages": "pages",
    "shared pages": "shared pages",
}


def print_report(diagnosis: Diagnosis, console: Console) -> None:
    """Prints everything that was found."""
    console.print(Text(diagnosis.verdict.sentence, style="bold"))
    for table in (
        _memory_table(diagnosis),
        _cache_table(diagnosis),
        _page_size_table(diagnosis),
        _remedy_table(diagnosis),
    ):
        console.print()
        console.print(table)
    console.print()
    for line in [*sharing_lines(diagnosis), *note_lines(diagnosis)]:
        console.print(Text(line))


def memory_lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What the memory is used for."""
    case, budget = diagnosis.case, diagnosis.case.budget
    devices = f" on each of {budget.num_devices} devices" if budget.num_devices > 1 else ""
    return [
        ("memory" + devices, format_bytes(budget.memory_bytes)),
        (f"weights of {case.sizes.name}", format_bytes(budget.weight_bytes)),
        ("activations and the rest", format_bytes(budget.activation_bytes)),
        ("keys and values", format_bytes(budget.kv_bytes)),
        ("  per token", format_bytes(budget.bytes_per_token)),
        ("  tokens", f"{budget.num_tokens:,}"),
        *_window_lines(diagnosis),
    ]


def _window_lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What windows save, for a model that has some."""
    budget, total = diagnosis.case.budget, diagnosis.case.trace.total_tokens
    windows = [window for _, window in budget.footprint.groups if window is not None]
    if not windows:
        return []
    layers = sum(window is not None for window in diagnosis.case.sizes.windows)
    lines = [("  layers with a window", f"{layers} of {len(diagnosis.case.sizes.windows)}")]
    for what, tokens in (("mean", float(total.mean())), ("longest", float(total.max()))):
        lines += [
            (f"  a request of {tokens:,.0f} ({what})", format_bytes(budget.request_bytes(tokens))),
            ("  the same without windows", format_bytes(budget.bytes_per_token * tokens)),
        ]
    return lines


def cache_cells(simulation: Simulation) -> list[str]:
    """A row of figures: percent of the memory by kind, requests at once, what preemption costs."""
    shares = simulation.shares
    kinds = ("used", "reserved", "internal", "external", "free")
    return [
        *(f"{shares[kind]:.1f}" for kind in kinds),
        f"{simulation.mean_running:.1f}",
        f"{simulation.num_preemptions:,}",
        f"{100 * simulation.recomputed_share:.0f} %",
    ]


def batch_words(simulation: Simulation) -> str:
    """What utilisation alone hides: how many run, and what is lost to preemption."""
    if not simulation.num_preemptions:
        return f"{simulation.mean_running:.1f} at once, none preempted"
    return (
        f"{simulation.mean_running:.1f} at once; {simulation.num_preemptions:,} preempted, "
        f"{100 * simulation.recomputed_share:.0f} % redone"
    )


def sharing_lines(diagnosis: Diagnosis) -> list[str]:
    """What shared prefixes would save, in memory now and in work over time."""
    lines = []
    pages = diagnosis.simulations["pages"]
    if diagnosis.reuse_kept and diagnosis.reuse_in_pool and pages:
        of_used = pages.shares["duplicate"] / max(pages.shares["used"], 1e-9)
        lines += [
            f"Prefixes, now: {100 * of_used:.1f} % of the tokens in memory are copies of a prefix "
            "that another running request has; sharing gives them back.",
            f"Prefixes, over time: {diagnosis.reuse_kept.num_reused:,} of "
            f"{diagnosis.reuse_kept.num_blocks:,} prompt blocks "
            f"({diagnosis.reuse_kept.percent:.1f} %) came before, so need not be computed if all "
            f"pages are kept; {diagnosis.reuse_in_pool.percent:.1f} % if no more are kept than "
            "this memory holds.",
        ]
    else:
        lines.append("Prefixes: the trace does not tell which prompts begin alike.")
    samples = ", ".join(f"{n}: {p:.1f} %" for n, p in diagnosis.sampling_percents.items())
    return [*lines, f"Pages saved where several samples share a prompt, by samples: {samples}."]


def note_lines(diagnosis: Diagnosis) -> list[str]:
    """How the figures came about."""
    case = diagnosis.case
    how = "all waiting at the first step"
    if case.trace.arrival_seconds is not None:
        how = f"arriving over {case.trace.arrival_seconds[-1]:,.0f} s, "
        how += f"a step taking {1000 * case.step_seconds:.1f} ms (see --step-ms)"
    lines = [f"Trace: {case.trace.name}, {len(case.trace):,} requests, {how}."]
    lines += [f"Note: {note}." for note in case.trace.notes]
    if case.block_tokens % case.page_size:
        lines.append(
            f"Note: shared pages are not simulated, for a page of {case.page_size} does not divide "
            f"the {case.block_tokens} tokens that an id of the trace stands for."
        )
    for name, simulation in diagnosis.simulations.items():
        cache = CACHE_NAMES[name]
        if simulation is None:
            lines.append(f"Note: no request fits in {cache}.")
        elif simulation.num_refused:
            lines.append(f"Note: {simulation.num_refused:,} requests do not fit in {cache}.")
        if simulation and simulation.is_thrashing:
            lines.append(
                f"Note: {cache} thrash: {simulation.num_preemptions:,} preemptions for "
                f"{simulation.num_completed:,} completed requests."
            )
    return lines


def _memory_table(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for name, size in memory_lines(diagnosis):
        table.add_row(name, size)
    return table


def _cache_table(diagnosis: Diagnosis) -> Table:
    table = Table(
        "cache", "used", "reserved", "internal", "external", "free", "batch", "preempted", "redone",
        title="Percent of the KV memory; requests at once; tokens redone after preemption",
        box=None, padding=(0, 1, 0, 0), title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, simulation in diagnosis.simulations.items():
        label = CACHE_NAMES[name] + (f" of {diagnosis.case.page_size}" if name == "pages" else "")
        table.add_row(label, *(cache_cells(simulation) if simulation else "-" * 8))
    return table


def _page_size_table(diagnosis: Diagnosis) -> Table:
    case = diagnosis.case
    table = Table(
        "page size", "tail, %", "bookkeeping, %", "a page", f"pages for {case.max_length:,}", "",
        title="What a page size costs", box=None, padding=(0, 1, 0, 0), title_justify="left",
    )  # fmt: skip
    for column in table.columns[:5]:
        column.justify = "right"
    for size, tail in diagnosis.tail_percents.items():
        table.add_row(
            str(size), f"{tail:.2f}", f"{table_percent(size, case.budget.bytes_per_token):.5f}",
            format_bytes(size * case.budget.bytes_per_token),
            f"{-(-case.max_length // size):,}",
            "recommended" if size == diagnosis.recommended_page_size else "",
        )  # fmt: skip
    return table


def _remedy_table(diagnosis: Diagnosis) -> Table:
    table = Table(
        "change", "requests at once", "decode steps",
        title="What else would help, by bytes", box=None, padding=(0, 1, 0, 0),
        title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for remedy in diagnosis.remedies:
        table.add_row(remedy.name, f"x {remedy.requests:.2f}", f"x {remedy.speed:.2f} as fast")
    return table
