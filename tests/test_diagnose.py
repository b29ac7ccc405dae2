"""The diagnosis: its verdict, its report in 80 columns, its page, and the command."""

import dataclasses
import gc
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers_diagnose import make_case, make_trace, with_blocks
from paxkv.cli import app
from paxkv.diagnose.diagnosis import Diagnosis, diagnose
from paxkv.diagnose.distributions import sample_trace
from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.html import html_page
from paxkv.diagnose.memory_map import map_memory
from paxkv.diagnose.report import print_report


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(make_case())


@pytest.fixture(scope="module")
def found_with_prefixes() -> Diagnosis:
    rng = np.random.default_rng(0)
    trace = make_trace(*[(100, 40)] * 300)
    blocks = [[int(rng.integers(4)), 1000 + i, 2000 + i, 3000 + i] for i in range(300)]
    return diagnose(make_case(with_blocks(trace, blocks, block_tokens=32)))


def shown(diagnosis: Diagnosis, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(diagnosis, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# The verdict.


def test_fragmentation_dominates_in_the_papers_case(found):
    assert found.verdict.kind == "fragmentation" and found.verdict.is_about_memory
    assert "rows of 2,048 tokens run 7.0 requests at once" in found.verdict.sentence
    pages, rows = found.simulations["pages"], found.simulations["max"]
    assert pages is not None and rows is not None
    gain = pages.mean_running / rows.mean_running
    assert f"{gain:.1f} times as many requests" in found.verdict.sentence
    assert found.remedies[0].requests == max(remedy.requests for remedy in found.remedies)


def test_pages_help_little_where_requests_are_as_long_as_rows():
    case = make_case(make_trace(*[(1990, 50)] * 60))
    verdict = diagnose(case).verdict
    assert verdict.kind == "capacity"
    assert "too small, but not fragmented" in verdict.sentence


@pytest.mark.parametrize(("rate", "kind"), [(0.2, "concurrency"), (1.5, "far from full")])
def test_memory_is_not_blamed_where_nobody_waits_for_it(rate, kind):
    trace = sample_trace("sharegpt", num_requests=200, requests_per_second=rate)
    case = make_case(trace)
    case = dataclasses.replace(
        case, budget=dataclasses.replace(case.budget, memory_bytes=120 << 30), step_seconds=0.02
    )
    found = diagnose(case)
    assert found.verdict.kind == kind and not found.verdict.is_about_memory
    assert "Look at the model" in found.verdict.sentence
    assert found.remedies[0].speed == max(remedy.speed for remedy in found.remedies)


@pytest.mark.parametrize(("rate", "kind"), [(0.5, "concurrency"), (12.0, "far from full")])
def test_memory_is_not_blamed_where_pages_end_the_waiting_and_little_else(rate, kind):
    trace = sample_trace("sharegpt", num_requests=800, requests_per_second=rate)
    kv_bytes = (12 if kind == "concurrency" else 130) << 30
    case = make_case(trace)
    budget = dataclasses.replace(case.budget, memory_bytes=(28 << 30) + kv_bytes)
    found = diagnose(dataclasses.replace(case, budget=budget, step_seconds=0.02))
    rows, pages = found.simulations["max"], found.simulations["pages"]
    assert rows is not None and pages is not None
    assert rows.blocked_share > 0.01 and pages.blocked_share == 0
    assert found.verdict.kind == kind
    assert found.verdict.sentence.startswith("With pages, memory is not the limit")
    assert "with full-length rows one waits for it in" in found.verdict.sentence


def test_rows_that_do_not_fit_at_all_are_the_worst_fragmentation():
    found = diagnose(make_case(make_trace(*[(20, 20)] * 50), max_length=20_000))
    assert found.simulations["max"] is None
    assert "not one row of 20,000 tokens fits" in found.verdict.sentence
    assert "no request fits in full rows" in shown(found)


@pytest.mark.parametrize("seconds", [None, [5.0 * i for i in range(3)]])
def test_memory_is_not_blamed_for_rows_that_do_not_fit_where_few_requests_come(seconds):
    found = diagnose(make_case(make_trace(*[(20, 20)] * 3, seconds=seconds), max_length=20_000))
    assert found.simulations["max"] is None and found.verdict.kind == "concurrency"
    assert "although not one row of 20,000 tokens fits" in found.verdict.sentence


def test_a_trace_in_which_hardly_anything_runs_is_not_judged():
    seconds = [60.0 * i for i in range(20)]
    found = diagnose(make_case(make_trace(*[(20, 20)] * 20, seconds=seconds)))
    assert found.verdict.kind == "idle" and not found.verdict.is_about_memory
    assert "Too little runs to judge" in found.verdict.sentence
    assert " 0.0 requests" not in found.verdict.sentence


def test_thrash_is_called_thrash():
    found = diagnose(make_case(make_trace(*[(10, 1500)] * 400), max_steps=4000))
    pages = found.simulations["pages"]
    assert pages is not None and pages.is_thrashing
    assert "thrash:" in found.verdict.sentence and "pages thrash:" in shown(found)


def test_a_pool_too_small_for_any_request_is_refused():
    case = make_case(make_trace((1000, 1000)))
    small = dataclasses.replace(case.budget, memory_bytes=(28 << 30) + 819_200 * 100)
    with pytest.raises(ValueError, match=r"no request of the trace fits in .* 100 tokens"):
        diagnose(dataclasses.replace(case, budget=small))


# The report.


def test_the_report_begins_with_the_verdict_and_fits_80_columns(found, found_with_prefixes):
    for diagnosis in (found, found_with_prefixes):
        text = shown(diagnosis)
        assert text.startswith("Fragmentation dominates")
        assert max(map(len, text.splitlines())) <= 80
        for words in ("pages of 16", "preempted", "recommended", "15,728", "800.0 KiB"):
            assert words in text
        assert "…" not in text


def test_savings_of_prefixes_are_told_now_and_over_time(found, found_with_prefixes):
    assert "does not tell which prompts begin alike" in shown(found)
    text = " ".join(shown(found_with_prefixes).split())
    assert "Prefixes, now:" in text and "296 of 1,200 prompt blocks (24.7 %) came before" in text
    assert "shared pages" in text
    other = dataclasses.replace(found_with_prefixes.case, page_size=24)
    text = shown(dataclasses.replace(found_with_prefixes, case=other))
    assert "a page of 24 does not divide the 32 tokens" in " ".join(text.split())


# The page.


def test_the_page_needs_no_network_and_says_the_verdict_first(found, found_with_prefixes):
    for diagnosis in (found, found_with_prefixes):
        page = html_page(diagnosis, map_memory(diagnosis.case, max_steps=200))
        assert not re.search(r"https?:|src=|@import|<script|<link|url\((?!#)", page)
        body = page[page.index("<body>") :]
        words = re.sub(r"<[^>]*>", " ", body).split()
        assert "Fragmentation dominates" in " ".join(words[:20])
        pictures = re.findall(r"<svg.*?</svg>", page, re.S)
        assert len(pictures) == 7
        for picture in pictures:
            ET.fromstring(picture)
        assert all("aria-label" in picture for picture in pictures[1:])
        assert "nan" not in page.lower().split() and "viewport" in page


def test_names_of_traces_are_not_markup(found):
    case = dataclasses.replace(
        found.case, trace=dataclasses.replace(found.case.trace, name="<b>&[red]")
    )
    diagnosis = dataclasses.replace(found, case=case)
    assert "<b>&[red]" in shown(diagnosis)
    assert "<b>" not in html_page(diagnosis, [])


def test_the_map_shows_every_page_once(found, found_with_prefixes):
    pages = map_memory(found.case, max_steps=300)
    kinds = [page.kind for page in pages]
    assert len(pages) == min(1024, 15_728 // 16) + 1
    assert kinds[0] == "null" and kinds.count("null") == 1 and kinds.count("own") > 800
    pages = map_memory(found_with_prefixes.case, num_pages=60, max_steps=100)
    kinds = {page.kind for page in pages}
    assert {"own", "shared", "reusable"} <= kinds


@pytest.mark.parametrize("windows", [(None, 512), (512, 512)], ids=["some", "all"])
def test_layers_with_windows_are_told_of(windows):
    case = make_case(make_trace(*[(900, 100)] * 40))
    sizes = dataclasses.replace(case.sizes, windows=windows)
    footprint = Footprint.of_layers(windows)
    budget = dataclasses.replace(case.budget, footprint=footprint)
    diagnosis = diagnose(dataclasses.replace(case, sizes=sizes, budget=budget))
    pages = map_memory(diagnosis.case)
    text, page = shown(diagnosis), html_page(diagnosis, pages)
    assert f"layers with a window {windows.count(512)} of 2" in " ".join(text.split())
    assert "a request of 1,000 (mean)" in text and max(map(len, text.splitlines())) <= 80
    assert ("layers that see all tokens" in page) == bool(pages) == (None in windows)


def test_plots_are_written_as_files(found, tmp_path):
    pytest.importorskip("matplotlib")
    from paxkv.diagnose.plots import save_plots

    files = save_plots(found, map_memory(found.case, max_steps=100), tmp_path / "plots")
    assert len(files) == 6 and all(file.stat().st_size > 10_000 for file in files)


# The command.

PAPER = ("--model", "opt-13b", "--memory", "40GiB", "--weights", "26GiB", "--activations", "2GiB")
QUICK = ("--steps", "300", "--requests", "500")


def run(*args):
    return CliRunner().invoke(app, ["diagnose", *map(str, args)], env={"COLUMNS": "80"})


def test_the_command_writes_a_report_and_a_page(tmp_path):
    page = tmp_path / "report.html"
    result = run("sharegpt", *PAPER, *QUICK, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Fragmentation dominates")
    assert "15,728" in result.stdout and page.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_the_command_reads_files_and_names_of_columns(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("when,in,out\n" + "".join(f"{i},{10 + i},20\n" for i in range(40)))
    columns = ("--columns", "prompt=in,output=out,arrival=when")
    result = run(trace, *PAPER, *QUICK, *columns)
    assert result.exit_code == 0, result.output
    assert "Memory is not the limit" in result.stdout
    result = run(trace, "--model", "opt-13b", "--kv-memory", "1GiB", *QUICK, *columns)
    assert result.exit_code == 0 and "1,310" in result.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("no/such.csv", *PAPER), "there is no file no/such.csv: name a trace.*sharegpt"),
        (("EMPTY", *PAPER), "is empty"),
        (("LONG", *PAPER), "1 of 1 requests are longer than the model's context.*--skip-longer"),
        (("LONG", *PAPER, "--skip-longer"), "none of the 1 requests"),
        (("sharegpt", "--model", "opt-13b", "--memory", "24GB"), "weights take.*look at the model"),
        (("sharegpt", "--model", "opt-13b"), "either --memory.*or --kv-memory"),
        (("sharegpt", *PAPER, "--kv-memory", "1GB"), "either --memory.*or --kv-memory"),
        (("sharegpt", *PAPER, "--columns", "prompt"), "'prompt' has no name"),
        (("sharegpt", *PAPER, "--rate", "0"), "rate must be above 0"),
        (("sharegpt", "--memory", "40GB"), "--model"),
        (("sharegpt", *PAPER, "--page-size", "0"), "--page-size"),
        (("SHORT", *PAPER, "--page-size", "20000"), "in pages of 20,000: give it smaller pages"),
        (("SHORT", *PAPER, "--step-ms", "-3"), "--step-ms -3: a decode step takes more than 0"),
        (("SHORT", *PAPER, "--time-unit", "h"), "time unit 'h' is none of s, ms, us, ns"),
        (("SHORT", *PAPER, "--html", "no/such/x.html"), "no folder no/such to write x.html to"),
        (("SHORT", *PAPER, "--html", "."), "is a folder: name a file in it"),
        (("sharegpt", "--model", "SHORT", "--memory", "40GB"), "not JSON, as the config.json of"),
        (("SHORT", "--live"), "is no log of an engine: --live"),
        (("tests", "--live"), "tests is no log of an engine: --live"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(args, told, tmp_path):
    head = "prompt_tokens,output_tokens\n"
    files = {"EMPTY": "", "LONG": head + "3000,10\n", "SHORT": head + "30,10\n"}
    path = tmp_path / "trace.csv"
    path.write_text(next((files[arg] for arg in args if arg in files), ""))
    result = run(*(path if arg in files else arg for arg in args))
    assert result.exit_code == 2 and "Traceback" not in result.output and not result.stdout
    assert re.search(told, " ".join(result.stderr.replace("│", " ").split())), result.stderr


def test_ctrl_c_ends_a_simulation_even_where_it_would_collect_garbage(monkeypatch):
    collects = []

    def interrupted(*args, **kwargs):
        collects.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr("paxkv.diagnose.command.make_case", interrupted)
    assert run("sharegpt", *PAPER).exit_code == 130
    assert collects == [False] and gc.isenabled()


def test_help_teaches():
    text = run("--help").stdout
    for words in ("sharegpt", "--memory", "a100-40gb", "--html", "Examples", "internal"):
        assert words in text
