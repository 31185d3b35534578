"""The kernels compile for SM90 without a GPU, through their launchers: no spills, no warnings.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import itertools

import pytest
import torch

from multimodal_gen.kernels.select.reference import Ranking, Tiles
from tests.kernels.cases import with_slow
from tests.kernels.compiling import Compiler, needs_triton

pytestmark = needs_triton

NUMBERS = torch.zeros(10).int()
TILES = Tiles(NUMBERS, NUMBERS, 64, NUMBERS)


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    with_slow(
        [(64, torch.float32), (128, torch.bfloat16), (256, torch.float32)], [(128, torch.bfloat16)]
    ),
)
def test_pooling_and_the_gated_sum_do_not_spill(
    compiler: Compiler, head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.select.pool_kernel import add_gated, pool_tiles

    x = torch.empty(1, 640, 4, head_size, dtype=dtype)
    (coarse,) = pool_tiles((x,), TILES)
    pool_tiles((x,), TILES, torch.ones(1, 640).bool())
    pool_tiles((x, x), TILES)
    add_gated(x, x, coarse, TILES)
    assert len(compiler.kernels) == 4
    compiler.assert_clean()


# 144 is 128 and the channels in which tiles that hold no key score minus infinity.
KEYS = (300, 1182, 1440, 1800, 5000, 32768)
INPUTS = (
    (64, torch.bfloat16),
    (128, torch.bfloat16),
    (144, torch.bfloat16),
    (144, torch.float32),
    (128, torch.float16),
    (256, torch.bfloat16),
    (128, torch.float32),
    (256, torch.float32),
)
QUICK = [(300, INPUTS[1]), (1182, INPUTS[1])]


@pytest.mark.slow_cases("300-128-dtype1")
@pytest.mark.parametrize(
    ("num_kv", "head_size", "dtype"),
    [
        pytest.param(keys, *given, marks=[] if (keys, given) in QUICK else [pytest.mark.slow])
        for keys, given in itertools.product(KEYS, INPUTS)
    ],
)
def test_selection_does_not_spill(
    compiler: Compiler, num_kv: int, head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    query = torch.empty(1, 2, 64, head_size, dtype=dtype)
    out = torch.empty(1, 2, 64, 34, dtype=torch.int32)
    key = torch.empty(1, 2, num_kv, head_size, dtype=dtype)
    select_tiles(Ranking(query, key, 30, 4, out))
    assert len(compiler.kernels) == 2
    compiler.assert_clean()


# Head size, cells of a tile of queries and of one of keys.
CELLS = [(128, 4, 4), (128, 8, 8), (128, 1, 4), (128, 2, 4), (64, 4, 4), (256, 4, 4), (256, 8, 1)]


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("head_size", "q_cells", "k_cells"), with_slow(CELLS, CELLS[:1]))
def test_scores_of_cells_do_not_spill(
    compiler: Compiler, head_size: int, q_cells: int, k_cells: int, capability: int
) -> None:
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    compiler.driver.capability = capability
    query, key = (
        torch.empty(1, 4, 300 * n, head_size, dtype=torch.bfloat16) for n in (q_cells, k_cells)
    )
    real = tuple(torch.ones(1, 300 * n, dtype=torch.bool) for n in (q_cells, k_cells))
    out = torch.empty(1, 4, 300, 75).int()
    ranking = Ranking(query, key, 75, 0, out, (q_cells, k_cells), real, 0.1)
    select_tiles(ranking, warpgroups=capability == 90)
    assert compiler.names == {"cell_score_kernel", "select_kernel"}
    compiler.assert_clean()


def test_a_thread_holds_all_cells_of_its_tiles(compiler: Compiler) -> None:
    from multimodal_gen.kernels.select.tile_kernel import select_tiles

    cells, real = torch.empty(1, 4, 1200, 128, dtype=torch.bfloat16), torch.ones(1, 1200).bool()
    out = torch.empty(1, 4, 300, 75).int()
    ranking = Ranking(cells, cells, 75, 0, out, (4, 4), (real, real), 0.1)
    select_tiles(ranking, warpgroups=True)
    (scores,) = (kernel for kernel in compiler.kernels if kernel.name == "cell_score_kernel")
    assert "wgmma" in scores.ptx
    assert "shfl" not in scores.ptx


def test_pooling_cells_does_not_spill(compiler: Compiler) -> None:
    from multimodal_gen.kernels.select.pool_kernel import pool_cells

    x = torch.empty(1, 640, 4, 128, dtype=torch.bfloat16)
    pool_cells(x, TILES._replace(tokens=None), 4)
    pool_cells(x, TILES, 4, torch.ones(1, 640).bool())
    compiler.assert_clean()
