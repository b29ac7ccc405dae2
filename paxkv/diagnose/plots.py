"""The pictures of a diagnosis as files, by matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paxkv.diagnose.diagnosis import CURVE_BUDGETS, Diagnosis
from paxkv.diagnose.memory_map import MappedPage
from paxkv.diagnose.report import CACHE_NAMES, batch_words
from paxkv.diagnose.simulate import Simulation
from paxkv.diagnose.svg import SEQUENCE_COLOURS
from paxkv.diagnose.tails import MAX_TAIL_PERCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and hatch of each kind: they differ in print and for all kinds of colour vision.
_FILLS = {
    "used": ("#0072b2", ""),
    "reserved": ("#9fd3f2", "..."),
    "internal": ("#ffd480", "////"),
    "external": ("#e6e8eb", "xxx"),
    "free": ("#ffffff", ""),
}
_LINES = {
    "pages": ("#0072b2", "-", "o"),
    "oracle": ("#009e73", "--", "s"),
    "pow2": ("#d55e00", "-.", "D"),
    "max": ("#555555", ":", "x"),
}
_TIME_POINTS = 400
_LEAST_LABELLED = 9  # percent: what has room for a number


def save_plots(diagnosis: Diagnosis, pages: list[MappedPage], folder: Path) -> list[Path]:
    """Writes every picture as a PNG file.

    Returns:
        The files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: install paxkv[plots]") from error
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Axes, Diagnosis], None]] = {
        "caches": _bars,
        "budget": _curve,
        "page_sizes": _tails,
    }
    for name in ("max", "pages"):
        simulation = diagnosis.simulations[name]
        if simulation is not None:
            draw[f"over_time_{name}"] = lambda axes, _, found=simulation: _areas(axes, found)
    if pages:
        draw["memory_map"] = lambda axes, _: _map(axes, pages)
    files = []
    for name, plot in draw.items():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot(figure.subplots(), diagnosis)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _bars(axes: "Axes", diagnosis: Diagnosis) -> None:
    found = {name: sim for name, sim in diagnosis.simulations.items() if sim is not None}
    labels = [
        f"{CACHE_NAMES[name]}\n" + batch_words(s).replace("; ", "\n") for name, s in found.items()
    ]
    left = np.zeros(len(found))
    for kind, (colour, hatch) in _FILLS.items():
        shares = np.array([simulation.shares[kind] for simulation in found.values()])
        bars = axes.barh(labels, shares, left=left, color=colour, hatch=hatch, edgecolor="black",
                         linewidth=0.5, label=kind)  # fmt: skip
        if kind == "used":
            labels_in = [f"{share:.1f} %" if share > _LEAST_LABELLED else "" for share in shares]
            axes.bar_label(bars, labels_in, label_type="center", color="white")
        left += shares
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="percent of the KV memory")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=5, frameon=False)


def _areas(axes: "Axes", simulation: Simulation) -> None:
    steps = np.unique(np.linspace(0, simulation.num_steps - 1, _TIME_POINTS).astype(int))
    below = np.zeros(len(steps))
    for kind, (colour, hatch) in _FILLS.items():
        above = below + 100 * getattr(simulation.account, kind)[steps] / simulation.num_slots
        axes.fill_between(steps, below, above, facecolor=colour, hatch=hatch, edgecolor="black",
                          linewidth=0.3, label=kind)  # fmt: skip
        below = above
    if simulation.duplicate.any():
        copies = 100 * simulation.duplicate[steps] / simulation.num_slots
        axes.plot(steps, copies, color="white", linewidth=1.6)
        axes.plot(steps, copies, color="black", linewidth=1.6, linestyle="--", label="copies below")
    axes.set(xlim=(0, steps[-1]), ylim=(0, 100), xlabel="step", ylabel="percent of the KV memory")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=6, frameon=False)


def _curve(axes: "Axes", diagnosis: Diagnosis) -> None:
    tokens = [diagnosis.case.budget.num_tokens * budget for budget in CURVE_BUDGETS]
    for name, (colour, dash, marker) in _LINES.items():
        axes.plot(tokens, diagnosis.curve[name], color=colour, linestyle=dash, marker=marker,
                  label=CACHE_NAMES[name])  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,.0f}" for count in tokens])
    axes.minorticks_off()
    axes.set(xlabel="tokens of KV memory", ylabel="requests at once", ylim=(0, None))
    axes.legend(frameon=False)


def _tails(axes: "Axes", diagnosis: Diagnosis) -> None:
    percents = diagnosis.tail_percents
    colours = [
        _FILLS["used" if size == diagnosis.recommended_page_size else "reserved"][0]
        for size in percents
    ]
    bars = axes.bar([str(size) for size in percents], list(percents.values()), color=colours,
                    edgecolor="black", linewidth=0.5)  # fmt: skip
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # keeps the line off
    axes.bar_label(bars, fmt="%.2f", padding=2, bbox=behind)
    axes.margins(y=0.1)
    axes.axhline(MAX_TAIL_PERCENT, color="black", linestyle="--", linewidth=1, zorder=0)
    axes.set(xlabel="tokens per page (recommended: dark)", ylabel="tail, percent of what is held")


def _map(axes: "Axes", pages: list[MappedPage], *, columns: int = 44) -> None:
    from matplotlib.patches import Rectangle

    rows = -(-len(pages) // columns)
    for index, page in enumerate(pages):
        x, y = index % columns, index // columns
        colour, hatch = _page_look(page)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, hatch=hatch, edgecolor="white"))
        if page.kind == "own" and page.fill < 1:
            tail = Rectangle((x + page.fill, y), 1 - page.fill, 1, facecolor="white", hatch="/////")
            axes.add_patch(tail)
        if page.kind == "shared":
            axes.plot(x + 0.5, y + 0.5, marker="o", color="white", markersize=2)
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_xlabel(
        "a colour is a request, hatched a tail, dotted a shared prefix, crossed kept, white free"
    )


def _page_look(page: MappedPage) -> tuple[str, str]:
    if page.kind == "own":
        assert page.request is not None
        return SEQUENCE_COLOURS[page.request % len(SEQUENCE_COLOURS)], ""
    return {
        "null": ("#000000", ""),
        "shared": ("#1b1f24", ""),
        "reusable": ("#e6e8eb", "xxx"),
        "free": ("#ffffff", ""),
    }[page.kind]
