"""The Triton kernels against the definitions, under the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

from itertools import cycle

import pytest
import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.reference import (
    FEATURE_MAPS,
    KeyState,
    Projection,
    Target,
)
from tests.helpers.inputs import random
from tests.kernels.cases import with_slow
from tests.kernels.linear_attention.naive import (
    UNSELECTED_ROUNDINGS,
    assert_added,
    naive_linear,
    tokens_of,
)
from tests.kernels.linear_attention.plans import BLOCKS, Case

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

HALVES = [torch.float16, torch.bfloat16]
# Every layout with two feature maps, one in each dtype.
CALLS = [
    (FEATURE_MAPS[(i + j) % len(FEATURE_MAPS)], layout, dtype)
    for i, layout in enumerate(BLOCKS)
    for j, dtype in enumerate(HALVES)
]


def state_of(case: Case, splits: int | None = None) -> tuple[torch.Tensor, KeyState]:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import key_state

    return key_state(case.key, case.value, case.kv, case.feature_map, splits=splits)


@pytest.mark.slow_cases("blocks of 128-3", "small-100", "text-1")
@pytest.mark.parametrize(("layout", "splits"), list(zip(BLOCKS, cycle((1, 3, 100)), strict=False)))
def test_means_are_those_of_the_blocks_however_the_work_is_split(layout: str, splits: int) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import key_means

    case = Case(layout=layout, dtype=torch.bfloat16)
    mean = key_means(case.key, case.kv)
    with_state, _ = state_of(case, splits)
    assert torch.equal(mean, with_state)
    for b in range(case.key.shape[0]):
        for i, tokens in enumerate(tokens_of(case.kv, b)):
            wanted = case.key[b, list(tokens)].double().sum(0) / max(len(tokens), 1)
            band = max(len(tokens), 1) * torch.finfo(torch.float32).eps * 8
            assert (mean[b, :, i].double() - wanted).abs().max() <= band


@pytest.mark.slow_cases("elu-blocks of 128-dtype2", "relu-small-dtype4", "softmax-text-dtype6")
@pytest.mark.parametrize(("feature_map", "layout", "dtype"), with_slow(CALLS, CALLS[::2]))
def test_the_branch_over_all_tokens_is_added(
    feature_map: str, layout: str, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_linear

    case = Case(layout=layout, dtype=dtype, feature_map=feature_map)
    _, state = state_of(case, 2)
    rows = slice(3, case.query.shape[1] - 2)
    out = case.out.clone()
    add_linear(Target(out, case.query, case.projection, feature_map), state, rows)
    branch, size = naive_linear(*case.qkv, case.seen_by_all(), feature_map, *case.parameters)
    assert torch.equal(out[:, :3], case.out[:, :3])
    assert torch.equal(out[:, rows.stop :], case.out[:, rows.stop :])
    assert_added(out[:, rows], case.out[:, rows], branch[:, rows], size[:, rows])


@pytest.mark.slow_cases("elu-text-dtype7", "relu-blocks of 128-dtype3", "softmax-small-dtype5")
@pytest.mark.parametrize(("feature_map", "layout", "dtype"), with_slow(CALLS, CALLS[1::2]))
def test_the_branch_over_unselected_blocks_is_added(
    feature_map: str, layout: str, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_unselected

    case = Case(layout=layout, dtype=dtype, feature_map=feature_map)
    out = case.out.clone()
    plan, seen = case.plan()
    target = Target(out, case.query, case.projection, feature_map)
    add_unselected(target, case.key, case.value, plan)
    branch, size = naive_linear(*case.qkv, seen, feature_map, *case.parameters)
    rows = torch.tensor([t for block in tokens_of(plan.q, 0) for t in block])
    others = torch.ones(out.shape[1], dtype=torch.bool)
    others[rows] = False
    assert torch.equal(out[:, others], case.out[:, others])
    parts = (x[:, rows] for x in (out, case.out, branch, size))
    assert_added(*parts, roundings=UNSELECTED_ROUNDINGS)


def test_states_of_few_heads_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from multimodal_gen.kernels.linear_attention import linear_attention_kernel as kernel_module

    case = Case(layout="text", dtype=torch.bfloat16)
    plan, _ = case.plan()
    outs = [case.out.clone() for _ in range(2)]
    targets = [Target(out, case.query, case.projection, "elu") for out in outs]
    kernel_module.add_unselected(targets[0], case.key, case.value, plan)
    monkeypatch.setattr(kernel_module, "STATE_BYTES", 1)
    monkeypatch.setattr(kernel_module, "STATE_SHARE", 0.0)
    kernel_module.add_unselected(targets[1], case.key, case.value, plan)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.slow_cases("256", "48")
@pytest.mark.parametrize("head_size", [32, 48, 256])
def test_other_head_sizes_are_padded_or_parted(head_size: int) -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_linear

    case = Case(layout="small", dtype=torch.bfloat16, head_size=head_size, bias=False)
    _, state = state_of(case)
    out = case.out.clone()
    target = Target(out, case.query, case.projection, "softmax")
    add_linear(target, state, slice(0, out.shape[1]))
    branch, size = naive_linear(*case.qkv, case.seen_by_all(), "softmax", *case.parameters)
    assert_added(out, case.out, branch, size)


def test_everything_selected_leaves_the_bias_alone() -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_unselected

    case = Case(layout="regular", dtype=torch.bfloat16)
    out = case.out.clone()
    plan = BlockPlan.dense(case.q, case.kv, "cpu")
    target = Target(out, case.query, case.projection, "softmax")
    add_unselected(target, case.key, case.value, plan)
    bias = case.projection.bias
    assert bias is not None
    branch = bias.double().expand(case.out.shape)
    assert_added(out, case.out, branch, torch.zeros_like(branch))


def test_large_sums_stay_inside_half_precision() -> None:
    from multimodal_gen.kernels.linear_attention.linear_attention_kernel import add_linear

    tokens, d = 512, 16
    query = random(1, 64, 1, d, dtype=torch.float16)
    key = torch.full((1, tokens, 1, d), 300.0, dtype=torch.float16)
    value = torch.full((1, tokens, 1, d), 50.0, dtype=torch.float16)
    case = Case(layout="regular", dtype=torch.float16, feature_map="elu", head_size=d)
    _, state = state_of(
        case.replaced(key=key, value=value, kv=Blocks.regular(tokens, 64))
    )  # sums of 300 * 50 * 512 are far beyond the largest half
    out = torch.zeros_like(query)
    target = Target(out, query, Projection(weight=torch.eye(d)), "elu")
    add_linear(target, state, slice(0, 64))
    torch.testing.assert_close(out, torch.full_like(out, 50.0), rtol=4e-3, atol=0)
