"""What the engine refuses, and which kernel it takes."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse.call import forms_of
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import QUANTIZED, choose
from multimodal_gen.kernels.quantized_attention import api
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.quantized_attention.packed import in_slots, slots_of
from multimodal_gen.kernels.quantized_attention.tuning import gluon_tile, triton_tile
from tests.helpers.block_plans import PlanShape, random_plan
from tests.helpers.fakes import H100, machine_with
from tests.helpers.inputs import make_qkv


def dense(queries: int = 64, keys: int = 64, *, causal: bool = False) -> BlockPlan:
    return BlockPlan.dense(
        Blocks.regular(queries, 64), Blocks.regular(keys, 64), "cpu", causal=causal
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"q": torch.zeros(64, 2, 64)}, r"`q` must be \[B, S, H, D\], and S, .* got \[64, 2, 64\]"),
        ({"k": torch.zeros(1, 64, 2, 64).half()}, r"`k` must have q's dtype and device"),
        ({"k": torch.zeros(1, 64, 2, 32)}, r"`k` must be \[1, Sk, Hkv, 64\], got \[1, 64, 2, 32\]"),
        ({"v": torch.zeros(1, 60, 2, 64)}, r"`v` must have the shape of k \[1, 64, 2, 64\]"),
        ({"q": torch.zeros(1, 64, 3, 64)}, "`q` must have a multiple of k's 2 heads, got 3"),
        ({"q": torch.zeros(1, 60, 2, 64)}, "`q` must have the 64 tokens the plan was made for"),
        ({"q": torch.zeros(1, 64, 2, 64).half()}, r"`k` must have q's dtype and device"),
        ({"v": torch.zeros(1, 64, 2, 64).half()}, r"`v` must have q's dtype and device"),
        ({"v": torch.zeros(1, 64, 2, 64, device="meta")}, r"`v` must have q's dtype and device"),
        ({"k": "k"}, "`k` must be a tensor, got str"),
        ({"plan": None}, "`plan` must be a BlockPlan, got NoneType"),
        ({"scale": -1.0}, "`scale` must be positive and finite, got -1.0"),
        ({"scale": True}, "`scale` must be a number or None, got bool"),
        ({"values": ["e4m3"]}, r"`values` must be 16-bit or e4m3, got \['e4m3'\]"),
        ({"values": "int4"}, "`values` must be 16-bit or e4m3, got 'int4'"),
        ({"mean": torch.zeros(1, 2, 32)}, r"`mean` must be float32 \[1, 2, 64\]"),
        ({"kernel": "tritom"}, r"`kernel` must be one of auto, gluon, .* did you mean 'triton'\?"),
        ({"kernel": "gluon"}, "kernel 'gluon' of 8-bit attention cannot serve this call"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(change: dict[str, object], rule: str) -> None:
    q, k, v = make_qkv(1, 64, 2, 64)
    plan = dense()
    quantized_attention(q, k, v, plan, scale=0.5)  # whose form is known from here on
    arguments = {"q": q, "k": k, "v": v, "plan": plan, **change}
    with pytest.raises(UsageError, match=rule) as caught:
        quantized_attention(**arguments)
    assert "\n" not in str(caught.value)


def test_integers_are_refused() -> None:
    x = torch.zeros(1, 64, 2, 64, dtype=torch.int32)
    with pytest.raises(UsageError, match="`q` must be float16, bfloat16, float32 or float64"):
        quantized_attention(x, x, x, dense())


def test_gradients_are_refused_rather_than_cut() -> None:
    q, k, v = make_qkv(1, 64, 2, 64, requires_grad=True)
    plan = dense()
    with torch.no_grad():
        assert quantized_attention(q, k, v, plan).isfinite().all()
    for inputs in ((q, k, v), (q.detach(), k.detach(), v)):
        with pytest.raises(UsageError, match="must not require grad, 8-bit attention has no"):
            quantized_attention(*inputs, plan)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_tensors_without_memory_of_their_own_are_taken_as_before() -> None:
    q, k, v = make_qkv(1, 64, 2, 64)
    plan = dense()
    wanted = quantized_attention(q, k, v, plan)
    found = torch.func.vmap(lambda x: quantized_attention(x, k, v, plan))(q[None])
    assert torch.equal(found[0], wanted)
    with pytest.raises(UsageError, match="`q` must not require grad"):
        torch.func.grad(lambda x: quantized_attention(x, k, v, plan).sum())(q)


@pytest.mark.parametrize("new_plans", [False, True])
def test_arguments_are_checked_once_per_form(
    monkeypatch: pytest.MonkeyPatch, new_plans: bool
) -> None:
    forms_of.cache_clear()
    checked = []
    original = api.check_arguments
    monkeypatch.setattr(api, "check_arguments", lambda *x: checked.append(x) or original(*x))
    q, k, v = make_qkv(1, 64, 2, 64)
    plan = dense()
    strided = torch.cat((k, k), 3)[..., :64]
    for times, arguments, options in (
        (1, (q, k, v), {}),
        (1, (q.clone(), k, v), {"scale": 0.5, "return_lse": True}),
        (2, (q, strided, v), {}),
        (3, (q, k, v), {"values": "e4m3"}),
        (4, (q, k, v), {"scale": 1}),
        (4, (torch.nn.Parameter(q, requires_grad=False), k, v), {}),
        (5, (q.as_subclass(type("Tagged", (torch.Tensor,), {})), k, v), {}),
    ):
        now = dataclasses.replace(plan) if new_plans else plan
        quantized_attention(*arguments, now, **options)
        assert len(checked) >= times
        del checked[times:]
        assert len(checked) == times


def test_choices_per_row_are_refused() -> None:
    plan = random_plan(PlanShape(num_kv=2, row_bits=True), seed=0)
    q, k, v = make_qkv(1, plan.q.total, 2, 64, num_keys=plan.kv.total)
    with pytest.raises(UsageError, match="`plan` must be without row bits for 8-bit attention"):
        quantized_attention(q, k, v, plan)


def test_key_blocks_of_their_own_for_heads_that_share_keys_are_refused() -> None:
    plan = random_plan(PlanShape(heads=4, kv_form="ragged"), seed=0)
    q, k, v = make_qkv(1, plan.q.total, 4, 64, num_keys=plan.kv.total, num_kv_heads=2)
    with pytest.raises(UsageError, match="`plan` must cut keys alike for the query heads"):
        quantized_attention(q, k, v, plan)


@pytest.fixture
def with_triton() -> Iterator[None]:
    with machine_with({"triton": "3.6.0"}):
        yield


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "gluon"),
        ({"e4m3": True}, "gluon"),
        ({"causal": True}, "triton"),
        ({"capability": (8, 0)}, "triton"),
        ({"capability": (8, 9)}, "triton"),
        ({"capability": (12, 0)}, "triton"),
        ({"platform": "cpu", "capability": None}, "reference"),
    ],
)
@pytest.mark.usefixtures("with_triton")
def test_the_fastest_kernel_that_can_is_taken(changes: dict[str, object], expected: str) -> None:
    assert choose(QUANTIZED, "auto", H100._replace(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 256}, "needs head size <= 128, multiple of 8, got 256"),
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({"capability": (7, 5)}, "needs compute capability >= 8.0, this GPU has 7.5"),
        ({"platform": "rocm", "capability": None}, "needs platform cuda, this is rocm"),
        (
            {"capability": (8, 0), "e4m3": True},
            "needs compute capability >= 8.9 for e4m3 values, this GPU has 8.0",
        ),
        (
            {"causal": True, "q_size": 96},
            "needs blocks of a multiple of 64 queries and keys to be causal",
        ),
    ],
)
@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.usefixtures("with_triton")
def test_what_no_gpu_kernel_can_do_is_refused_in_one_line(
    changes: dict[str, object], reason: str, kernel: str
) -> None:
    with pytest.raises(UnsupportedBackendError, match=reason.replace("(", r"\(")) as caught:
        choose(QUANTIZED, kernel, H100._replace(**changes))
    assert "\n" not in str(caught.value)


def test_triton_without_what_gluon_needs_leaves_the_portable_kernel() -> None:
    with machine_with({"triton": "3.5.1"}):
        assert choose(QUANTIZED, "auto", H100) == "triton"
    with (
        machine_with({}),
        pytest.raises(UnsupportedBackendError, match="needs the package triton, which is not ins"),
    ):
        choose(QUANTIZED, "auto", H100)


def test_on_the_cpu_the_reference_runs() -> None:
    assert choose(QUANTIZED, "auto", H100._replace(platform="cpu", capability=None)) == "reference"


@pytest.mark.parametrize(("size", "tile", "slots"), [(128, 64, 128), (90, 64, 128), (64, 128, 128)])
def test_every_block_gets_whole_tiles(size: int, tile: int, slots: int) -> None:
    blocks = Blocks.regular(3 * size + 5, size)
    found = slots_of(blocks, tile)
    assert found.size == slots
    assert found.total % tile == 0
    assert found.total >= (blocks.total if found.in_place else 4 * slots)
    assert found.in_place == (size % tile == 0)


def test_a_plan_is_put_into_slots_once() -> None:
    plan = random_plan(PlanShape(kv_size=90, kv_form="ragged"), seed=1)
    slotted = in_slots(plan, 64)
    assert slotted.kv.size == 128
    assert in_slots(plan, 64) is slotted
    aligned = dense()
    assert in_slots(aligned, 64) is aligned


@pytest.mark.parametrize("q_size", [16, 64, 128, 384])
@pytest.mark.parametrize("kv_size", [64, 90, 128, 384])
def test_every_block_size_has_a_tile(q_size: int, kv_size: int) -> None:
    for e4m3 in (True, False):
        tile = gluon_tile(q_size=q_size, kv_size=kv_size, regular=True, e4m3=e4m3)
        assert tile.e4m3 == e4m3
        assert tile.fast == (not e4m3), "e4m3 weights need the maximum of the row"
        assert tile.rows == (64 if q_size <= 64 else 128)
    assert triton_tile(q_size=q_size).rows == (64 if q_size <= 64 else 128)
