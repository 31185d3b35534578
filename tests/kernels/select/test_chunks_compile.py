"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import itertools

import pytest
import torch

from multimodal_gen.kernels.select.reference import Tiles
from multimodal_gen.kernels.select.row_reference import ChunkMeans, Rule
from tests.kernels.cases import with_slow
from tests.kernels.compiling import Compiler, assert_clean, needs_triton

pytestmark = needs_triton

RULES = (Rule(topk=2), Rule(threshold=0.25))
# As V-MoBA's settings have it; the others are slow.
QUICK = [(40, 128, RULES[0])]


@pytest.mark.parametrize(
    ("head_size", "indexed"), with_slow([(64, True), (128, False), (256, True)], [(128, False)])
)
def test_means_do_not_spill(compiler: Compiler, head_size: int, indexed: bool) -> None:
    from multimodal_gen.kernels.select.pool_kernel import sum_chunks

    key = torch.empty(1, 640, 4, head_size, dtype=torch.bfloat16)
    starts = torch.zeros(7).int()
    index = torch.zeros(640).int() if indexed else None
    sum_chunks(key, Tiles(starts, starts, 600, index), torch.ones(1, 640).bool())
    assert len(compiler.kernels) == 1
    compiler.assert_clean()


@pytest.mark.parametrize(
    ("num_chunks", "head_size", "rule"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product((7, 24, 40, 72), (64, 128), RULES)
    ],
    ids=str,
)
def test_the_choice_does_not_spill(
    compiler: Compiler, num_chunks: int, head_size: int, rule: Rule
) -> None:
    from multimodal_gen.kernels.select.chunk_kernel import select_chunks

    query = torch.empty(1, 640, 4, head_size, dtype=torch.bfloat16)
    means = torch.empty(1, 4, num_chunks, head_size)
    counts, own = torch.zeros(1, num_chunks).int(), torch.zeros(640).int()
    keep = torch.ones(1, 640).bool()
    chunks = ChunkMeans(means=means, counts=counts, masked=True)
    select_chunks(query, chunks, own, rule, keep)
    assert len(compiler.kernels) == 2
    # Registers are bounded, so that more programs run at once, which is worth a few spills.
    assert_clean(compiler.kernels, 32)
