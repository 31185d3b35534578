"""The authors' kernels: what they are handed, and what they are not asked to do."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import (
    VideoSparseBackend,
    VideoSparseConfig,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa_upstream import (
    attend_upstream,
    upstream_reasons,
)
from multimodal_gen.runtime.layers.attention.sparse.tiles import (
    SequenceLayout,
    SparseCall,
    tiled_sequence,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.inputs import make_qkv

GRID = (5, 6, 9)
TILE = (4, 4, 4)


def make_call(query=None, *, text=0, masked=False, scale=32**-0.5, kv_heads=2) -> SparseCall:
    tokens = math.prod(GRID) + text
    query = torch.zeros(1, tokens, 2, 32) if query is None else query
    key = query[:, :, :kv_heads]
    return SparseCall(
        query=query,
        key=key,
        value=key,
        layout=SequenceLayout(grid=GRID, start=0, num_queries=tokens, num_keys=tokens),
        scale=scale,
        kernel=SelectedKernel("vsa"),
        mask=torch.ones(1, tokens, dtype=torch.bool) if masked else None,
    )


def keys_of(tile):
    return tiled_sequence(make_call().layout, math.prod(GRID), tile, torch.device("cpu"))


def padded_attention(q, k, v, token_mask, lengths):
    """What the kernels compute: [1, H, N * 64, D] tiles, keys cut to their lengths."""
    assert q.shape[0] == 1
    real = (torch.arange(64) < lengths[:, None]).flatten()
    for x in (q, k, v):
        assert not x[:, :, ~real].any()
    mask = token_mask.repeat_interleave(64, -1).repeat_interleave(64, -2) & real
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.masked_fill(~real[:, None], torch.nan)


def means(x, lengths):
    return x.unflatten(2, (-1, 64)).sum(3) / lengths[:, None]


class FakeKernel:
    """Both packages' interfaces."""

    def block_sparse_attn(self, q, k, v, block_map, variable_block_sizes):
        assert block_map.dtype == torch.bool
        return padded_attention(q, k, v, block_map, variable_block_sizes), None

    def video_sparse_attn(self, q, k, v, sizes, topk, block_size, compress_attn_weight):
        assert math.prod(block_size) == 64
        scores = means(q, sizes) @ means(k, sizes).mT
        token_mask = torch.zeros_like(scores, dtype=torch.bool)
        token_mask.scatter_(-1, scores.topk(topk, dim=-1).indices, True)
        coarse = means(v, sizes).mean(2, keepdim=True)  # any will do: its weight is zero
        return padded_attention(q, k, v, token_mask, sizes) + coarse * compress_attn_weight


@pytest.fixture(params=["vsa", "fastvideo_kernel"])
def package(request, monkeypatch):
    monkeypatch.setitem(sys.modules, request.param, FakeKernel())
    return request.param


def implementation(kernel):
    config = VideoSparseConfig(topk=3, kernel=kernel)
    return VideoSparseBackend.get_impl_cls()(2, 32, 32**-0.5, config=config, variant=kernel)


def test_the_kernel_is_found_in_a_submodule_of_its_name_too(monkeypatch):
    kernel = FakeKernel()
    submodule = SimpleNamespace(block_sparse_attn=kernel.block_sparse_attn)
    package = SimpleNamespace(block_sparse_attn=submodule)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", package)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel.block_sparse_attn", submodule)
    qkv = make_qkv(1, math.prod(GRID), 2, 32)
    outs = []
    for name in ("fastvideo_kernel", "reference"):
        with set_forward_context(0, latent_grid=GRID) as context:
            outs.append(implementation(name).forward(*qkv, context))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("gated", [False, True])
def test_a_package_computes_what_the_engine_does(package, gated):
    qkv = make_qkv(2, math.prod(GRID), 2, 32)
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(1))
    outs = []
    for kernel in (package, "reference"):
        with set_forward_context(0, latent_grid=GRID) as context:
            impl = implementation(kernel)
            outs.append(impl.forward(*qkv, context, gate=gate if gated else None))
    torch.testing.assert_close(*outs)


def test_sparsity_zero_runs_on_the_package_too(package):
    qkv = make_qkv(1, math.prod(GRID), 2, 32)
    impl = VideoSparseBackend.get_impl_cls()(
        2, 32, 32**-0.5, config=VideoSparseConfig(kernel=package), variant=package
    )
    with set_forward_context(0, latent_grid=GRID) as context:
        out = impl.forward(*qkv, context)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv))
    torch.testing.assert_close(out, dense.transpose(1, 2))


@pytest.mark.parametrize(
    ("tile", "changes", "reason"),
    [
        ((4, 8, 8), {}, r"needs tiles of 64 tokens, got 256"),
        (TILE, {"text": 77}, r"needs sequences without text, got 77 text tokens"),
        (TILE, {"masked": True}, r"has no key mask, and keys are masked"),
        (TILE, {"scale": 1.0}, r"needs the inverse root of the head size as scale, got 1 for 32"),
        (TILE, {"kv_heads": 1}, r"needs as many key heads as the 2, got 1"),
    ],
)
def test_what_a_package_cannot_do_is_refused_with_the_reason(tile, changes, reason):
    call = make_call(**changes)
    with pytest.raises(UnsupportedBackendError, match=f"cannot serve this call: {reason}; use ker"):
        attend_upstream(call, keys_of(tile), lambda: call.query, 3, "video_sparse_attn")


def test_all_reasons_are_given_at_once():
    order = keys_of(TILE).order
    assert len(upstream_reasons(make_call(text=1, masked=True, kv_heads=1), order)) == 3
    assert upstream_reasons(make_call(), order) == ()


def test_selection_is_not_asked_for_where_the_package_selects(monkeypatch):
    monkeypatch.setitem(sys.modules, "vsa", FakeKernel())
    call = make_call(make_qkv(1, math.prod(GRID), 2, 32).query)
    never = SimpleNamespace(calls=0)

    def select():
        never.calls += 1

    out = attend_upstream(call, keys_of(TILE), select, 3, "video_sparse_attn")
    assert out.isfinite().all()
    assert never.calls == 0
