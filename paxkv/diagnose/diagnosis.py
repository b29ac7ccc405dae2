"""The whole diagnosis: a trace, a model and a memory in, everything that a report shows out."""

import dataclasses
from collections.abc import Callable

from paxkv.diagnose.budget import Budget
from paxkv.diagnose.contiguous import AllocatorName, ContiguousPolicy, Want
from paxkv.diagnose.model_sizes import ModelSizes
from paxkv.diagnose.paged import PagedPolicy
from paxkv.diagnose.policy import Policy
from paxkv.diagnose.prefixes import Reuse, reuse_over_time
from paxkv.diagnose.remedies import Remedy, possible_remedies
from paxkv.diagnose.simulate import Simulation, simulate
from paxkv.diagnose.tails import PAGE_SIZES, recommended_page_size, sampling_percent, tail_percent
from paxkv.diagnose.trace import Trace
from paxkv.diagnose.verdict import Verdict, judge

SAMPLES = (2, 4, 6)
CURVE_BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the KV memory there is
_CURVE_STEPS = 4000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be diagnosed."""

    trace: Trace  # that fits the context
    sizes: ModelSizes
    budget: Budget
    max_length: int  # tokens of one request at most
    page_size: int
    max_running: int  # requests at once
    max_steps: int  # of the simulation, where all requests wait at the first step
    step_seconds: float

    @property
    def block_tokens(self) -> int:
        """Tokens of a block that prompts may begin with; 0 where that is not known."""
        return self.trace.prefixes.block_tokens if self.trace.prefixes else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    case: Case
    verdict: Verdict
    simulations: dict[str, Simulation | None]  # by cache; None where no request fits
    tail_percents: dict[int, float]  # by page size
    recommended_page_size: int
    sampling_percents: dict[int, float]  # by samples per prompt
    reuse_kept: Reuse | None  # with all pages kept for ever; None without known prefixes
    reuse_in_pool: Reuse | None  # with a pool's worth of pages kept
    remedies: list[Remedy]
    curve: dict[str, list[float]]  # requests at once, by cache and `CURVE_BUDGETS`


def caches(case: Case, num_slots: int) -> dict[str, Callable[[], Policy]]:
    """Every kind of cache that is compared, by name, the paged one of `case` being "pages"."""

    def contiguous(want: Want, allocator: AllocatorName = "buddy") -> Callable[[], Policy]:
        return lambda: ContiguousPolicy(
            num_slots, max_length=case.max_length, want=want, allocator=allocator,
            footprint=case.budget.footprint, max_running=case.max_running,
            block_tokens=case.block_tokens,
        )  # fmt: skip

    def paged(*, shares_prefixes: bool) -> Callable[[], Policy]:
        return lambda: PagedPolicy(
            num_slots, page_size=case.page_size, footprint=case.budget.footprint,
            max_running=case.max_running, shares_prefixes=shares_prefixes,
            block_tokens=case.block_tokens,
        )  # fmt: skip

    found: dict[str, Callable[[], Policy]] = {
        "max": contiguous("max"),
        "pow2": contiguous("pow2"),
        "oracle": contiguous("oracle"),
        "first fit": contiguous("oracle", "first-fit"),
        "best fit": contiguous("oracle", "best-fit"),
        "pages": paged(shares_prefixes=False),
    }
    if case.block_tokens and case.block_tokens % case.page_size == 0:
        found["shared pages"] = paged(shares_prefixes=True)
    return found


def diagnose(case: Case, *, on_progress: Callable[[str], None] = lambda what: None) -> Diagnosis:
    """Simulates every cache, and judges.

    Args:
        case: What is to be diagnosed.
        on_progress: Called with what is about to be done.

    Raises:
        ValueError: No request fits in the pool, even in pages.
    """
    simulations: dict[str, Simulation | None] = {}
    for name, make in caches(case, case.budget.num_slots).items():
        on_progress(f"simulating {name}")
        simulations[name] = _run(case, make(), case.trace, case.max_steps)
    pages = simulations["pages"]
    if pages is None:
        raise ValueError(
            f"no request of the trace fits in a KV memory of {case.budget.num_tokens:,} tokens in "
            f"pages of {case.page_size:,}: give it smaller pages, more memory, or a model whose "
            "keys and values are smaller"
        )
    on_progress("comparing page sizes and budgets")
    verdict = judge(
        simulations["max"], pages, page_size=case.page_size, max_length=case.max_length
    )  # fmt: skip
    used_slots = pages.shares["used"] / 100 * case.budget.num_slots
    remedies = possible_remedies(case.budget, case.sizes, used_slots=used_slots)
    key = "requests" if verdict.is_about_memory else "speed"
    has_prefixes = case.trace.prefixes is not None
    return Diagnosis(
        case=case,
        verdict=verdict,
        simulations=simulations,
        tail_percents={size: tail_percent(case.trace, size) for size in PAGE_SIZES},
        recommended_page_size=recommended_page_size(case.trace, case.budget.bytes_per_token),
        sampling_percents={n: sampling_percent(case.trace, n, case.page_size) for n in SAMPLES},
        reuse_kept=reuse_over_time(case.trace) if has_prefixes else None,
        reuse_in_pool=(
            reuse_over_time(case.trace, capacity_tokens=case.budget.num_tokens)
            if has_prefixes
            else None
        ),
        remedies=sorted(remedies, key=lambda remedy: -getattr(remedy, key)),
        curve=_curve(case),
    )


def _run(case: Case, policy: Policy, trace: Trace, max_steps: int) -> Simulation | None:
    """None where no request fits in the pool. A trace with arrival times runs to its end."""
    try:
        return simulate(
            policy,
            trace,
            max_steps=max_steps if trace.arrival_seconds is None else None,
            step_seconds=case.step_seconds,
        )
    except ValueError:
        return None


def _curve(case: Case) -> dict[str, list[float]]:
    """Requests at once by budget, with a queue that never ends."""
    queue = dataclasses.replace(case.trace, arrival_seconds=None)
    curve: dict[str, list[float]] = {"max": [], "pow2": [], "oracle": [], "pages": []}
    for budget in CURVE_BUDGETS:
        found = caches(case, int(case.budget.num_slots * budget))
        for name, series in curve.items():
            simulation = _run(case, found[name](), queue, _CURVE_STEPS)
            series.append(simulation.mean_running if simulation else 0.0)
    return curve
