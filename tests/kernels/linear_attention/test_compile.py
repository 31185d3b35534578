"""The kernels compile for SM90 without a GPU, through their launchers, and spill little.

A stand-in driver answers for the GPU, so what is compiled is what a launch would compile.
test_children.py runs these tests in a process of their own.
"""

import itertools

import pytest
import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import (
    FEATURE_MAPS,
    KeyState,
    Projection,
    Target,
)
from tests.kernels.compiling import Compiler, assert_clean, needs_triton

pytestmark = needs_triton

# Some registers of the pass over the keys may be: fewer warps are worth more than that.
FEW = 384

HALVES = [torch.bfloat16, torch.float16]
HEAD_SIZES = (64, 80, 128, 256)


def state(head_size: int) -> KeyState:
    return KeyState(
        moments=torch.zeros(1, 2, head_size, head_size), sums=torch.zeros(1, 2, head_size)
    )


def projection(head_size: int) -> Projection:
    return Projection(weight=torch.zeros(head_size, head_size), bias=torch.zeros(head_size))


QUICK = [(128, "softmax", True)]


@pytest.mark.parametrize(
    ("head_size", "feature_map", "given"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(HEAD_SIZES, FEATURE_MAPS, (False, True))
    ],
)
def test_both_passes_do_not_spill(
    compiler: Compiler, head_size: int, feature_map: str, given: bool
) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import (
        add_linear,
        key_state,
    )

    x = torch.empty(1, 640, 2, head_size, dtype=torch.bfloat16)
    bounds = torch.zeros(10, dtype=torch.int32)
    blocks = Blocks.regular(640, 64)
    if given:
        blocks = Blocks.ragged(bounds, bounds, total=640, size=64)
    key_state(x, x, blocks, feature_map)
    target = Target(x, x, projection(head_size), feature_map)
    add_linear(target, state(head_size), slice(0, 640))
    assert len(compiler.kernels) == 2
    assert_clean(compiler.kernels[:1], FEW)
    assert_clean(compiler.kernels[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), list(zip((64, 128), HALVES, strict=True)))
def test_other_blocks_and_means_alone_do_not_spill(
    compiler: Compiler, size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import key_means, key_state

    x = torch.empty(1, 640, 2, 128, dtype=dtype)
    key_state(x, x, Blocks.regular(640, size), "softmax")
    key_means(x, Blocks.regular(640, size))
    assert len(compiler.kernels) == 2
    assert_clean(compiler.kernels[:1], FEW)
    assert_clean(compiler.kernels[1:])


@pytest.mark.slow_cases("128-64")
@pytest.mark.parametrize(
    ("head_size", "q_size"),
    [
        pytest.param(64, 128, marks=pytest.mark.slow),
        (128, 64),
        pytest.param(128, 128, marks=pytest.mark.slow),
    ],
)
def test_the_pass_over_unselected_blocks_does_not_spill(
    compiler: Compiler, head_size: int, q_size: int
) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_unselected

    x = torch.empty(1, 640, 2, head_size, dtype=torch.bfloat16)
    plan = BlockPlan.dense(Blocks.regular(640, q_size), Blocks.regular(640, 64), "cpu")
    add_unselected(Target(x, x, projection(head_size), "softmax"), x, x, plan)
    compiler.assert_clean()
