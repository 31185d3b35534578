"""Other packages' block-sparse attention is given our lists, on stand-ins for the packages."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from multimodal_gen.kernels.block_sparse.reference import attention_reference

SIZE, HEADS = 64, 2


@pytest.fixture
def peers(bench):
    return bench("_block_sparse_peers")


@pytest.fixture
def plan(peers):
    return sys.modules["_attention"].random_lists(4 * SIZE, HEADS, SIZE, share=0.5)


@pytest.fixture
def qkv():
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4 * SIZE, HEADS, 32, generator=drawn) for _ in range(3)]


def close(found, wanted) -> bool:
    return (found - wanted).norm() < 1e-5 * wanted.norm()


def dense(q, k, v, keep):
    """Attention of [B, H, S, D] over a mask of pairs."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep)


def pairs_of(lists, size):
    """The mask of pairs that lists of key blocks say."""
    keep = torch.zeros(*lists.shape[:3], lists.shape[2], dtype=torch.bool)
    keep.scatter_(-1, lists.long(), True)
    return keep.repeat_interleave(size, 2).repeat_interleave(size, 3)


def install(monkeypatch, name, **functions):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(functions)


def fake_cudnn(monkeypatch) -> None:
    def forward(q, k, v, lists, *, sparse_block_size):
        assert lists.is_contiguous()
        out = dense(q, k, v, pairs_of(lists, sparse_block_size))
        return {"o_tensor": out, "lse_tensor": out[..., 0]}

    def backward(upstream, q, k, v, out, lse, lists, *, sparse_block_size):
        assert upstream.is_contiguous()
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            found = dense(*inputs, pairs_of(lists, sparse_block_size))
        gradients = torch.autograd.grad(found, inputs, upstream)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), gradients, strict=True))

    install(
        monkeypatch,
        "cudnn.block_sparse_attention",
        block_sparse_attention_forward=forward,
        block_sparse_attention_fp8_forward=forward,
        block_sparse_attention_backward=backward,
    )


class FakeWrapper:
    def __init__(self, workspace, backend):
        self.planned = 0

    def plan(self, *, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, **_):
        assert block_row_sz.shape == block_col_sz.shape == (num_qo_heads, block_mask_map.shape[1])
        self.planned += 1
        rows, columns = block_row_sz[0], block_col_sz[0]
        keep = block_mask_map.repeat_interleave(rows, 1)
        self.keep = keep.repeat_interleave(columns, 2)

    def run(self, q, k, v):
        assert self.planned == 1
        return dense(q, k, v, self.keep)


def test_every_peer_computes_what_our_lists_say(peers, plan, qkv, monkeypatch) -> None:
    fake_cudnn(monkeypatch)
    sparse = SimpleNamespace(VariableBlockSparseAttentionWrapper=FakeWrapper)
    install(monkeypatch, "flashinfer", sparse=sparse)
    runs, _ = peers.runs_of(tuple(qkv), plan)
    assert list(runs) == ["cudnn", "cudnn 8 bits", "flashinfer"]
    wanted, _ = attention_reference(*qkv, plan, scale=32**-0.5)
    for run in runs.values():
        for _ in range(2):
            assert close(run(), wanted)


def test_gradients_of_cudnns_are_its_backward_pass(peers, plan, qkv, monkeypatch) -> None:
    fake_cudnn(monkeypatch)
    inputs = [x.transpose(1, 2).contiguous().requires_grad_() for x in qkv]
    upstream = torch.randn(1, 4 * SIZE, HEADS, 32).transpose(1, 2)
    found = torch.autograd.grad(peers.cudnn(plan)(*inputs), inputs, upstream)
    wanted = torch.autograd.grad(dense(*inputs, pairs_of(plan.indices, SIZE)), inputs, upstream)
    for x, y in zip(found, wanted, strict=True):
        assert close(x, y)


def test_what_is_not_installed_is_left_out_with_a_word(peers, plan, qkv, monkeypatch, capsys):
    for name in ("cudnn", "cudnn.block_sparse_attention", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    assert peers.runs_of(tuple(qkv), plan) == ({}, {})
    assert capsys.readouterr().out.count("left out: ") == 3
