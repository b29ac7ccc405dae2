"""The pictures of a diagnosis as SVG, legible from 350 pixels of width on."""

import math

import numpy as np

from paxkv.diagnose import svg
from paxkv.diagnose.diagnosis import CURVE_BUDGETS, Diagnosis
from paxkv.diagnose.memory_map import MappedPage
from paxkv.diagnose.report import CACHE_NAMES, batch_words
from paxkv.diagnose.simulate import Simulation
from paxkv.diagnose.tails import MAX_TAIL_PERCENT

WIDTH = 400.0
_LEFT, _RIGHT = 34.0, 10.0  # room for the axis, and behind the last point
_TIME_POINTS = 160
_LINES = {  # dashes and markers: lines must differ without colour
    "pages": ("#0072b2", None, "circle"),
    "oracle": ("#009e73", "7 3", "square"),
    "pow2": ("#d55e00", "4 3", "diamond"),
    "max": ("#555555", "1.5 3", "cross"),
}


def bars(diagnosis: Diagnosis) -> str:
    """What the KV memory is used for, one bar per cache: the PagedAttention paper's figure 2."""
    shapes, y = [], 0.0
    for name, simulation in diagnosis.simulations.items():
        shapes.append(svg.text(0, y + 12, CACHE_NAMES[name]))
        if simulation is None:
            shapes.append(svg.text(WIDTH, y + 12, "no request fits", anchor="end"))
            y += 26
            continue
        shapes.append(svg.text(WIDTH, y + 12, batch_words(simulation), anchor="end"))
        shapes.append(_bar(simulation, y + 17))
        y += 46
    words, height = svg.legend(svg.FILLS, y=y + 2, width=WIDTH)
    return svg.picture("use of the KV memory, by cache", WIDTH, y + height + 4, *shapes, *words)


def _bar(simulation: Simulation, y: float) -> str:
    shapes, x = [], 0.0
    for kind, fill in svg.FILLS.items():
        share = simulation.shares[kind]
        width = share / 100 * WIDTH
        title = f"{kind}: {share:.1f} %"
        shapes.append(
            svg.rect(x, y, width, 20, fill, title=title, stroke=svg.INK, stroke_width=0.6)
        )
        if kind == "used" and width > 50:
            shapes.append(svg.text(x + 5, y + 14.5, f"{share:.1f} %", fill="#ffffff"))
        x += width
    return "".join(shapes)


def over_time(simulation: Simulation, what: str) -> str:
    """Areas by kind, step by step; of the used one, a line has below it what is there twice."""
    height, bottom = 150.0, 168.0
    chosen = np.unique(np.linspace(0, simulation.num_steps - 1, _TIME_POINTS).astype(int))
    x = _LEFT + (WIDTH - _LEFT - _RIGHT) * chosen / max(simulation.num_steps - 1, 1)
    below = np.zeros(len(chosen))
    shapes = []
    for kind, fill in svg.FILLS.items():
        above = below + getattr(simulation.account, kind)[chosen] / simulation.num_slots
        edge = [*zip(x, above, strict=True), *reversed(list(zip(x, below, strict=True)))]
        points = " ".join(f"{a:.1f},{10 + height * (1 - b):.1f}" for a, b in edge)
        shapes.append(
            svg.tag("polygon", points=points, fill=fill, stroke=svg.INK, stroke_width=0.4)
        )
        below = above
    if simulation.duplicate.any():
        heights = 10 + height * (1 - simulation.duplicate[chosen] / simulation.num_slots)
        points = list(zip(x.tolist(), heights.tolist(), strict=True))
        shapes.append(svg.line(points, stroke="#ffffff", stroke_width=1.6))
        shapes.append(svg.line(points, stroke=svg.INK, stroke_width=1.6, stroke_dasharray="4 3"))
    for percent in (0, 50, 100):
        shapes.append(
            svg.text(_LEFT - 4, 14 + height * (1 - percent / 100), f"{percent}", anchor="end")
        )
    shapes.append(svg.text(_LEFT, bottom + 8, "step 0"))
    shapes.append(svg.text(WIDTH - _RIGHT, bottom + 8, f"{simulation.num_steps:,}", anchor="end"))
    words, extra = svg.legend(svg.FILLS, y=bottom + 20, width=WIDTH)
    return svg.picture(f"percent of the KV memory over time, {what}", WIDTH, bottom + 22 + extra,
                       *shapes, *words)  # fmt: skip


def against_budget(diagnosis: Diagnosis) -> str:
    """Requests at once, which is output tokens per step, by the size of the KV memory."""
    height, bottom = 170.0, 186.0
    top = max(max(series) for series in diagnosis.curve.values()) * 1.05 or 1.0
    places = np.linspace(_LEFT + 8, WIDTH - _RIGHT - 8, len(CURVE_BUDGETS)).tolist()
    shapes = _value_axis(top, bottom, height)
    for x, budget in zip(places, CURVE_BUDGETS, strict=True):
        tokens = diagnosis.case.budget.num_tokens * budget
        shapes.append(svg.text(x, bottom + 15, _short(tokens), anchor="middle"))
    shapes.append(svg.text(WIDTH / 2, bottom + 32, "tokens of KV memory", anchor="middle"))
    for index, name in enumerate(_LINES):
        heights = [bottom - height * value / top for value in diagnosis.curve[name]]
        shapes += _line(name, list(zip(places, heights, strict=True)))
        x, y = (index % 2) * WIDTH / 2 + 4, bottom + 50 + 18 * (index // 2)
        shapes += _line(name, [(x, y), (x + 34, y)])
        shapes.append(svg.text(x + 42, y + 4, CACHE_NAMES[name]))
    return svg.picture("requests at once by KV memory", WIDTH, bottom + 80, *shapes)


def _line(name: str, points: list[tuple[float, float]]) -> list[str]:
    colour, dash, marker = _LINES[name]
    line = svg.line(points, stroke=colour, stroke_width=2, stroke_dasharray=dash)
    return [line, *(_marker(marker, x, y, colour) for x, y in points)]


def tails(diagnosis: Diagnosis) -> str:
    """Percent of the held memory behind the tokens, by page size."""
    height, bottom = 140.0, 160.0
    percents = diagnosis.tail_percents
    top = max(*percents.values(), MAX_TAIL_PERCENT) * 1.12
    limit = bottom - height * MAX_TAIL_PERCENT / top
    shapes = [
        svg.line([(_LEFT, limit), (WIDTH - _RIGHT, limit)], stroke_dasharray="3 3"),
        svg.text(_LEFT - 4, limit + 4, f"{MAX_TAIL_PERCENT:g} %", anchor="end"),
        svg.text(WIDTH / 2, bottom + 34, "tokens per page (recommended: dark)", anchor="middle"),
    ]
    step = (WIDTH - _LEFT - _RIGHT) / len(percents)
    for index, (size, percent) in enumerate(percents.items()):
        is_best = size == diagnosis.recommended_page_size
        x, bar = _LEFT + step * index, height * percent / top
        fill = svg.FILLS["used" if is_best else "reserved"]
        words, middle = f"{percent:.2f}", x + step / 2
        shapes += [
            svg.rect(x + 6, bottom - bar, step - 12, bar, fill, stroke=svg.INK, stroke_width=0.6),
            svg.rect(middle - 17, bottom - bar - 16, 34, 14, "#ffffff"),  # keeps the line off
            svg.text(middle, bottom - bar - 4, words, anchor="middle"),
            svg.text(middle, bottom + 15, str(size), anchor="middle",
                     font_weight="bold" if is_best else None),
        ]  # fmt: skip
    return svg.picture("tail waste in percent by page size", WIDTH, bottom + 42, *shapes)


def memory_map(pages: list[MappedPage], *, columns: int = 32) -> str:
    """The pool, page by page: colours are requests, white is empty, marks are shared pages."""
    size = WIDTH / columns
    shapes = []
    for index, page in enumerate(pages):
        x, y = size * (index % columns), size * (index // columns)
        shapes.append(_page(page, index, x, y, size))
    rows = math.ceil(len(pages) / columns)
    return svg.picture("pages of the pool by request", WIDTH, rows * size + 1, *shapes)


def _page(page: MappedPage, index: int, x: float, y: float, size: float) -> str:
    border = {"stroke": "#ffffff", "stroke_width": 0.8}
    if page.kind == "null":
        return svg.rect(x, y, size, size, "#000000", title="page 0: the null page", **border)
    if page.kind == "free":
        return svg.rect(x + 0.6, y + 0.6, size - 1.2, size - 1.2, "#ffffff", stroke="#c9ced6",
                        stroke_width=0.6, title=f"page {index}: free")  # fmt: skip
    if page.kind == "reusable":
        return svg.rect(x, y, size, size, "url(#checks)", title=f"page {index}: reusable", **border)
    if page.kind == "shared":
        title = f"page {index}: shared prefix"
        middle = (x + size / 2, y + size / 2)
        return svg.rect(x, y, size, size, svg.INK, title=title, **border) + svg.tag(
            "circle", cx=middle[0], cy=middle[1], r=size / 5, fill="#ffffff"
        )
    assert page.request is not None
    colour = svg.SEQUENCE_COLOURS[page.request % len(svg.SEQUENCE_COLOURS)]
    title = f"page {index}: request {page.request}, {page.fill:.0%} full"
    shapes = svg.rect(x, y, size, size, colour, title=title, **border)
    if page.fill < 1:
        empty = size * (1 - page.fill)
        tail = svg.rect(x + size - empty, y, empty, size, "url(#tail)", title=title, **border)
        shapes += tail
    return shapes


def _value_axis(top: float, bottom: float, height: float) -> list[str]:
    """Lines and numbers at about four round values up to `top`."""
    step = 10 ** math.floor(math.log10(top / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 5)
    shapes = []
    for index in range(int(top / step) + 1):
        y = bottom - height * index * step / top
        shapes.append(svg.line([(_LEFT, y), (WIDTH - _RIGHT, y)], stroke="#d5d9df"))
        shapes.append(svg.text(_LEFT - 4, y + 4, f"{index * step:g}", anchor="end"))
    return shapes


def _marker(shape: str, x: float, y: float, colour: str) -> str:
    if shape == "circle":
        return svg.tag("circle", cx=x, cy=y, r=4, fill=colour)
    if shape == "square":
        return svg.rect(x - 3.5, y - 3.5, 7, 7, colour)
    if shape == "diamond":
        return svg.rect(x - 3.5, y - 3.5, 7, 7, colour, transform=f"rotate(45 {x:.1f} {y:.1f})")
    path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"
    return svg.tag("path", d=path, stroke=colour, stroke_width=2)


def _short(tokens: float) -> str:
    return f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.1f}k"
