"""FlashAttention 4 on plans, with a stand-in for the package that records its calls."""

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention
from multimodal_gen.kernels.block_sparse.fa4 import TileLists, make_lists
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE, Request, fa4_keys
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.fakes import H100, machine_with
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget


class BlockSparseTensorsTorch(NamedTuple):
    """The package's argument, with its names and their order."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def meaning(tensors: BlockSparseTensorsTorch, leading: tuple[int, int], sizes: tuple[int, int]):
    """Return the mask [B, H, Sq, Sk] that the package computes, after the checks it makes."""
    (queries, keys), (q_size, width) = sizes, tensors.block_size
    tiles, rows = -(-keys // width), -(-queries // q_size)
    mask = torch.zeros(*leading, queries, keys, dtype=torch.bool)
    pairs = (
        (tensors.full_block_cnt, tensors.full_block_idx, True),
        (tensors.mask_block_cnt, tensors.mask_block_idx, False),
    )
    for counts, indices, full in pairs:
        assert counts.dtype == indices.dtype == torch.int32
        assert counts.shape[2] == indices.shape[2] == rows
        assert indices.shape[3] <= tiles
        assert indices.stride(3) == 1
        counts, indices = counts.expand(*leading, -1), indices.expand(*leading, -1, -1)
        for b, h, row in torch.cartesian_prod(*map(torch.arange, (*leading, rows))).tolist():
            for tile in indices[b, h, row, : counts[b, h, row]].tolist():
                assert not full or (tile + 1) * width <= keys, "a full tile passes the last key"
                block = mask[b, h, row * q_size : (row + 1) * q_size]
                block = block[:, tile * width : (tile + 1) * width]
                assert block.numel(), "the tile does not exist"
                assert not block.any(), "the tile is listed twice"
                block.fill_(True)
    return mask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Install the stand-in, on what looks like an H100; return the calls it gets."""
    seen = []

    def flash_attn_func(
        q, k, v, *, softmax_scale=None, pack_gqa=None, block_sparse_tensors=None, return_lse=False
    ):
        leading = (q.shape[0], q.shape[2])
        mask = meaning(block_sparse_tensors, leading, (q.shape[1], k.shape[1]))
        seen.append({"tensors": block_sparse_tensors, "pack_gqa": pack_gqa})
        out, lse = reference_attention(q, k, v, scale=softmax_scale, mask=mask)
        return out.to(q.dtype), lse.float() if return_lse else None

    modules = {
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_func": flash_attn_func},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsTorch},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        for attribute, value in attributes.items():
            setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    with machine_with({"flash-attn-4": "4.0.0b36"}, ("cuda", (9, 0))):
        yield seen


PLANS = {
    "one tile per block": PlanShape(heads=4, num_q=3, num_kv=5, q_size=64, kv_size=64),
    "three tiles per block": PlanShape(heads=4, num_q=2, num_kv=3, q_size=192, kv_size=384),
    "lists per sample": PlanShape(batch=2, num_q=3, num_kv=4, q_size=128, kv_size=128),
    "nothing kept": PlanShape(heads=4, num_q=2, num_kv=3, keep=0.0),
    "everything kept": PlanShape(heads=4, num_q=2, num_kv=3, kv_size=256, keep=1.0),
}


@pytest.mark.slow_cases(
    "lists per sample-128", "three tiles per block-128", "three tiles per block-64"
)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", PLANS)
def test_the_package_computes_what_the_plan_means(
    calls: list[dict[str, Any]], name: str, head_size: int
) -> None:
    plan = random_plan(PLANS[name], seed=3)
    q, k, v = make_qkv(
        2, plan.q.total, 4, head_size, num_keys=plan.kv.total, num_kv_heads=2, dtype=torch.bfloat16
    )
    out, lse = block_sparse_attention(q, k, v, plan, scale=0.2, return_lse=True, kernel="fa4")
    mask = dense_mask(plan, 2, 4)
    assert_within_error_budget(out, q, k, v, scale=0.2, mask=mask)
    _, exact = reference_attention(q, k, v, scale=0.2, mask=mask)
    torch.testing.assert_close(lse, exact.float())
    assert [call["pack_gqa"] for call in calls] == [False]
    assert calls[0]["tensors"].block_size == (plan.q.size, 64 if plan.kv.size == 64 else 128)


def test_the_lists_are_made_once_per_plan(calls: list[dict[str, Any]]) -> None:
    plan = random_plan(PLANS["three tiles per block"], seed=3)
    q, k, v = make_qkv(1, plan.q.total, 4, 64, num_keys=plan.kv.total, dtype=torch.float16)
    for _ in range(2):
        assert torch.is_tensor(block_sparse_attention(q, k, v, plan, kernel="fa4"))
    first, second = (call["tensors"] for call in calls)
    assert first.full_block_idx is second.full_block_idx


def lists_of(plan: BlockPlan, keys: int) -> BlockSparseTensorsTorch:
    lists: TileLists = make_lists(plan, keys)
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.mask_counts,
        mask_block_idx=lists.mask_indices,
        full_block_cnt=lists.full_counts,
        full_block_idx=lists.full_indices,
        block_size=(plan.q.size, keys),
    )


@settings(max_examples=60, deadline=None)
@given(
    leading=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    num_q=st.integers(1, 3),
    num_kv=st.integers(1, 4),
    per_block=st.integers(1, 4),
    keep=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 999),
)
def test_lists_of_tiles_mean_what_the_plan_means(
    leading: tuple[int, int], num_q: int, num_kv: int, per_block: int, keep: float, seed: int
) -> None:
    shape = PlanShape(
        batch=leading[0], heads=leading[1], num_q=num_q, num_kv=num_kv, q_size=4,
        kv_size=4 * per_block, keep=keep,
    )  # fmt: skip
    plan = random_plan(shape, seed=seed)
    found = meaning(lists_of(plan, 4), leading, (plan.q.total, plan.kv.total))
    assert torch.equal(found, dense_mask(plan, *leading))


def test_entries_past_the_count_are_never_read() -> None:
    blocks = Blocks.regular(20, 8)
    indices = torch.tensor([[2, 7], [0, 2], [-5, 99]], dtype=torch.int32).view(1, 1, 3, 2)
    counts = torch.tensor([1, 2, 0], dtype=torch.int32).view(1, 1, 3)
    plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks)
    found = meaning(lists_of(plan, 8), (1, 1), (20, 20))
    assert torch.equal(found, dense_mask(plan, 1, 1))


def reasons(request: Request, version: str = "4.0.0b36") -> tuple[str, ...]:
    with machine_with({"flash-attn-4": version} if version else {}):
        return BLOCK_SPARSE.kernel("fa4").unsupported_reasons(request)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu", "capability": None}, "needs platform cuda, this is cpu"),
        ({"platform": "rocm", "capability": None}, "needs platform cuda, this is rocm"),
        (
            {"capability": (8, 0)},
            "needs compute capability 9.0 or 10.0 or 10.1",
        ),
        ({"capability": (12, 0)}, ", this GPU has 12.0"),
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({"head_size": 36}, "needs head size <= 256, multiple of 8, got 36"),
        ({"head_size": 320}, "needs head size <= 256, multiple of 8, got 320"),
        ({"q_size": 96}, "needs query blocks of a multiple of 64 rows, got 96"),
        (
            {"kv_size": 200},
            "needs key blocks that tiles of 64 to 128 keys (in steps of 16) cut evenly, got 200",
        ),
        ({"kv_size": 32}, "cut evenly, got 32"),
        ({"ragged": True}, "needs regular blocks, and the plan's have lengths of their own"),
        ({"row_bits": True}, "has no choice per row, and the plan has row bits"),
        ({"causal": True}, "has no causal variant, and the plan is causal"),
        ({"backward": True}, "has no backward pass, and an input requires grad"),
        ({"capability": (10, 0)}, "needs query blocks of a multiple of 256 rows, got 128"),
        (
            {"capability": (10, 3), "q_size": 256, "kv_size": 64},
            "needs key blocks that tiles of 128 keys cut evenly, got 64",
        ),
        (
            {"capability": (10, 0), "q_size": 256, "head_size": 192},
            "needs head size <= 128 from compute capability 10.0 on, got 192",
        ),
    ],
)
def test_it_says_why_it_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    assert reasons(H100) == ()
    assert any(reason in text for text in reasons(H100._replace(**changes)))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "needs the package flash_attn.cute, which is not installed"),
        ("4.0.0b9", "needs flash-attn-4 >= 4.0.0b36, found 4.0.0b9"),
        ("4.0.0b36", None),
        ("4.0.0b37", None),
        ("4.0.0", None),
        ("4.0.0+build", None),
        ("4.1.0b1", None),
    ],
)
def test_it_wants_a_release_that_fits_its_tiles_to_the_blocks(
    version: str, reason: str | None
) -> None:
    install = "pip install --pre flash-attn-4"
    assert reasons(H100, version) == (() if reason is None else (f"{reason} ({install})",))


def test_plans_of_every_other_kind_are_refused_by_name(calls: list[dict[str, Any]]) -> None:
    plan = random_plan(dataclasses.replace(PLANS["one tile per block"], kv_form="ragged"), seed=0)
    q, k, v = make_qkv(1, plan.q.total, 4, 64, num_keys=plan.kv.total, dtype=torch.float16)
    with pytest.raises(
        UnsupportedBackendError, match=r"kernel 'fa4' of .* cannot .* regular blocks"
    ):
        block_sparse_attention(q, k, v, plan, kernel="fa4")
    assert calls == []


@pytest.mark.parametrize(
    ("head_size", "q_size", "kv_size", "keys"),
    [
        (64, 128, 384, 128),
        (96, 384, 384, 128),
        (96, 384, 288, 144),
        (96, 128, 144, None),
        (128, 128, 64, 64),
        (192, 128, 224, 112),
        (256, 128, 384, 64),
        (256, 128, 80, 80),
    ],
)
def test_the_tile_is_the_widest_that_cuts_the_blocks_evenly(
    head_size: int, q_size: int, kv_size: int, keys: int | None
) -> None:
    request = H100._replace(head_size=head_size, q_size=q_size, kv_size=kv_size)
    assert fa4_keys(request) == keys
