"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import itertools
import re

import pytest
import torch

from multimodal_gen.kernels.cluster_attention.plan import TILE_ROWS, Groups, cut
from tests.kernels.cases import with_slow
from tests.kernels.compiling import Compiler, needs_gluon, with_oldest

pytestmark = needs_gluon


def compile_for(
    compiler: Compiler, head_size: int, dtype: torch.dtype, *, lse: bool = False
) -> None:
    """Compile what a call takes, and assert that nothing spills."""
    from multimodal_gen.kernels.cluster_attention.cluster_attention_kernel import attend

    x = torch.zeros(1, 4, 640, head_size, dtype=dtype).transpose(1, 2)
    starts = torch.arange(0, 640, 128, dtype=torch.int32).expand(1, 4, -1)
    order = torch.arange(640, dtype=torch.int32).expand(1, 4, -1)
    side = Groups(order=order, starts=starts, counts=torch.full_like(starts, 128))
    keep = torch.ones(1, 4, 5, 5, dtype=torch.bool)
    pieces = cut(side, TILE_ROWS, multiple=64)
    attend(x, x, x, pieces, side, keep, scale=0.1, return_lse=lse)
    # The lists, the attention and, where it has a fixed reference, the redo of flagged tiles.
    assert len(compiler.kernels) == (3 if dtype == torch.bfloat16 else 2)
    compiler.assert_clean()


EVERY_CASE = list(itertools.product((64, 80, 128), (torch.float16, torch.bfloat16)))
# Such values take both references. The oldest release compiles the case of the last test.
NEWEST = [(64, torch.bfloat16)]


@pytest.mark.parametrize(
    ("head_size", "dtype"), with_slow(EVERY_CASE, [] if with_oldest() else NEWEST), ids=str
)
def test_nothing_spills(compiler: Compiler, head_size: int, dtype: torch.dtype) -> None:
    compile_for(compiler, head_size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("head_size", "dtype"), EVERY_CASE, ids=str)
def test_nothing_spills_with_the_log_sum_exp(
    compiler: Compiler, head_size: int, dtype: torch.dtype
) -> None:
    compile_for(compiler, head_size, dtype, lse=True)


def only_with_oldest(case: tuple[int, torch.dtype]) -> list[object]:
    return with_slow([case], [case] if with_oldest() else [])


@pytest.mark.parametrize(("head_size", "dtype"), only_with_oldest((128, torch.bfloat16)), ids=str)
def test_boxes_lie_one_behind_the_other_in_both_halves_of_a_tile(
    compiler: Compiler, head_size: int, dtype: torch.dtype
) -> None:
    """A tile of 64 keys has two halves of 64 channels, 8 KiB each; a box takes 1 KiB of both."""
    compile_for(compiler, head_size, dtype, lse=True)
    ptx = compiler.kernels[1].ptx
    offsets = [int(n) for n in re.findall(r"add\.s32 \t%r\d+, %r\d+, (\d+);", ptx)]
    starts = {n for n in offsets if {n + 1024 * i for i in range(7)} <= set(offsets)}
    assert any({n + 8192 + 1024 * i for i in range(7)} <= set(offsets) for n in starts)
