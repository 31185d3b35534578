"""cuDNN's attention on plans, with a stand-in for the package that records its calls."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels import gluon_check
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, kernel_for
from multimodal_gen.kernels.block_sparse.cudnn import BlockLists, make_lists
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE, Request, SelectedKernel, choose
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.fakes import H100, machine_with
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget

DISTRIBUTION = "nvidia-cudnn-frontend"
INSTALL = f"pip install {DISTRIBUTION}"
B200 = H100._replace(capability=(10, 0))
BLACKWELL = {DISTRIBUTION: "1.32.0", "triton": "3.9.0"}


def meaning(lists: BlockLists, leading: tuple[int, int], sizes: tuple[int, int, int]):
    """Return the mask [B, H, Sq, Sk] that the package computes, after the checks it makes."""
    queries, keys, size = sizes
    rows, blocks = -(-queries // size), -(-keys // size)
    indices, counts = lists.indices, lists.counts
    assert indices.shape[:3] == counts.shape == (*leading, rows)
    given = (indices, counts, *(() if lists.sizes is None else (lists.sizes,)))
    for tensor in given:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
    assert indices.shape[3] >= 1
    # Without sizes it takes every block for a full one, whatever lies behind the last key.
    assert lists.sizes is not None or keys % size == 0
    of_block = [size] * blocks if lists.sizes is None else lists.sizes.tolist()
    assert len(of_block) == blocks
    mask = torch.zeros(*leading, queries, keys, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, (*leading, rows))).tolist():
        for block in indices[b, h, row, : counts[b, h, row]].tolist():
            assert 0 <= block < blocks
            assert 1 <= of_block[block] <= size
            end = block * size + of_block[block]
            assert end <= keys, "the block passes the last key"
            listed = mask[b, h, row * size : (row + 1) * size, block * size : end]
            assert not listed.any(), "the block is listed twice"
            listed.fill_(True)
    return mask


Results = tuple[torch.Tensor, torch.Tensor]


class Package:
    """Stands in for the package.

    Attributes:
        calls: what its calls got, by name.
        spoil: what becomes of out and lse before they are returned.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.spoil: Callable[[torch.Tensor, torch.Tensor], Results] = lambda out, lse: (out, lse)

    def block_sparse_attention_forward(
        self,
        q_tensor: torch.Tensor,
        k_tensor: torch.Tensor,
        v_tensor: torch.Tensor,
        q2k_block_index: torch.Tensor,
        block_sparse_num: int | None = None,
        block_sizes: torch.Tensor | None = None,
        q2k_block_nums: torch.Tensor | None = None,
        *,
        sparse_block_size: int | None = None,
        allow_empty_block_nums: bool = False,
        softmax_scale: float | None = None,
        pack_gqa: bool | None = None,
        layout: str = "bhsd",
        kv_splits: int | str = 1,
        use_clc: bool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute what the arguments mean, after the checks that the package makes."""
        q, k, v = q_tensor, k_tensor, v_tensor
        lists = BlockLists(indices=q2k_block_index, counts=q2k_block_nums, sizes=block_sizes)
        self.calls.append({"lists": lists, "pack_gqa": pack_gqa, "size": sparse_block_size})
        assert layout == "bshd"
        assert allow_empty_block_nums
        assert (block_sparse_num, kv_splits, use_clc) == (None, 1, None)
        assert q.dtype == k.dtype == v.dtype
        for tensor in (q, k, v):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
        if sparse_block_size == 64:
            assert q.dtype == torch.bfloat16
            assert q.shape[3] == 128
            assert q.shape[2] == k.shape[2]
        else:
            assert sparse_block_size == 128
            assert q.dtype in {torch.bfloat16, torch.float16}
            assert q.shape[3] in {64, 96, 128}
        sizes = (q.shape[1], k.shape[1], sparse_block_size)
        mask = meaning(lists, (q.shape[0], q.shape[2]), sizes)
        out, lse = reference_attention(q, k, v, scale=softmax_scale, mask=mask)
        out, lse = self.spoil(out.to(q.dtype).contiguous(), lse.float())
        return {"o_tensor": out, "lse_tensor": lse}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Install the stand-in, on what looks like a B200."""
    package, name = Package(), "cudnn.block_sparse_attention"
    modules = {name: ModuleType(name) for name in ("cudnn", name)}
    modules["cudnn"].__path__ = []
    forward = package.block_sparse_attention_forward
    modules[name].block_sparse_attention_forward = forward  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with machine_with(BLACKWELL, ("cuda", (10, 0))):
        yield package


SIZE_128 = {"q_size": 128, "kv_size": 128}
PLANS = {
    "blocks of 64": PlanShape(heads=4, num_q=5, num_kv=5),
    "blocks of 128": PlanShape(heads=4, num_q=2, num_kv=3, **SIZE_128),
    "lists per sample": PlanShape(batch=2, num_q=3, num_kv=4, **SIZE_128),
    "one list for all": PlanShape(num_q=3, num_kv=4),
    "three by three in each": PlanShape(heads=4, num_q=2, num_kv=3, q_size=384, kv_size=384),
    "rows of two blocks": PlanShape(heads=4, num_q=2, num_kv=5, q_size=128, kv_size=64),
    "nothing kept": PlanShape(heads=4, num_q=2, num_kv=3, keep=0.0),
    "everything kept": PlanShape(heads=4, num_q=2, num_kv=3, keep=1.0, **SIZE_128),
}


def inputs_of(plan: BlockPlan, *, head_size: int = 128, kv_heads: int = 4, **more: Any) -> QKV:
    options = {"dtype": torch.bfloat16, "num_keys": plan.kv.total, "num_kv_heads": kv_heads, **more}
    return make_qkv(2, plan.q.total, 4, head_size, **options)


@pytest.mark.parametrize("name", PLANS)
def test_the_package_computes_what_the_plan_means(package: Package, name: str) -> None:
    plan = random_plan(PLANS[name], seed=3)
    q, k, v = inputs_of(plan)
    out, lse = block_sparse_attention(q, k, v, plan, scale=0.2, return_lse=True, kernel="cudnn")
    mask = dense_mask(plan, 2, 4)
    assert_within_error_budget(out, q, k, v, scale=0.2, mask=mask)
    _, exact = reference_attention(q, k, v, scale=0.2, mask=mask)
    torch.testing.assert_close(lse, exact.float())
    assert out.is_contiguous()
    size = 128 if plan.q.size % 128 == plan.kv.size % 128 == 0 else 64
    assert [(call["pack_gqa"], call["size"]) for call in package.calls] == [(False, size)]


@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_128_take_shared_key_heads_and_every_head_size(
    package: Package, head_size: int, dtype: torch.dtype
) -> None:
    plan = random_plan(PLANS["blocks of 128"], seed=4)
    q, k, v = inputs_of(plan, head_size=head_size, kv_heads=2, dtype=dtype)
    out = block_sparse_attention(q, k, v, plan, kernel="cudnn")
    assert_within_error_budget(out, q, k, v, scale=head_size**-0.5, mask=dense_mask(plan, 2, 4))


@pytest.mark.parametrize("form", ["heads first", "packed", "offset", "expanded"])
def test_inputs_of_another_layout_are_copied(package: Package, form: str) -> None:
    plan = random_plan(PLANS["one list for all"], seed=5)
    made = inputs_of(plan)
    changed = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
        "offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
        "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    }
    q, k, v = map(changed[form], made)
    out = block_sparse_attention(q, k, v, plan, kernel="cudnn")
    assert_within_error_budget(out, q, k, v, scale=128**-0.5, mask=dense_mask(plan, 2, 4))


def test_the_lists_are_made_once_per_plan_and_batch(package: Package) -> None:
    plan = random_plan(PLANS["one list for all"], seed=3)
    q, k, v = inputs_of(plan)
    for batch in (2, 2, 1):
        x = [tensor[:batch] for tensor in (q, k, v)]
        assert torch.is_tensor(block_sparse_attention(*x, plan, kernel="cudnn"))
    first, second, third = (call["lists"].indices for call in package.calls)
    assert first is second
    assert third.shape[0] == 1


def test_lists_that_are_whole_are_not_copied() -> None:
    blocks = Blocks.regular(128, 64)
    indices = torch.zeros(2, 4, 2, 1, dtype=torch.int32)
    counts = torch.ones(2, 4, 2, dtype=torch.int32)
    plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks)
    lists = make_lists(plan, 64, 2, 4)
    assert lists.indices.data_ptr() == indices.data_ptr()
    assert lists.counts.data_ptr() == counts.data_ptr()
    assert lists.sizes is None


@settings(max_examples=60, deadline=None)
@given(
    leading=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    num_q=st.integers(1, 3),
    num_kv=st.integers(1, 4),
    per_block=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    left=st.integers(0, 3),
    keep=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    room=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_lists_mean_what_the_plan_means(
    leading: tuple[int, int],
    num_q: int,
    num_kv: int,
    per_block: tuple[int, int],
    left: int,
    keep: float,
    room: int,
    seed: int,
) -> None:
    sides = zip((num_q, num_kv), per_block, strict=True)
    blocks = [Blocks.regular(4 * num * per - left, 4 * per) for num, per in sides]
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(*leading, num_q, num_kv, generator=generator) < keep
    plan = BlockPlan.from_map(kept, *blocks, max_count=room)
    found = meaning(make_lists(plan, 4, 2, 2), (2, 2), (plan.q.total, plan.kv.total, 4))
    assert torch.equal(found, dense_mask(plan, 2, 2))


def test_entries_past_the_count_are_never_read() -> None:
    blocks = Blocks.regular(20, 8)
    indices = torch.tensor([[2, 7], [0, 2], [-5, 99]], dtype=torch.int32).view(1, 1, 3, 2)
    counts = torch.tensor([1, 2, 0], dtype=torch.int32).view(1, 1, 3)
    plan = BlockPlan(indices=indices, counts=counts, q=blocks, kv=blocks)
    found = meaning(make_lists(plan, 8, 1, 1), (1, 1), (20, 20, 8))
    assert torch.equal(found, dense_mask(plan, 1, 1))


def reasons(request: Request, version: str = "1.32.0") -> tuple[str, ...]:
    with machine_with({DISTRIBUTION: version} if version else {}):
        return BLOCK_SPARSE.kernel("cudnn").unsupported_reasons(request)


SMALL = {"q_size": 64, "kv_size": 64}
GROUPED = "shares keys among heads in blocks of a multiple of 128 only, and some share them"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu", "capability": None}, "needs platform cuda, this is cpu"),
        ({"platform": "rocm", "capability": None}, "needs platform cuda, this is rocm"),
        ({"capability": (8, 0)}, "needs compute capability >= 10.0, this GPU has 8.0"),
        ({"capability": (9, 0)}, "needs compute capability >= 10.0, this GPU has 9.0"),
        ({"capability": (12, 0)}, "needs compute capability < 12.0, this GPU has 12.0"),
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({"head_size": 72}, "needs head size 64/96/128, got 72"),
        ({"head_size": 256}, "needs head size 64/96/128, got 256"),
        ({"q_size": 96}, "needs query and key blocks of a multiple of 64, got 96 and 128"),
        ({"kv_size": 32}, "needs query and key blocks of a multiple of 64, got 128 and 32"),
        (
            {"kv_size": 64, "head_size": 64},
            "and head size 128 for blocks of no multiple of 128, got bfloat16 and 64",
        ),
        (
            {**SMALL, "dtype": torch.float16},
            "needs bfloat16 and head size 128 for blocks of no multiple of 128, got float16 and",
        ),
        ({**SMALL, "grouped": True}, GROUPED),
        ({"ragged": True}, "needs regular blocks, and the plan's have lengths of their own"),
        ({"row_bits": True}, "has no choice per row, and the plan has row bits"),
        ({"causal": True}, "has no causal variant, and the plan is causal"),
        ({"backward": True}, "has no backward pass, and an input requires grad"),
        ({"skip_below": True}, "leaves no products out, and `skip_below` asks for it"),
    ],
)
def test_it_says_why_it_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    assert reasons(B200) == ()
    assert any(reason in text for text in reasons(B200._replace(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"capability": (10, 3)},
        {"capability": (11, 0)},
        {"head_size": 96, "dtype": torch.float16},
        {"grouped": True},
        {"unaligned": True},
        SMALL,
        {"kv_size": 64},
        {"q_size": 384, "kv_size": 384, "grouped": True},
        {"q_size": 0, "kv_size": 0},
    ],
)
def test_it_serves_what_the_package_does(changes: dict[str, Any]) -> None:
    assert reasons(B200._replace(**changes)) == ()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "needs the package cudnn, which is not installed"),
        ("1.31.0", f"needs {DISTRIBUTION} >= 1.32, found 1.31.0"),
        ("1.32.0", None),
        ("1.40.0", None),
    ],
)
def test_it_wants_a_release_whose_arguments_are_known(version: str, reason: str | None) -> None:
    assert reasons(B200, version) == (() if reason is None else (f"{reason} ({INSTALL})",))


@pytest.mark.parametrize(
    ("name", "changes", "more", "reason"),
    [
        ("blocks of 64", {"kv_form": "ragged"}, {}, "regular blocks"),
        ("blocks of 64", {"q_form": "padded"}, {}, "regular blocks"),
        ("blocks of 64", {}, {"kv_heads": 2}, "blocks of a multiple of 128 only"),
        ("blocks of 64", {"kv_size": 80}, {}, "query and key blocks"),
        ("blocks of 128", {}, {"requires_grad": True}, "no backward pass"),
    ],
)
def test_every_other_call_is_refused_by_name(
    package: Package, name: str, changes: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    plan = random_plan(dataclasses.replace(PLANS[name], **changes), seed=0)
    q, k, v = inputs_of(plan, **more)
    with pytest.raises(UnsupportedBackendError, match=rf"kernel 'cudnn' of .* cannot .*{reason}"):
        block_sparse_attention(q, k, v, plan, kernel="cudnn")
    assert package.calls == []


@pytest.mark.parametrize(
    ("capability", "changes", "chosen"),
    [
        ((10, 0), {}, "cudnn"),
        ((10, 3), SMALL, "cudnn"),
        ((11, 0), {}, "cudnn"),
        ((10, 0), {"q_size": 256, "kv_size": 128}, "fa4"),
        ((10, 0), {"q_size": 384, "kv_size": 384}, "cudnn"),
        ((10, 0), {"ragged": True}, "triton"),
        ((10, 0), {**SMALL, "grouped": True}, "triton"),
        ((10, 0), {"backward": True}, "triton"),
        ((9, 0), {}, "gluon"),
        ((9, 0), {"causal": True}, "triton"),
        ((8, 0), {}, "triton"),
        ((12, 0), {}, "triton"),
    ],
)
def test_it_is_the_first_choice_where_no_other_beats_triton(
    capability: tuple[int, int], changes: dict[str, Any], chosen: str
) -> None:
    request = H100._replace(capability=capability, **changes)
    with machine_with({**BLACKWELL, "flash-attn-4": "4.0.0b36"}):
        assert choose(BLOCK_SPARSE, "auto", request) == chosen


def test_a_layer_that_selected_it_counts_what_another_kernel_serves() -> None:
    kernel = SelectedKernel("cudnn")
    with machine_with(BLACKWELL):
        kernel.begin_call()
        assert choose(BLOCK_SPARSE, kernel, B200) == "cudnn"
        kernel.begin_call()
        assert choose(BLOCK_SPARSE, kernel, B200._replace(**SMALL, grouped=True)) == "triton"
    assert kernel.fallbacks() == {("triton", f"cudnn {GROUPED}"): 1}


def test_unasked_it_runs_on_a_plan_of_its_blocks(package: Package) -> None:
    plan = random_plan(PLANS["blocks of 64"], seed=3)
    q, k, v = inputs_of(plan)
    assert kernel_for(q, k, v, plan) == "cudnn"
    assert torch.is_tensor(block_sparse_attention(q, k, v, plan))
    assert len(package.calls) == 1


def test_methods_take_its_name() -> None:
    assert VideoSparseConfig(kernel="cudnn").kernel == "cudnn"


@pytest.fixture
def checked(package: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Let it seem as if there were a GPU, on which kernels are checked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    check = gluon_check.cudnn
    monkeypatch.setattr(gluon_check, "cudnn", lambda device: check(torch.device("cpu")))
    return package


def test_its_self_check_calls_every_kernel_that_is_compiled_apart(checked: Package) -> None:
    assert choose(BLOCK_SPARSE, "auto", B200._replace(device=0)) == "cudnn"
    assert [call["size"] for call in checked.calls] == [64, 128, 128, 128]
    for call in checked.calls:
        assert call["lists"].sizes is not None
        assert set(call["lists"].counts.flatten().tolist()) == {0, 1, 3, 4}
    assert choose(BLOCK_SPARSE, "auto", B200._replace(device=0, head_size=64)) == "cudnn"
    assert len(checked.calls) == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, lse: (out * 1.2, lse),
        lambda out, lse: (out, lse * 1.4427),
        lambda out, lse: (out, lse.nan_to_num(neginf=0.0)),
        lambda out, lse: (out.where(lse.transpose(1, 2)[..., None].isfinite(), torch.nan), lse),
    ],
    ids=["values", "base 2", "log-sum-exp of empty rows", "values of empty rows"],
)
def test_a_release_that_is_wrong_leaves_the_call_to_triton(
    checked: Package, spoil: Callable[[torch.Tensor, torch.Tensor], Results]
) -> None:
    checked.spoil = spoil
    request = B200._replace(device=0)
    assert choose(BLOCK_SPARSE, "auto", request) == "triton"
    with pytest.raises(
        UnsupportedBackendError, match=rf"failed its self-check with {DISTRIBUTION} 1.32.0: relat"
    ):
        choose(BLOCK_SPARSE, "cudnn", request)


def test_a_package_that_cannot_be_imported_leaves_the_call_to_triton(
    checked: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", None)
    assert choose(BLOCK_SPARSE, "auto", B200._replace(device=0)) == "triton"
