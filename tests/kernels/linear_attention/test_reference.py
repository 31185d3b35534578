"""The definition against the paper's formulas, token by token."""

import dataclasses

import pytest
import torch

from multimodal_gen.kernels.linear_attention.api import add_linear, add_unselected, key_state
from multimodal_gen.kernels.linear_attention.reference import FEATURE_MAPS, Projection, features
from tests.helpers.inputs import random
from tests.kernels.linear_attention.naive import (
    assert_added,
    naive_features,
    naive_linear,
    tokens_of,
)
from tests.kernels.linear_attention.plans import BLOCKS, Case

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_features_are_rounded_once(feature_map, dtype):
    x = random(50, 32, dtype=dtype) * 5
    eps = torch.finfo(dtype).eps
    wanted = naive_features(x, feature_map)
    assert ((features(x, feature_map).double() - wanted).abs() <= 20 * eps * wanted.abs()).all()


def test_elu_keeps_small_features():
    x = torch.tensor([-20.0])
    torch.testing.assert_close(features(x, "elu"), x.exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("layout", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_branch_over_all_tokens_is_added(feature_map, layout, dtype):
    case = Case(layout=layout, dtype=dtype, feature_map=feature_map)
    means, state = key_state(case.key, case.value, case.kv, feature_map=feature_map)
    for b in range(2):
        for i, tokens in enumerate(tokens_of(case.kv, b)):
            mean = case.key[b, list(tokens)].float().sum(0) / max(len(tokens), 1)
            torch.testing.assert_close(means[b, :, i], mean, rtol=1e-5, atol=1e-5)
    rows = slice(3, case.query.shape[1] - 2)
    out = add_linear(
        case.out, case.query, state, case.projection, rows=rows, feature_map=feature_map
    )
    branch, size = naive_linear(*case.qkv, case.seen_by_all(), feature_map, *case.parameters)
    assert torch.equal(out[:, :3], case.out[:, :3])
    assert_added(out[:, rows], case.out[:, rows], branch[:, rows], size[:, rows])


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("layout", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_branch_over_unselected_blocks_is_added(feature_map, layout, dtype):
    case = Case(layout=layout, dtype=dtype, feature_map=feature_map)
    plan, seen = case.plan()
    out = add_unselected(case.out, *case.qkv, plan, case.projection, feature_map=feature_map)
    branch, size = naive_linear(*case.qkv, seen, feature_map, *case.parameters)
    rows = torch.tensor([t for block in tokens_of(plan.q, 0) for t in block])
    assert_added(out[:, rows], case.out[:, rows], branch[:, rows], size[:, rows])


def test_nothing_selected_is_everything_unselected():
    case = Case(layout="regular", dtype=torch.float64)
    _, state = key_state(case.key, case.value, case.kv, feature_map="elu")
    plan, _ = case.plan()
    plan = dataclasses.replace(plan, counts=torch.zeros_like(plan.counts))
    rows = slice(0, case.query.shape[1])
    found = add_unselected(case.out, *case.qkv, plan, case.projection, feature_map="elu")
    wanted = add_linear(case.out, case.query, state, case.projection, rows=rows, feature_map="elu")
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("unselected", [False, True])
def test_gradients_flow_through_the_branch(unselected):
    case = Case(layout="small", dtype=torch.float64, feature_map="elu", head_size=4)
    q, k, v, w = (x.clone().requires_grad_() for x in (*case.qkv, case.projection.weight.double()))
    plan, _ = case.plan()

    def run(q, k, v, w):
        projection = Projection(weight=w)
        _, state = key_state(k, v, case.kv, feature_map="elu")
        if unselected:
            return add_unselected(case.out, q, k, v, plan, projection, feature_map="elu")
        rows = slice(0, q.shape[1])
        return add_linear(case.out, q, state, projection, rows=rows, feature_map="elu")

    assert torch.autograd.gradcheck(run, (q, k, v, w), fast_mode=True)
