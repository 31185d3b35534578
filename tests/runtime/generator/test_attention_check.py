import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.generator.attention_check import (
    AttentionCheck,
    exact_rows,
    row_errors,
    sample_rows,
)
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.call import AttentionCall, watching
from multimodal_gen.runtime.layers.attention.scope import LayerSite, scope_from
from multimodal_gen.runtime.managers.forward_context import set_forward_context

HEADS, KV_HEADS, SIZE = 4, 2, 8


def qkv(num_queries: int = 12, num_keys: int = 12) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, HEADS), (num_keys, KV_HEADS), (num_keys, KV_HEADS))
    return tuple(torch.randn(2, s, h, SIZE, generator=generator) for s, h in shapes)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return attention in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.arange(12).expand(2, 12) < torch.tensor([[9], [12]]),
        torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.7,
        torch.rand(2, HEADS, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.7,
        torch.randn(1, HEADS, 1, 12, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["none", "keys", "dense", "heads", "additive"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_exact_rows_are_those_of_attention_in_fp64(mask: torch.Tensor | None, causal: bool) -> None:
    q, k, v = qkv()
    layer = LocalAttention(HEADS, SIZE, KV_HEADS, softmax_scale=0.7, causal=causal)
    rows = torch.tensor([0, 5, 11])
    other = torch.randn_like(v)
    found = exact_rows(layer, AttentionCall(q, k, v, mask), rows, (v, other))
    allowed = torch.ones(12, 12, dtype=torch.bool).tril() if causal else None
    if mask is not None:
        whole = mask[:, None, None, :] if mask.dim() == 2 else mask
        if whole.dtype is torch.bool:
            allowed = whole if allowed is None else whole & allowed
        else:
            whole = whole.double().expand(2, HEADS, 12, 12)
            allowed = whole if allowed is None else whole.masked_fill(~allowed, -torch.inf)
    for out, value in zip(found, (v, other), strict=True):
        truth = dense(q, k, value, attn_mask=allowed, scale=0.7).nan_to_num()[:, rows]
        if mask is not None and mask.dim() == 2:
            truth = torch.where(mask[:, rows, None, None], truth, 0.0)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-6)


def test_what_masked_tokens_hold_has_no_influence() -> None:
    q, k, v = qkv()
    keep = torch.arange(12).expand(2, 12) < 9
    layer, rows = LocalAttention(HEADS, SIZE, KV_HEADS), torch.arange(12)
    (clean,) = exact_rows(layer, AttentionCall(q, k, v, keep), rows, (v,))
    k[:, 9:], v[:, 9:], q[:, 9:] = torch.nan, torch.nan, torch.nan
    (found,) = exact_rows(layer, AttentionCall(q, k, v, keep), rows, (v,))
    assert torch.equal(found, clean)
    assert torch.equal(found[:, 9:], torch.zeros_like(found[:, 9:]))


def test_errors_are_relative_and_by_head() -> None:
    truth = torch.ones(1, 4, 3, 2, dtype=torch.float64)
    found = truth.clone()
    found[:, :, 1] *= 1.5
    found[0, 0, 2] *= -1
    expected = [[0, 0.5, 0.5], [0, 0.5, 1.0], [1, 1, 0.5]]
    assert torch.allclose(row_errors(found, truth), torch.tensor(expected, dtype=torch.float64))
    nothing = torch.zeros_like(truth)
    assert row_errors(nothing, nothing).tolist() == [[0] * 3, [0] * 3, [1] * 3]
    assert row_errors(nothing, truth).tolist() == [[1] * 3, [1] * 3, [0] * 3]
    found[0, 0, 0, 0] = torch.nan
    assert row_errors(found, truth)[:, 0].isnan().all()
    assert row_errors(found, truth)[:, 1:].isfinite().all()


def test_rows_are_drawn_without_touching_other_random_numbers() -> None:
    state = torch.get_rng_state()
    rows = sample_rows(1000, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rows, sample_rows(1000, seed=3))
    assert len(set(rows.tolist())) == 64
    assert rows.tolist() == sorted(rows.tolist())
    assert sample_rows(5, seed=0).tolist() == [0, 1, 2, 3, 4]


def test_layers_take_turns_in_being_checked() -> None:
    scope = scope_from(attention_backend="torch_sdpa")
    layers = [
        LocalAttention(
            HEADS,
            SIZE,
            KV_HEADS,
            site=LayerSite(name=f"blocks.{n}", component="transformer", layer=n, num_layers=3),
            scope=scope,
        )
        for n in range(3)
    ]
    check, inputs = AttentionCheck(2), qkv()
    broken = layers[2]._attend
    layers[2]._attend = lambda call: 2 * broken(call)  # type: ignore[method-assign]
    for step in range(2):
        with set_forward_context(step, num_steps=2), watching(check):
            for layer in layers:
                layer(*inputs)
                layer(*inputs)  # the other branch of guidance
    report = AttentionReport(layers=tuple(layer.report() for layer in layers))
    found = check.as_dict(report)
    assert [layer["steps"] for layer in found["layers"]] == [[0, 1], [0], [1]]
    assert found["calls_per_step"] == 2
    assert [layer["density"] for layer in found["layers"]] == [1.0] * 3
    errors = [layer["relative_l2"] for layer in found["layers"]]
    assert errors[:2] == pytest.approx([0, 0], abs=1e-5)
    assert errors[2] == pytest.approx(1, abs=1e-5)
    assert json.loads(json.dumps(found)) == found


def test_calls_outside_a_denoiser_are_not_checked() -> None:
    layer, check = LocalAttention(HEADS, SIZE, KV_HEADS), AttentionCheck(1)
    with watching(check):
        layer(*qkv())
    assert check.as_dict(AttentionReport(layers=(layer.report(),)))["layers"] == []


def test_calls_that_attend_to_other_keys_are_not_held_against_all_of_their_own() -> None:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    layer, check = LocalAttention(HEADS, SIZE, KV_HEADS, site=site), AttentionCheck(1)
    blocks = chunk_causal_plan([4, 8], device="cpu")
    with set_forward_context(0), watching(check):
        layer(*qkv(), blocks)
        layer(*qkv(), blocks)  # of the calls of a step, the first counts
    found = check.as_dict(AttentionReport(layers=(layer.report(),)))
    assert (found["layers"], found["unchecked"]) == ([], 1)


@pytest.mark.parametrize("trained", [False, True])
def test_what_a_trained_projection_adds_is_no_error(trained: bool) -> None:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    scope = scope_from(attention_backend="sla_attn", attention_backend_config="dense_steps=0")
    layer, check = LocalAttention(HEADS, SIZE, KV_HEADS, site=site, scope=scope), AttentionCheck(1)
    if trained:
        layer.set_projection(nn.Linear(SIZE, SIZE).requires_grad_(False))
    for step in range(2):  # dense steps lack the branch
        with set_forward_context(step, latent_grid=(1, 3, 4), num_steps=2), watching(check):
            layer(*qkv())
    found = check.as_dict(AttentionReport(layers=(layer.report(),)))
    (told,) = found["layers"]
    assert (told["steps"], found["unchecked"]) == ([0] if trained else [0, 1], int(trained))


@pytest.mark.parametrize("dense", [{"no_grid": "off the grid"}, {"exact": "missed a bound"}])
def test_calls_that_a_method_leaves_dense_lack_its_projection(dense: dict[str, str]) -> None:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    scope = scope_from(attention_backend="sla_attn", attention_backend_config="dense_steps=0")
    layer, check = LocalAttention(HEADS, SIZE, KV_HEADS, site=site, scope=scope), AttentionCheck(1)
    layer.set_projection(nn.Linear(SIZE, SIZE).requires_grad_(False))
    context = set_forward_context(0, latent_grid=(1, 3, 4), num_steps=1)
    with context, torch.no_grad(), watching(check):
        layer.attend(AttentionCall(*qkv(), **dense))
    found = check.as_dict(AttentionReport(layers=(layer.report(),)))
    assert found["unchecked"] == 0
    assert found["layers"][0]["relative_l2"] < 1e-5


def test_a_plain_call_is_checked_after_one_that_sees_other_keys() -> None:
    site = LayerSite(name="blocks.0", component="transformer", layer=0, num_layers=1)
    layer, check = LocalAttention(HEADS, SIZE, KV_HEADS, site=site), AttentionCheck(1)
    with set_forward_context(0), watching(check):
        layer(*qkv(), chunk_causal_plan([4, 8], device="cpu"))
        layer(*qkv())
    found = check.as_dict(AttentionReport(layers=(layer.report(),)))
    assert (found["layers"][0]["steps"], found["unchecked"]) == ([0], 0)
