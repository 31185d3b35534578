"""Which kernel is chosen: for gradients, and for what has a kernel in Triton and a definition."""

import itertools
from collections.abc import Callable

import pytest
import torch

from multimodal_gen.kernels import engine
from multimodal_gen.kernels.block_sparse.api import block_sparse_attention, gradient_kernel
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import (
    BLOCK_SPARSE,
    CELL_CHOICE,
    CHUNK_CHOICE,
    CHUNK_MEANS,
    CODED,
    LINEAR,
    LINEAR_REST,
    MAP_LISTS,
    PART_MERGE,
    ROW_MOVES,
    ROW_ORDER,
    TILE_CHOICE,
    TILE_MEANS,
    TOKEN_MOVES,
    Operation,
    Request,
    SelectedKernel,
    choose_for,
    serves,
)
from tests.helpers.block_plans import PlanShape, random_plan
from tests.helpers.fakes import machine_with
from tests.helpers.inputs import make_qkv

HOPPER = {"triton": "3.6.0", "flash-attn-4": "4.0.0"}
HALF = {torch.float16, torch.bfloat16}
UP_TO_FP32 = HALF | {torch.float32}
FLOATING = UP_TO_FP32 | {torch.float64}


def expected_gradients(kernel: str, q: torch.Tensor, k: torch.Tensor, plan: BlockPlan) -> str:
    """Return what computes gradients where their sums may have any order."""
    padded = any(x.lengths is not None and x.starts is None for x in (plan.q, plan.kv))
    if kernel != "gluon":
        return kernel
    if plan.row_bits is not None or plan.causal or padded or q.shape[2] != k.shape[2]:
        return "triton"
    whole = plan.q.size % 64 == 0 and plan.kv.size % 128 == 0
    regular = plan.q.is_regular and plan.kv.is_regular
    return "gluon_fused" if 64 < q.shape[3] <= 128 and whole and regular else "gluon"


def plans() -> list[BlockPlan]:
    forms = itertools.product(
        ("regular", "padded", "ragged"), ("regular", "padded", "ragged"), (64, 192), (64, 128, 384)
    )
    some = [
        random_plan(PlanShape(q_form=q, kv_form=kv, q_size=rows, kv_size=keys), seed=0)
        for q, kv, rows, keys in forms
    ]
    bits = [
        random_plan(PlanShape(q_size=128, kv_size=128, row_bits=True, q_form=form), seed=0)
        for form in ("regular", "ragged")
    ]
    dense = [
        BlockPlan.dense(Blocks.regular(300, size), Blocks.regular(300, size), "cpu", causal=causal)
        for size, causal in itertools.product((96, 128), (False, True))
    ]
    return [*some, *bits, *dense]


@pytest.mark.parametrize("fixed", [False, True])
def test_gradients_are_computed_by_the_kernel_that_suits_plan_and_tensors(fixed: bool) -> None:
    seen = set()
    with machine_with(HOPPER):
        for plan, kernel, size, dtype, kv_heads in itertools.product(
            plans(), BLOCK_SPARSE.names, (8, 64, 72, 128, 192), HALF | {torch.float32}, (1, 2)
        ):
            q, k = torch.empty(1, 1, 2, size), torch.empty(1, 1, kv_heads, size)
            request = Request(
                platform="cuda",
                capability=(9, 0),
                dtype=dtype,
                head_size=size,
                q_size=plan.q.size,
                kv_size=plan.kv.size,
                ragged=plan.q.lengths is not None or plan.kv.lengths is not None,
                row_bits=plan.row_bits is not None,
                causal=plan.causal,
                backward=True,
            )
            if not serves(BLOCK_SPARSE, kernel, request):
                continue
            found = gradient_kernel(kernel, q, k, plan, request, fixed)
            wanted = expected_gradients(kernel, q, k, plan)
            assert found == ("gluon" if fixed and wanted == "gluon_fused" else wanted)
            seen.add(found)
    assert seen == {"gluon", "triton", "reference", *([] if fixed else ["gluon_fused"])}


def test_a_fixed_order_may_be_asked_for_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks.regular(256, 128)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    q = torch.empty(1, 1, 2, 128)
    request = Request("cuda", (9, 0), torch.bfloat16, 128, 128, 128, backward=True)
    with machine_with(HOPPER):
        assert gradient_kernel("gluon", q, q, plan, request, fixed=False) == "gluon_fused"
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert gradient_kernel("gluon", q, q, plan, request, fixed=False) == "gluon"


def test_kernels_serve_gradients_where_another_computes_them() -> None:
    for kernel in BLOCK_SPARSE.kernels:
        assert ("backward" in kernel.serves) is (kernel.gradients is not None)


@pytest.mark.parametrize("place", ["cpu", "cuda", "rocm"])
@pytest.mark.parametrize("triton", ["", "2.2.0", "3.6.0"])
@pytest.mark.parametrize(
    ("operation", "dtypes", "trains"),
    [
        (TILE_MEANS, UP_TO_FP32, None),
        (CHUNK_MEANS, HALF, None),
        (ROW_ORDER, {torch.int32}, None),
        (ROW_MOVES, UP_TO_FP32, False),
        (MAP_LISTS, {torch.bool}, None),
        (PART_MERGE, UP_TO_FP32, None),
        (TOKEN_MOVES, FLOATING, False),
        (LINEAR, HALF, False),
    ],
    ids=lambda value: value.label if isinstance(value, Operation) else "",
)
def test_triton_serves_gpus_and_the_definition_the_rest(
    operation: Operation,
    dtypes: set[torch.dtype],
    trains: bool | None,
    triton: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (7, 5) if place == "cuda" else None
    with machine_with({"triton": triton} if triton else {}):
        monkeypatch.setattr(engine, "place_of", lambda device: (place, capability))
        for first, second in itertools.product(FLOATING | {torch.int32, torch.bool}, repeat=2):
            tensors = torch.zeros(1, dtype=first), torch.zeros(1, dtype=second)
            fits = bool(triton) and place != "cpu" and {first, second} <= dtypes
            assert choose_for(operation, *tensors) == ("triton" if fits else "reference")
        if trains is False:
            x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
            assert choose_for(operation, x.detach(), gradients=(x,)) == "reference"
            with torch.no_grad():
                fits = bool(triton) and place != "cpu"
                found = choose_for(operation, x, gradients=(x,))
                assert found == ("triton" if fits else "reference")


Asks = Callable[[torch.Tensor], str]


@pytest.mark.parametrize(
    ("asks", "chosen"),
    [
        (lambda x: choose_for(TILE_CHOICE, x, num_kv=2**15), "triton"),
        (lambda x: choose_for(TILE_CHOICE, x, num_kv=2**15 + 1), "reference"),
        (lambda x: choose_for(TILE_CHOICE, x.float(), num_kv=9), "triton"),
        (lambda x: choose_for(CELL_CHOICE, x, num_kv=2**15, head_size=256), "triton"),
        (lambda x: choose_for(CELL_CHOICE, x, num_kv=2**15 + 1, head_size=64), "reference"),
        (lambda x: choose_for(CELL_CHOICE, x, num_kv=9, head_size=257), "reference"),
        (lambda x: choose_for(CELL_CHOICE, x.float(), num_kv=9, head_size=64), "reference"),
        (lambda x: choose_for(CHUNK_CHOICE, x, num_kv=1024), "triton"),
        (lambda x: choose_for(CHUNK_CHOICE, x, num_kv=1025), "reference"),
        (lambda x: choose_for(CHUNK_CHOICE, x, num_kv=9, together=True), "reference"),
        (lambda x: choose_for(CODED, x, head_size=256), "triton"),
        (lambda x: choose_for(CODED, x, head_size=264), "reference"),
        (lambda x: choose_for(CODED, x.float(), head_size=64), "reference"),
        (lambda x: choose_for(PART_MERGE, x, exact=True), "reference"),
        (lambda x: choose_for(LINEAR, x, kv_size=16), "triton"),
        (lambda x: choose_for(LINEAR, x, kv_size=48), "reference"),
        (lambda x: choose_for(LINEAR_REST, x, kv_size=256, head_size=128), "triton"),
        (lambda x: choose_for(LINEAR_REST, x, kv_size=512, head_size=128), "reference"),
        (lambda x: choose_for(LINEAR_REST, x, kv_size=64, head_size=136), "reference"),
    ],
)
def test_what_does_not_fit_into_registers_is_left_to_the_definition(
    asks: Asks, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine_with({"triton": "3.6.0"}):
        monkeypatch.setattr(engine, "place_of", lambda device: ("cuda", (9, 0)))
        assert asks(torch.zeros(1, dtype=torch.bfloat16)) == chosen


@pytest.mark.parametrize("selected", [False, True])
def test_what_computed_gradients_is_noted_where_a_layer_selected_the_kernel(selected: bool) -> None:
    plan = random_plan(PlanShape(heads=4, q_size=16, kv_size=16), seed=1)
    q, k, v = make_qkv(2, plan.q.total, 4, 8, num_keys=plan.kv.total, requires_grad=True)
    kernel = SelectedKernel("reference")
    out = block_sparse_attention(q, k, v, plan, kernel=kernel if selected else "reference")
    assert kernel.gradients() == set()
    out.sum().backward()
    assert kernel.gradients() == ({"reference"} if selected else set())


def test_gradients_of_a_detour_are_told_apart() -> None:
    kernel = SelectedKernel("fa4")
    kernel.note_gradients("fa4", "one")
    kernel.note("gluon", ("refuses",))
    kernel.note_gradients("gluon", "gluon_fused")
    kernel.note_gradients("gluon", "triton")
    assert kernel.gradients() == {"one"}
    assert kernel.gradients("gluon") == {"gluon_fused", "triton"}
