"""What block_sparse_attention refuses, which kernel it takes, and that it compiles."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.block_sparse import api
from multimodal_gen.kernels.block_sparse.api import (
    block_sparse_attention,
    kernel_for,
    request_for,
)
from multimodal_gen.kernels.block_sparse.call import forms_of
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import BLOCK_SPARSE, Request, SelectedKernel, choose
from tests.helpers.block_plans import PlanShape, random_plan
from tests.helpers.fakes import H100, machine_with
from tests.helpers.inputs import make_qkv

PLAN = BlockPlan.dense(Blocks.regular(20, 16), Blocks.regular(30, 16), "cpu")
Q, K, V = make_qkv(2, 20, 4, 8, num_keys=30, num_kv_heads=2)
HOPPER = {"triton": "3.6.0", "flash-attn-4": "4.0.0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"`q` must be \[B, S, H, D\], .* got \[20, 4, 8\]"),
        ({"k": K.half()}, r"`k` must have q's dtype and device \(torch.float32, cpu\)"),
        ({"q": Q.half()}, r"`k` must have q's dtype and device \(torch.float16, cpu\)"),
        ({"v": V.half()}, r"`v` must have q's dtype and device \(torch.float32, cpu\)"),
        ({"k": K.to("meta")}, "`k` must have q's dtype and device"),
        ({"v": V.to("meta")}, "`v` must have q's dtype and device"),
        ({"k": K[..., :4]}, r"`k` must be \[2, Sk, Hkv, 8\], got"),
        ({"k": K[:1]}, r"`k` must be \[2, Sk, Hkv, 8\], got"),
        ({"v": V[:, :29]}, "`v` must have the shape of k"),
        ({"q": Q[:, :, :3]}, "`q` must have a multiple of k's 2 heads, got 3"),
        ({"q": Q[:, :19]}, "`q` must have the 20 tokens the plan was made for, got 19"),
        ({"k": K[:, :29], "v": V[:, :29]}, "`k` must have the 30 tokens the plan was made for"),
        ({"q": [1.0]}, "`q` must be a tensor, got list"),
        ({"plan": None}, "`plan` must be a BlockPlan, got NoneType"),
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, r"`k` must be .* at least 1, got \[2, 30, 0, 8\]"),
        ({"q": Q[..., :0]}, r"`q` must be .* at least 1, got \[2, 20, 4, 0\]"),
        ({"tail": "pooled"}, "`tail` must be a PooledTail or None, got str"),
        ({"scale": "1"}, "`scale` must be a number or None, got str"),
        ({"scale": True}, "`scale` must be a number or None, got bool"),
        ({"scale": 0.0}, "`scale` must be positive and finite, got 0.0"),
        ({"scale": float("inf")}, "`scale` must be positive and finite, got inf"),
        ({"plan": PLAN.to("meta")}, r"`plan` must be on the device of q \(cpu\), got meta"),
        ({"q": Q.int(), "k": K.int(), "v": V.int()}, "`q` must be float16, bfloat16"),
        (
            {"plan": random_plan(PlanShape(batch=3, q_size=10, kv_size=10), seed=0)},
            "tokens the plan was made for",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arguments: dict[str, object], message: str) -> None:
    block_sparse_attention(Q, K, V, PLAN)  # whose form is known from here on
    fields = {"q": Q, "k": K, "v": V, "plan": PLAN} | arguments
    with pytest.raises(UsageError, match=message):
        block_sparse_attention(**fields)


def test_an_empty_batch_gives_an_empty_output() -> None:
    out, lse = block_sparse_attention(Q[:0], K[:0], V[:0], PLAN, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 20, 4, 8), (0, 4, 20), torch.float32)


@pytest.mark.parametrize(("shape", "name"), [((3, 1), "batch"), ((1, 3), "heads")])
def test_a_plan_for_another_batch_or_other_heads_is_refused(
    shape: tuple[int, int], name: str
) -> None:
    plan = BlockPlan(
        indices=PLAN.indices.expand(*shape, -1, -1),
        counts=PLAN.counts.expand(*shape, -1),
        q=PLAN.q,
        kv=PLAN.kv,
    )
    with pytest.raises(UsageError, match=rf"`plan` must have 1 or [24] as {name}, got 3"):
        block_sparse_attention(Q, K, V, plan)


def test_an_unknown_kernel_is_named_with_the_valid_ones() -> None:
    with pytest.raises(
        UnsupportedBackendError, match=r"`kernel` must be one of auto, .*'trtion'.*'triton'"
    ):
        block_sparse_attention(Q, K, V, PLAN, kernel="trtion")


def test_auto_on_the_cpu_is_the_reference() -> None:
    assert kernel_for(Q, K, V, PLAN) == "reference"


@pytest.fixture
def with_triton() -> Iterator[None]:
    """Choose as where triton is installed and compiles, whether it is or not."""
    with machine_with({"triton": "3.9.0"}):
        yield


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({"head_size": 320}, "needs head size <= 256, got 320"),
        ({"capability": (7, 5)}, "needs compute capability >= 8.0, this GPU has 7.5"),
        ({"platform": "mps", "capability": None}, "needs platform cuda or rocm, this is mps"),
    ],
)
def test_triton_says_why_it_cannot_serve(changes: dict[str, object], reason: str) -> None:
    request = H100._replace(**changes)
    with pytest.raises(UnsupportedBackendError, match=reason):
        choose(BLOCK_SPARSE, "triton", request)
    assert choose(BLOCK_SPARSE, "auto", request) == "reference"


def test_triton_is_not_offered_where_it_is_not_installed() -> None:
    with (
        machine_with({}),
        pytest.raises(UnsupportedBackendError, match="needs the package triton, which is not"),
    ):
        choose(BLOCK_SPARSE, "triton", H100)


def test_a_gradient_through_a_kernel_without_backward_is_refused() -> None:
    q = torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16, requires_grad=True)
    plan = BlockPlan.dense(Blocks.regular(128, 128), Blocks.regular(128, 128), "cpu")
    with (
        machine_with(HOPPER),
        pytest.raises(
            UnsupportedBackendError, match="has no backward pass, and an input requires grad"
        ),
    ):
        block_sparse_attention(q, q, q, plan, kernel="fa4")


def test_gradients_are_left_to_a_kernel_that_has_a_backward_pass() -> None:
    training = H100._replace(backward=True)
    with machine_with(HOPPER):
        assert choose(BLOCK_SPARSE, "auto", training) == "gluon"
        assert choose(BLOCK_SPARSE, SelectedKernel("fa4"), training) == "gluon"
        assert choose(BLOCK_SPARSE, "auto", training._replace(causal=True)) == "triton"
        assert choose(BLOCK_SPARSE, "auto", training._replace(dtype=torch.float32)) == "reference"


@pytest.mark.usefixtures("with_triton")
def test_amd_gpus_are_not_measured_by_compute_capability() -> None:
    request = H100._replace(platform="rocm", capability=None)
    assert choose(BLOCK_SPARSE, "triton", request) == "triton"


@pytest.mark.slow_cases("shape1")
@pytest.mark.parametrize("shape", [PlanShape(heads=4), PlanShape(q_form="ragged", row_bits=True)])
def test_it_compiles_without_a_graph_break(shape: PlanShape) -> None:
    plan = random_plan(shape, seed=1).longest_first()
    q, k, v = make_qkv(2, plan.q.total, 4, 8, num_keys=plan.kv.total)

    def run(q: torch.Tensor, plan: BlockPlan) -> torch.Tensor:
        out, lse = block_sparse_attention(q * 2, k, v, plan, return_lse=True)
        return out.sum(1) + lse.exp().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, plan), run(q, plan))


def test_gradients_flow_through_a_compiled_graph() -> None:
    plan = random_plan(PlanShape(heads=4, q_size=16, kv_size=16), seed=1)
    q, k, v = make_qkv(2, plan.q.total, 4, 8, num_keys=plan.kv.total, requires_grad=True)

    def run(q: torch.Tensor) -> torch.Tensor:
        return block_sparse_attention(q * 2, k, v, plan).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (wanted,) = torch.autograd.grad(run(q), q)
    (found,) = torch.autograd.grad(compiled(q), q)
    torch.testing.assert_close(found, wanted)


def test_the_operator_passes_torchs_own_checks() -> None:
    from multimodal_gen.kernels.block_sparse.api import block_sparse_attention_op
    from multimodal_gen.kernels.block_sparse.plan import flatten

    plan = random_plan(PlanShape(heads=4, q_size=16, kv_size=16), seed=1)
    q, k, v = make_qkv(2, plan.q.total, 4, 8, num_keys=plan.kv.total, requires_grad=True)
    torch.library.opcheck(
        block_sparse_attention_op,
        (q, k, v, *flatten(plan), 0.3, True, "auto", False, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def gluon_reasons(request: Request, triton: str = "3.6.0") -> tuple[str, ...]:
    with machine_with({"triton": triton} if triton else {}):
        return BLOCK_SPARSE.kernel("gluon").unsupported_reasons(request)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (10, 0)}, "needs compute capability 9.0, this GPU has 10.0"),
        ({"platform": "rocm", "capability": None}, "needs platform cuda, this is rocm"),
        ({"head_size": 192}, "needs head size <= 128, multiple of 8, got 192"),
        ({"head_size": 36}, "needs head size <= 128, multiple of 8, got 36"),
        ({"causal": True}, "has no causal variant"),
        ({"unaligned": True}, "needs q, k and v in rows of 16 bytes"),
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
    ],
)
def test_gluon_says_why_it_cannot_serve(changes: dict[str, object], reason: str) -> None:
    assert gluon_reasons(H100) == ()
    assert any(reason in text for text in gluon_reasons(H100._replace(**changes)))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.5.1", "needs triton >= 3.6, found 3.5.1 (pip install 'torch>=2.10')"),
        ("", "needs the package triton, which is not installed (pip install 'torch>=2.10')"),
    ],
)
def test_gluon_wants_a_triton_that_has_what_it_is_written_with(version: str, reason: str) -> None:
    assert gluon_reasons(H100, version) == (reason,)


def test_gluon_wants_to_know_the_version_of_triton() -> None:
    reason = BLOCK_SPARSE.kernel("gluon").packages[0].unsupported_reason("")
    assert reason == "needs a known version of triton, found none (pip install 'torch>=2.10')"


@pytest.mark.parametrize(
    ("make", "aligned"),
    [
        (lambda: torch.zeros(2, 5, 3, 16).half(), True),
        (lambda: torch.zeros(2, 5, 3, 3, 16).half()[:, :, 1], True),
        (lambda: torch.zeros(2, 3, 5, 16).half().transpose(1, 2), True),
        (lambda: torch.zeros(2, 5, 3, 20).half(), False),
        (lambda: torch.zeros(2, 5, 16, 3).half().transpose(2, 3), False),
        (lambda: torch.zeros(1, 5, 3, 17).half()[..., 1:], False),
        (lambda: torch.zeros(1, 5, 3, 16).half().expand(2, -1, -1, -1), False),
    ],
    ids=["contiguous", "packed", "head first", "odd rows", "strided", "offset", "expanded"],
)
def test_what_the_copy_engine_can_read_is_recognised(make: object, aligned: bool) -> None:
    q = make()  # type: ignore[operator]
    plan = BlockPlan.dense(Blocks.regular(5, 5), Blocks.regular(5, 5), "cpu")
    assert request_for(q, q, q, plan, backward=False).unaligned is not aligned


@pytest.mark.parametrize("new_plans", [False, True])
def test_what_the_choice_depends_on_is_looked_up_once_per_form(
    monkeypatch: pytest.MonkeyPatch, new_plans: bool
) -> None:
    forms_of.cache_clear()
    plan = BlockPlan.dense(Blocks.regular(20, 16), Blocks.regular(30, 16), "cpu")
    found: list[Request] = []
    monkeypatch.setattr(
        api, "request_for", lambda *a, **b: found.append(request_for(*a, **b)) or found[-1]
    )
    k = make_qkv(2, 20, 4, 9, num_keys=30, num_kv_heads=2).key[..., 1:]
    offset = torch.cat((K.new_zeros(1), K.flatten()))[1:].view(K.shape)
    for wanted, arguments in (
        (1, (Q, K, V)),
        (1, (Q.clone(), K, V)),
        (2, (Q, k, V)),
        (3, (Q, offset, V)),
        (4, (Q.clone().requires_grad_(), K, V)),
        (4, (Q, K, V)),
        (4, (torch.nn.Parameter(Q, requires_grad=False), K, V)),
        (5, tuple(x.bfloat16() for x in (Q, K, V))),
    ):
        block_sparse_attention(*arguments, replace(plan) if new_plans else plan)
        assert len(found) == wanted
    assert [(r.unaligned, r.backward, r.dtype) for r in found] == [
        (False, False, torch.float32),
        (True, False, torch.float32),
        (True, False, torch.float32),
        (False, True, torch.float32),
        (False, False, torch.bfloat16),
    ]
    with pytest.raises(UsageError, match="`scale` must be positive"):
        block_sparse_attention(Q, K, V, plan, scale=-1.0)


def test_a_kernel_that_was_selected_runs_where_it_can() -> None:
    kernel = SelectedKernel("fa4")
    with machine_with(HOPPER):
        assert choose(BLOCK_SPARSE, "auto", H100) == "gluon"
        assert choose(BLOCK_SPARSE, kernel, H100) == "fa4"
    assert not kernel.fallbacks()


def test_calls_that_a_selected_kernel_cannot_serve_are_served_and_counted() -> None:
    kernel = SelectedKernel("fa4")
    with machine_with(HOPPER):
        for _ in range(2):
            kernel.begin_call()
            for _ in range(3):  # heads in turns
                assert choose(BLOCK_SPARSE, kernel, H100._replace(ragged=True)) == "gluon"
        kernel.begin_call()
        assert choose(BLOCK_SPARSE, kernel, H100._replace(causal=True)) == "triton"
        assert choose(BLOCK_SPARSE, kernel, H100) == "fa4"
    assert kernel.fallbacks() == {
        ("gluon", "fa4 needs regular blocks, and the plan's have lengths of their own"): 2,
        ("triton", "fa4 has no causal variant, and the plan is causal"): 1,
    }


def test_a_kernel_that_a_user_named_refuses_what_it_cannot_serve() -> None:
    kernel = SelectedKernel("fa4", named=True)
    with (
        machine_with(HOPPER),
        pytest.raises(UnsupportedBackendError, match=r"kernel 'fa4' .* regular blocks"),
    ):
        choose(BLOCK_SPARSE, kernel, H100._replace(ragged=True))
    assert not kernel.fallbacks()
