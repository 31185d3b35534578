"""What is wrong in other implementations of Sol-Attn, and right here."""

import pytest
import torch

from multimodal_gen.kernels.block_sparse import api
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.reference import reference_attention
from tests.helpers.sparse import SparseMethod, run_sparse

GRID = (3, 8, 12)  # 288 tokens: four blocks of 64, and one of 32
METHOD = SparseMethod(
    backend=AttentionBackendEnum.SOL_ATTN,
    config_cls=SolConfig,
    given={"dense_steps": None, "dense_layers": None, "tau": 0.5, "neighbours": 0},
)


def calls_of(layer):
    """Return how many calls were dense, and how many were not."""
    counts = {True: 0, False: 0}
    for entry in layer.report().entries:
        counts[not entry.selection.backend.is_sparse] += entry.calls
    return counts[True], counts[False]


def test_two_passes_of_guidance_are_one_step_and_every_run_begins_anew():
    layer, qkv = METHOD.layer(dense_steps=2), METHOD.inputs(GRID, batch=1)
    for run in range(1, 3):
        for step in range(4):
            for branch in ("cond", "uncond"):
                known = {"latent_grid": GRID, "num_steps": 4, "request_id": str(run)}
                with torch.no_grad(), set_forward_context(step, cfg_branch=branch, **known):
                    layer(*qkv)
        assert calls_of(layer) == (4 * run, 4 * run)


def test_a_kernel_that_fails_is_not_replaced_by_dense_attention(monkeypatch):
    def fail(call):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(api, "RUN", {**api.RUN, "reference": fail})
    layer = METHOD.layer(kernel="reference")
    with pytest.raises(RuntimeError, match="out of registers"):
        run_sparse(layer, METHOD.inputs(GRID), GRID)
    assert calls_of(layer) == (0, 0)


def test_items_of_a_batch_do_not_see_each_other():
    qkv = METHOD.inputs(GRID, batch=3, kv_heads=2)
    together = run_sparse(METHOD.layer(kv_heads=2), qkv, GRID)
    for item in range(3):
        alone = run_sparse(METHOD.layer(kv_heads=2), [x[item : item + 1] for x in qkv], GRID)
        torch.testing.assert_close(together[item : item + 1], alone)


def test_padding_is_in_no_mean_whatever_it_holds():
    text, qkv = TextSpan(start=288, length=40), None
    keep = torch.arange(328) < torch.tensor([[328], [300]])
    found = []
    for filling in (0.0, float("nan")):
        qkv = METHOD.inputs(GRID, text=text)
        for x in qkv:
            x[1, 300:] = filling
        found.append(run_sparse(METHOD.layer(), qkv, GRID, text=text, attn_mask=keep)[keep])
    assert torch.equal(*found)


@pytest.mark.parametrize("start", [0, 288])
def test_queries_of_text_attend_to_everything_exactly(start):
    text = TextSpan(start=start, length=40)
    qkv = METHOD.inputs(GRID, text=text)
    layer = METHOD.layer()
    out = run_sparse(layer, qkv, GRID, text=text)
    exact, _ = reference_attention(*qkv, scale=METHOD.scale)
    rows = slice(start, start + 40)
    torch.testing.assert_close(out[:, rows].double(), exact[:, rows], rtol=1e-4, atol=1e-5)
    video = slice(40, None) if start == 0 else slice(288)
    assert (out[:, video] - exact[:, video]).abs().max() > 1e-3


def test_dense_steps_are_those_of_the_dense_baseline():
    qkv = METHOD.inputs(GRID)
    baseline = LocalAttention(METHOD.heads, METHOD.head_size, compute_dtype=torch.float32)
    with torch.no_grad(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        assert torch.equal(METHOD.layer(dense_steps=1)(*qkv), baseline(*qkv))


def test_heads_of_any_size_and_tensors_of_any_strides_are_served():
    method = SparseMethod(
        backend=METHOD.backend, config_cls=SolConfig, given=METHOD.given, head_size=48
    )
    qkv = method.inputs(GRID, kv_heads=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    assert not strided[0].is_contiguous()
    found = [run_sparse(method.layer(kv_heads=2), x, GRID) for x in (qkv, strided)]
    torch.testing.assert_close(*found)
