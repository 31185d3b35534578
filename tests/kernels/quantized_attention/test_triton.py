"""The Triton kernels against the definition: under the interpreter, or on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own:
test_children.py starts it.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.block_sparse.api import refresh_plan
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.launch.launcher import form_of
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.quantized_attention.packed import Kind, Packed, rotation, slots_of
from multimodal_gen.kernels.quantized_attention.reference import (
    key_mean_reference,
    quantise_reference,
    shrink_reference,
)
from tests.helpers.block_plans import PlanShape, random_plan
from tests.helpers.drawn import plan_shapes
from tests.helpers.inputs import QKV, make_qkv

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1; see test_children.py"
)

SHAPES = plan_shapes(num_kv=4, q_size=(16, 64, 128), kv_size=(16, 64, 90, 128))


def inputs(
    plan: BlockPlan, *, heads: int = 2, kv_heads: int = 1, head_size: int = 64, seed: int = 0
) -> QKV:
    q = make_qkv(2, plan.q.total, heads, head_size, dtype=torch.bfloat16, seed=seed).query
    _, k, v = make_qkv(2, plan.kv.total, kv_heads, head_size, dtype=torch.bfloat16, seed=seed + 1)
    return QKV(q, k, v)


def check(plan: BlockPlan, qkv: QKV, *, values: str, scale: float = 0.1) -> None:
    """Assert that the kernel gives what the definition does, but for the rounding of the weights.

    Numbers of e4m3 have 3 bits behind the point and those of bfloat16 7, so a weight errs by at
    most 2^-4 or 2^-8 of itself, and on average by half of that. Below 2^-6, of 448, e4m3 numbers
    are 2^-9 apart: that adds 2^-10 for every key to a sum of at least 2^8. Where a quotient lies on
    a rounding border, one side may round up and the other down: a value then differs by 2^-3, and
    a score by one step, 1/127 of the largest product, though few do.
    """
    options = {"scale": scale, "values": values, "return_lse": True}
    out, lse = quantized_attention(*qkv, plan, kernel="triton", **options)
    expected, expected_lse = quantized_attention(*qkv, plan, kernel="reference", **options)
    absolute = QKV(qkv.query, qkv.key, qkv.value.abs())
    bound, _ = quantized_attention(*absolute, plan, kernel="reference", **options)
    bound = bound.double()
    moved = scale * float(qkv.query.abs().max() * 2 * qkv.key.abs().max()) / 127
    rounding, tiny = (2.0**-4, 2.0**-18) if values == "e4m3" else (2.0**-8, 0.0)
    error = (out.double() - expected.double()).abs()
    # The output is rounded as well, on both sides.
    most = (3 * rounding + moved + 2.0**-7) * bound
    most += tiny * plan.kv.total * float(qkv.value.abs().max()) + 1e-5
    assert (error <= most).all()
    assert error.sum() <= (rounding / 2 + moved / 8 + 2.0**-8) * bound.sum() + 1e-5
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    seen = lse.isfinite()
    torch.testing.assert_close(lse[seen], expected_lse[seen], rtol=1e-5, atol=moved)


@given(
    SHAPES, st.integers(0, 2**16), st.sampled_from([1, 2, 4]), st.sampled_from(["e4m3", "16-bit"])
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_is_right(shape: PlanShape, seed: int, kv_heads: int, values: str) -> None:
    plan = random_plan(shape, seed=seed)
    check(plan, inputs(plan, heads=4, kv_heads=kv_heads, seed=seed), values=values)


@pytest.mark.slow_cases("128-16-bit", "128-e4m3", "96-16-bit")
@pytest.mark.parametrize(
    ("head_size", "values"), [(40, "e4m3"), (96, "16-bit"), (128, "e4m3"), (128, "16-bit")]
)
def test_every_head_size_is_right(head_size: int, values: str) -> None:
    plan = random_plan(PlanShape(num_q=1, num_kv=2, q_size=128, kv_size=128, keep=0.8), seed=2)
    check(plan, inputs(plan, head_size=head_size), values=values)


@pytest.mark.slow_cases("150-100-16-bit")
@pytest.mark.parametrize(("queries", "keys", "values"), [(100, 150, "e4m3"), (150, 100, "16-bit")])
def test_causal_plans_are_right(queries: int, keys: int, values: str) -> None:
    plan = BlockPlan.dense(
        Blocks.regular(queries, 64), Blocks.regular(keys, 64), "cpu", causal=True
    )
    check(plan, inputs(plan), values=values)


@pytest.mark.slow_cases("1.0", "10.0")
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_any_spread_of_the_logits_is_right(scale: float) -> None:
    plan = random_plan(PlanShape(num_kv=4, keep=0.8), seed=11)
    check(plan, inputs(plan), values="e4m3", scale=scale)


def test_values_of_different_sizes_in_every_block_are_right() -> None:
    plan = BlockPlan.dense(Blocks.regular(70, 64), Blocks.regular(300, 64), "cpu")
    q, k, v = inputs(plan)
    size = torch.logspace(-6, 3, 300, base=10.0).view(1, -1, 1, 1)[:, torch.randperm(300)]
    check(plan, QKV(q, k, (v * size).bfloat16()), values="e4m3")


def test_a_single_key_gets_its_whole_weight_exactly() -> None:
    """The largest e4m3 weight must be one that e4m3 has."""
    plan = BlockPlan.dense(Blocks.regular(70, 64), Blocks.regular(1, 64), "cpu")
    q, k, v = inputs(plan)
    v = torch.ones_like(v) * 0.5
    assert (quantized_attention(q, k, v, plan, kernel="triton", values="e4m3") == 0.5).all()


def test_rows_without_keys_are_zero_and_their_lse_is_minus_infinity() -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=4), seed=3)
    counts = plan.counts.clone()
    counts[..., 1] = 0
    plan = dataclasses.replace(plan, counts=counts)
    out, lse = quantized_attention(*inputs(plan), plan, kernel="triton", return_lse=True)
    assert (out[:, 64:128] == 0).all()
    assert (lse[..., 64:128] == -torch.inf).all()
    assert out[:, :64].any()


def test_strided_inputs_are_read_in_place() -> None:
    plan = random_plan(PlanShape(num_kv=4), seed=3)
    packed = torch.randn(2, plan.kv.total, 3, 1, 64).bfloat16()
    q = torch.randn(2, 2, 64, plan.q.total).bfloat16().permute(0, 3, 1, 2)
    _, k, v = packed.unbind(2)
    assert not any(x.is_contiguous() for x in (q, k, v))
    check(plan, QKV(q, k, v), values="e4m3")


@pytest.mark.parametrize(
    "form",
    [
        "ragged",
        pytest.param("regular", marks=pytest.mark.slow),
        pytest.param("padded", marks=pytest.mark.slow),
    ],
)
def test_what_a_plan_keeps_gives_what_a_new_plan_does(form: str) -> None:
    plan = random_plan(PlanShape(batch=1, num_q=1, num_kv=2, q_form=form, kv_form=form), seed=4)
    q, k, v = (x[:1] for x in inputs(plan))
    padded = [torch.cat((x, x), 3)[..., :64] for x in (q, k, v)]
    every = [(q, k, v), (padded[0], k, v), (q, padded[1], v), (q, k, padded[2])]
    every.append(tuple(x.half() for x in (q, k, v)))
    ways = [
        {"scale": 0.1},
        {"scale": 0.2, "return_lse": True},
        {"values": "e4m3", "mean": torch.randn(1, 1, 64)},
    ]

    def run(qkv: tuple[torch.Tensor, ...], on: BlockPlan, way: dict[str, object]) -> torch.Tensor:
        found = quantized_attention(*qkv, on, kernel="triton", **way)
        return found if isinstance(found, torch.Tensor) else torch.cat([x.flatten() for x in found])

    calls = list(itertools.product(every, ways))
    # Values and mean also one without the other.
    calls += [(every[0], {"values": "e4m3"}), (every[0], {"mean": torch.randn(1, 1, 64)})]
    for qkv, way in calls:
        run(qkv, plan, way)
    for qkv, way in calls:
        other = tuple(x * 2 - 1 if x.is_contiguous() else x for x in qkv)
        assert torch.equal(run(other, plan, way), run(other, dataclasses.replace(plan), way))


@pytest.mark.parametrize("shared", [True, False])
def test_lists_and_lengths_that_change_in_place_are_heeded(shared: bool) -> None:
    slots, tokens = 3, 96
    starts = torch.arange(slots, dtype=torch.int32) * tokens
    lengths = torch.full((1, 1 if shared else 2, slots), tokens, dtype=torch.int32)
    lists, counts = torch.zeros(1, 1, 1, slots, dtype=torch.int32), torch.zeros(1, 1, 1).int()
    kv = Blocks.ragged(starts.expand_as(lengths), lengths, total=slots * tokens, size=tokens)
    plan = BlockPlan(indices=lists, counts=counts, q=Blocks.regular(40, 64), kv=kv, uniform=True)
    qkv = QKV(*(x[:1] for x in inputs(plan, kv_heads=2)))
    qkv.key.add_(3.0)  # so that a mean over other keys is another
    for seen, last in (([0, 1, 2], tokens), ([0, 1], tokens), ([1, 2], 10), ([0, 1, 2], 90)):
        lists[..., : len(seen)] = torch.tensor(seen)
        counts.fill_(len(seen))
        lengths.fill_(tokens)
        lengths[..., seen[-1]] = last
        lengths[..., seen[-1] + 1 :] = 0
        refresh_plan(plan)
        for options in ({}, {"values": "e4m3"}):
            found, wanted = (
                quantized_attention(*qkv, on, scale=0.1, kernel="triton", **options)
                for on in (plan, dataclasses.replace(plan))
            )
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("shared", [True, False])
def test_queries_whose_blocks_change_in_place_are_heeded(shared: bool) -> None:
    starts = torch.tensor([0, 40], dtype=torch.int32).expand(1, 1 if shared else 2, -1).clone()
    lengths = torch.full_like(starts, 40)
    plan = BlockPlan.dense(
        Blocks.ragged(starts, lengths, total=80, size=64), Blocks.regular(90, 64), "cpu"
    )
    qkv = QKV(*(x[:1] for x in inputs(plan, kv_heads=2)))
    for start, length in (([0, 40], [40, 40]), ([40, 0], [40, 33]), ([0, 64], [64, 16])):
        starts.copy_(torch.tensor(start))
        lengths.copy_(torch.tensor(length))
        refresh_plan(plan)
        found, wanted = (
            quantized_attention(*qkv, on, scale=0.1, kernel="triton")
            for on in (plan, dataclasses.replace(plan))
        )
        assert torch.equal(found, wanted)
        assert bool(found.any(-1).all()) == (sum(length) == 80)


@pytest.mark.slow_cases(
    "padded-False-40-dtype2-True", "ragged-True-64-dtype3-False", "regular-False-128-dtype1-False"
)
@pytest.mark.parametrize(
    ("form", "permuted", "head_size", "dtype", "offset"),
    [
        ("regular", True, 72, torch.bfloat16, True),
        ("regular", False, 128, torch.bfloat16, False),
        ("padded", False, 40, torch.float16, True),
        ("ragged", True, 64, torch.float16, False),
    ],
)
def test_the_quantising_kernel_makes_what_the_definition_does(
    form: str, permuted: bool, head_size: int, dtype: torch.dtype, offset: bool
) -> None:
    from multimodal_gen.kernels.quantized_attention.quantise_kernel import prepare, prepare_centre

    plan = random_plan(PlanShape(q_size=100, kv_size=90, q_form=form, kv_form=form), seed=5)
    q, k, v = (x.to(dtype) for x in inputs(plan, head_size=head_size))
    # The difference of such keys and their mean does not fit into 16 bits.
    k[..., [3, 30]] += torch.tensor([12.0, -10.0], dtype=dtype)
    if offset:
        q += 6 * torch.linspace(-1, 1, head_size).to(dtype)
    qkv = QKV(q, k, v)
    slots = slots_of(plan.q, 128), slots_of(plan.kv, 64)
    forms = tuple(map(form_of, qkv))
    kinds = (Kind(own_mean, True, True, permuted) for own_mean in (True, False))
    own, given_one = (prepare(forms, *slots, kind) for kind in kinds)
    centre = prepare_centre(*forms[:2], *slots, own_mean=True)(q, k, plan, None)
    matrix = rotation(centre.shape[3], torch.float32, k.device)
    mean, shrink = (centre @ matrix / len(matrix))[..., :head_size].contiguous().unbind(2)
    mean = mean.contiguous()
    torch.testing.assert_close(mean, key_mean_reference(k, slots[1]), rtol=1e-5, atol=1e-5)
    wanted_shrink = shrink_reference(q, k, mean, *slots)
    assert (wanted_shrink.square().sum(-1) > 0.2).all() == offset
    torch.testing.assert_close(shrink * len(matrix) ** 0.5, wanted_shrink, rtol=1e-4, atol=1e-5)
    options = {"scale": 0.1, "e4m3": True, "permuted": permuted}
    wanted = quantise_reference(*qkv, *slots, mean=mean, **options)
    assert_alike(own(*qkv, plan, scale=0.1), wanted)
    assert_alike(given_one(*qkv, plan, scale=0.1, mean=mean), wanted)


def assert_alike(made: Packed, wanted: Packed) -> None:
    for name in ("q_scale", "k_scale", "v_scale", "shift"):
        torch.testing.assert_close(getattr(made, name), getattr(wanted, name))
    for name, step in (("q", 1), ("k", 1), ("v", 32)):
        found, expected = (getattr(x, name).float() for x in (made, wanted))
        assert ((found - expected).abs() <= step).all()
        # Only where a quotient lies on a rounding border.
        assert (found != expected).float().mean() < 0.005


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_a_query_that_is_not_finite_shows_in_its_row_alone() -> None:
    plan = BlockPlan.dense(Blocks.regular(70, 64), Blocks.regular(70, 64), "cpu")
    q, k, v = inputs(plan)
    for offset in (0.0, 3.0):
        far = q + offset * torch.linspace(-1, 1, 64).bfloat16()
        whole = quantized_attention(far, k, v, plan, kernel="triton")
        far[:, 7, :, 3] = torch.inf
        out = quantized_attention(far, k, v, plan, kernel="triton")
        assert not out[:, 7].isfinite().any()
        rest = torch.arange(70) != 7
        assert (out - whole)[:, rest].norm() < 0.03 * whole.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_sums_that_overflow_spoil_nothing_else() -> None:
    plan = BlockPlan.dense(Blocks.regular(100, 64), Blocks.regular(100, 64), "cpu")
    q, k, v = inputs(plan)
    whole = quantized_attention(q, k, v, plan, kernel="triton")
    q[:, 7, :, 3] = 2e38  # a hundred of them, or five, are more than fp32 holds
    out = quantized_attention(q, k, v, plan, kernel="triton")
    rest = torch.arange(100) != 7
    assert (out - whole)[:, rest].norm() < 0.03 * whole.norm()
