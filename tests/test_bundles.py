"""Counting the bundles of a TPU kernel: what is in which loop, and how often it runs."""

import pytest

from benchmarks.bundles import UNITS, Region, regions_of
from benchmarks.tile_trips import Step, count

# A loop that starts a copy in all trips, and multiplies in a loop that a branch goes around.
LINES = """
LB: loop body
     0   :  { %s0 = smov.u32 1 }
   0x1 LB: > { %s1 = sadd.s32 %s0, 1 } /* Start region 5 :: Start region 6 */
   0x2   : > { %12 = dma.hbm_to_vmem [thread:$0]  (!%p1), /*hbm=*/%s1 /* for dma.hbm_to_vmem */ }
hlo: kernel.1
 */ }
   0x3   : > { %14 = sbr.rel (%p1) target = $region8 }
   0x4   :  {} /* End region 6 */
   0x5 LB: >> { %v1 = vmatmul %v0 } /* Start region 7 */
   0x6   : >> { %v2 = vadd.f32 %v1, %v1  ;;  %15 = sbr.rel (!%p2) target = $region7 }
   0x7   :  {}
   0x8 PF: > { %v4 = vmov %v2 } /* Start/End empty region 8 */
   0x9   : > { %17 = sbr.rel (!%p0) target = $region5 }
   0xa   :  {}
   0xb PF:  { %s3 = sfence }
"""
NO_USE, MATMUL = (0,) * len(UNITS), (1, *(0,) * (len(UNITS) - 1))
REGIONS = (
    Region(0, False, 0, 2, 0, NO_USE),
    Region(1, True, 1, 7, 1, NO_USE),
    Region(2, False, 5, 0, 0, NO_USE),
    Region(3, True, 5, 3, 0, MATMUL),
)
TILE = Step("tile", 1, 4, multiplies=True)
SEQUENCE = Step("sequence", 0, 1, copies=1, inner=(TILE,))


def test_regions_follow_from_branches():
    use = [MATMUL if number == 5 else NO_USE for number in range(12)]
    assert regions_of(LINES.splitlines(), use, branch_delay=1) == REGIONS
    assert regions_of(LINES.splitlines(), use, branch_delay=4) == REGIONS  # a label ends it sooner


def test_bundles_count_as_often_as_their_loop_runs():
    by_tile, by_sequence = count(REGIONS, (SEQUENCE,))
    assert by_tile == (3, MATMUL)
    assert by_sequence == (7 + 4 * 3, (4, *NO_USE[1:]))


def test_prologue_does_not_count():
    prologue = Region(2, False, 2, 1, 1, NO_USE)
    regions = (*REGIONS[:2], prologue, *REGIONS[2:])
    steps = (SEQUENCE._replace(copies_of_prologue=1),)
    assert count(regions, steps) == count(REGIONS, (SEQUENCE,))
    assert count(regions, (SEQUENCE,))[1].bundles == 1 + 7 + 4 * 3


@pytest.mark.parametrize(
    "steps",
    [
        (SEQUENCE, SEQUENCE),
        (SEQUENCE._replace(inner=()),),
        (SEQUENCE._replace(copies=2),),
        (SEQUENCE._replace(inner=(TILE._replace(multiplies=False),)),),
    ],
    ids=["loop missing", "loop too many", "copies missing", "multiplies"],
)
def test_other_kernel_than_described_raises(steps):
    with pytest.raises(ValueError, match=r"sequence|call|tile"):
        count(REGIONS, steps)
