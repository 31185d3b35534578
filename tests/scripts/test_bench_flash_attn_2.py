"""What stands in for flash-attn 2 where benchmarks time packages that were written for it."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
PACKAGE = """
from flash_attn import flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
"""


def eager(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    return_attn_probs=False,
):
    assert not causal
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * softmax_scale
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
        lse[:, rows] = scores.logsumexp(-1)
    return (out, lse) if return_attn_probs else out


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package that imports flash-attn 2, imported with the stand-in on an eager kernel."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wants_flash_attn.py").write_text(PACKAGE)
    instead = ModuleType("fa3_fwd_interface")
    instead.flash_attn_varlen_func = eager
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", instead)
    stand_in = importlib.import_module("_flash_attn_2")
    with stand_in.standing_in():
        yield importlib.import_module("wants_flash_attn")
    sys.modules.pop("wants_flash_attn", None)


@pytest.fixture
def packed():
    """Two sequences of 5 and 3 queries, and of 4 and 6 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 16, generator=generator) for n in (8, 10, 10))
    ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 4, 10]))
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (q, k, v, *ends, 5, 6), strict=True))


def test_the_forward_returns_what_flash_attn_2_does(package, packed):
    out, lse, weights, state = package._flash_attn_varlen_forward(
        **packed, softmax_scale=0.25, causal=False, dropout_p=0.0
    )
    q, k, v = (packed[name].double() for name in "qkv")
    mask = torch.block_diag(torch.ones(5, 4), torch.ones(3, 6)).bool()
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.25).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(
        out.double(), torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), atol=1e-5, rtol=1e-5
    )
    assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert weights.numel() == 0
    assert (state.shape, state.dtype) == ((2,), torch.int64)


def test_the_public_function_scales_by_the_head_size_and_returns_the_output_only(package, packed):
    out = package.flash_attn_varlen_func(*packed.values())
    wanted = package._flash_attn_varlen_forward(
        **packed, softmax_scale=0.25, causal=False, dropout_p=0.0
    )[0]
    assert torch.equal(out, wanted)


def test_what_the_kernel_cannot_do_is_refused(package, packed):
    with pytest.raises(ValueError, match=r"`dropout_p` must be 0 with fa3_fwd_interface, got 0\.1"):
        package.flash_attn_varlen_func(*packed.values(), dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="has no backward"):
        package._flash_attn_varlen_backward(dout=packed["q"])


def test_modules_are_as_before_once_it_is_over(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    stand_in = importlib.import_module("_flash_attn_2")
    theirs = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", theirs)
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    with stand_in.standing_in():
        assert sys.modules["flash_attn"] is not theirs
        assert importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    assert sys.modules["flash_attn"] is theirs
    assert "flash_attn.flash_attn_interface" not in sys.modules


def test_another_package_of_that_name_is_not_taken_for_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    stand_in = importlib.import_module("_flash_attn_2")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.util.find_spec("flash_attn") is not None
    assert not stand_in.is_installed()
    sys.modules.pop("flash_attn", None)
