"""The benchmark of Sparse VideoGen 2: how it calls FlashInfer, on an eager kernel."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from multimodal_gen.kernels.cluster_attention.plan import Groups

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
HEADS, TOKENS = 3, 512


class EagerWrapper:
    """Takes and returns what FlashInfer's does: heads first, masks and sizes per head."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        self.plans = []

    def plan(
        self,
        block_mask_map,
        block_row_sz,
        block_col_sz,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        sm_scale=None,
        q_data_type="float16",
    ):
        assert (num_qo_heads, num_kv_heads, head_dim) == (HEADS, HEADS, 128)
        assert q_data_type is torch.float32
        rows, columns = (
            torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in sizes])
            for sizes in (block_row_sz, block_col_sz)
        )
        heads = torch.arange(HEADS)[:, None, None]
        self.plans.append((block_mask_map[heads, rows[:, :, None], columns[:, None]], sm_scale))

    def run(self, q, k, v):
        mask, scale = self.plans[-1]
        assert q.is_contiguous()
        return (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def clusters(num, generator):
    labels = torch.randint(0, num, (1, HEADS, TOKENS), generator=generator)
    counts = torch.nn.functional.one_hot(labels, num).sum(2).int()
    order = labels.argsort(2).int()
    return Groups(order=order, starts=(counts.cumsum(2) - counts).int(), counts=counts)


@pytest.fixture
def svg2(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    flashinfer = ModuleType("flashinfer")
    flashinfer.sparse = SimpleNamespace(VariableBlockSparseAttentionWrapper=EagerWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    module = importlib.import_module("svg2")
    monkeypatch.setattr(module, "TOKENS", TOKENS)
    return module


def test_flashinfer_is_asked_for_the_clusters_that_are_kept(svg2):
    generator = torch.Generator().manual_seed(0)
    # In memory heads come first, as `gather_tokens` leaves them.
    q, k, v = (
        torch.randn(1, HEADS, TOKENS, 128, generator=generator).transpose(1, 2) for _ in range(3)
    )
    queries, keys = clusters(5, generator), clusters(9, generator)
    keep = torch.rand(1, HEADS, 5, 9, generator=generator) < 0.5
    keep[..., 0] = True
    _, run = svg2.flashinfer_calls(q, k, v, queries, keys, keep)
    out = run()
    assert out.shape == q.shape
    for head in range(HEADS):
        one = slice(head, head + 1)
        wanted, rows = svg2.sampled_reference(
            *(x[:, :, one] for x in (q, k, v)), queries.heads(one), keys.heads(one), keep[:, one]
        )
        torch.testing.assert_close(out[0, rows, head], wanted, atol=1e-5, rtol=1e-5)
