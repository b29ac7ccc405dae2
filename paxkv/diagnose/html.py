"""The diagnosis as one page: no network, no script; it opens from disk and prints."""

import itertools
from html import escape

from paxkv.diagnose import charts
from paxkv.diagnose.diagnosis import Diagnosis
from paxkv.diagnose.memory_map import MappedPage
from paxkv.diagnose.report import (
    CACHE_NAMES,
    batch_words,
    cache_cells,
    memory_lines,
    note_lines,
    sharing_lines,
)
from paxkv.diagnose.svg import PATTERNS

_STYLE = """
body { margin: 0 auto; max-width: 1120px; padding: 16px; color: #1b1f24; background: #fff;
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.05rem; font-weight: 600; color: #57606a; margin: 0 }
.verdict { font-size: 1.35rem; line-height: 1.4; font-weight: 600; margin: 8px 0 24px }
h2 { font-size: 1.1rem; margin: 24px 0 8px }
.grid { display: grid; gap: 24px 48px; margin-top: 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
figure { margin: 0 } figcaption { color: #57606a; margin-bottom: 8px }
.grid h2 { margin-top: 8px }
svg { display: block; width: 100%; height: auto; font-family: inherit }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 0.9rem }
th, td { padding: 3px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #d5d9df }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.wraps th, .wraps td:first-child { white-space: normal } .wraps td:first-child { min-width: 11em }
p { margin: 6px 0; max-width: 75ch }
@media (max-width: 640px) { table { font-size: 0.75rem } th, td { padding: 3px 3px } }
"""


def html_page(diagnosis: Diagnosis, pages: list[MappedPage]) -> str:
    """The whole page.

    Args:
        diagnosis: What was found.
        pages: A snapshot of the pool, see `map_memory`; may be empty.
    """
    body = [
        PATTERNS,
        "<h1>paxkv diagnose: what the KV memory is used for</h1>",
        f'<p class="verdict">{_prose(diagnosis.verdict.sentence)}</p>',
        f'<div class="grid">{_bars(diagnosis)}<div>{_memory(diagnosis)}</div></div>',
        _caches(diagnosis),
        f'<div class="grid">{"".join(_figures(diagnosis, pages))}'
        f"<div>{_remedies(diagnosis)}</div></div>",
        "<h2>Sharing, and where the figures come from</h2>",
        *(f"<p>{_prose(words)}</p>" for words in sharing_lines(diagnosis) + note_lines(diagnosis)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KV memory: {escape(diagnosis.case.trace.name)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _figures(diagnosis: Diagnosis, pages: list[MappedPage]) -> list[str]:
    found = []
    for name in ("max", "pages"):
        simulation = diagnosis.simulations[name]
        if simulation is not None:
            found.append(
                _figure(
                    f"Over time: {CACHE_NAMES[name]}",
                    f"Percent of the KV memory, step by step. {batch_words(simulation)}."
                    + (" Below the dashed line: copies." if simulation.duplicate.any() else ""),
                    charts.over_time(simulation, name),
                )
            )
    found.append(
        _figure(
            "More memory, or less",
            "Requests at once, which are output tokens per step, by KV memory.",
            charts.against_budget(diagnosis),
        )
    )
    found.append(
        _figure(
            "Page size",
            "Percent of the memory held in pages that lies behind the tokens.",
            charts.tails(diagnosis),
        )
    )
    if pages:
        footprint = diagnosis.case.budget.footprint
        is_part = footprint.full_shares < footprint.shares
        found.append(
            _figure(
                "Memory map",
                f"{len(pages):,} pages of {diagnosis.case.page_size} tokens, in order. A colour is "
                "a request; hatched is a tail; a white dot marks a shared prefix; crossed is kept "
                "for reuse; white is free. Page 0 is never handed out."
                + (" These are the layers that see all tokens." if is_part else ""),
                charts.memory_map(pages),
            )
        )
    return found


def _figure(title: str, caption: str, picture: str) -> str:
    words = f"<figcaption>{_prose(caption)}</figcaption>"
    return f"<figure><h2>{escape(title)}</h2>{words}{picture}</figure>"


def _prose(words: str) -> str:
    """Text that does not part a number from its percent sign."""
    return escape(words).replace(" %", "\u00a0%")


def _bars(diagnosis: Diagnosis) -> str:
    return _figure(
        "Where the memory goes", "Percent of the KV memory, on average.", charts.bars(diagnosis)
    )


def _memory(diagnosis: Diagnosis) -> str:
    return "<h2>The memory</h2>" + _table([], memory_lines(diagnosis))


def _caches(diagnosis: Diagnosis) -> str:
    head = (
        "cache", "used", "reserved", "internal", "external", "free", "batch", "preempted",
        "redone",
    )  # fmt: skip
    rows = [
        (CACHE_NAMES[name], *cache_cells(simulation))
        for name, simulation in diagnosis.simulations.items()
        if simulation is not None
    ]
    words = "In figures: percent of the KV memory, requests at once, tokens redone after preemption"
    return f"<h2>{words}</h2>" + _table(head, rows)


def _remedies(diagnosis: Diagnosis) -> str:
    rows = [
        (remedy.name, f"x {remedy.requests:.2f}", f"x {remedy.speed:.2f}")
        for remedy in diagnosis.remedies
    ]
    title = "<h2>What else would help, estimated from bytes</h2>"
    return title + _table(("change", "requests at once", "decode speed"), rows, kind="wraps")


def _table(head, rows, *, kind: str = "") -> str:
    lines = itertools.chain(
        [_row("th", head)] if head else [], (_row("td", cells) for cells in rows)
    )
    return f'<div class="scroll"><table class="{kind}">{"".join(lines)}</table></div>'


def _row(name: str, cells) -> str:
    return "<tr>" + "".join(f"<{name}>{escape(cell)}</{name}>" for cell in cells) + "</tr>"
