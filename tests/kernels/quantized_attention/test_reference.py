"""The definition against the papers' formulas, and against exact attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.quantized_attention.packed import rotation, slots_of
from multimodal_gen.kernels.quantized_attention.reference import (
    key_mean_reference,
    quantise_reference,
    shrink_reference,
)
from tests.helpers.block_plans import PlanShape, dense_mask, random_plan
from tests.helpers.drawn import plan_shapes
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget
from tests.kernels.quantized_attention.naive import naive_quantised, rotate

# What the reference provider cuts keys into.
TILE = 64

SHAPES = plan_shapes(num_kv=3, q_size=(16, 64, 100), kv_size=(16, 64, 90, 128))


@given(SHAPES, st.integers(0, 2**16), st.booleans(), st.sampled_from([24, 64, 72]), st.booleans())
@settings(max_examples=8, deadline=None)
def test_the_reference_is_what_the_papers_say(
    shape: PlanShape, seed: int, e4m3: bool, head_size: int, offset: bool
) -> None:
    plan = random_plan(shape, seed=seed)
    q = make_qkv(2, plan.q.total, 4, head_size, seed=seed).query
    if offset:
        q += 3 * torch.linspace(-1, 1, head_size)
    _, k, v = make_qkv(2, plan.kv.total, 2, head_size, seed=seed + 1)
    values = "e4m3" if e4m3 else "16-bit"
    out, lse = quantized_attention(q, k, v, plan, scale=0.1, values=values, return_lse=True)
    expected, expected_lse, bound = naive_quantised(q, k, v, plan, 0.1, tile=TILE, e4m3=e4m3)
    blind = expected_lse == -torch.inf
    assert (lse[blind] == -torch.inf).all()
    # A quotient may lie on either side of a rounding border in fp32: a few of the terms of a score
    # then move by one step, 1/127 of the row's range on one side and of the tile's on the other.
    largest = q.abs().max() * 2 * k.abs().max()
    moved = 4 * 0.1 * float(largest) / 127
    error = (lse.double() - expected_lse)[~blind].abs()
    assert (error <= moved).all()
    # So may a value, by the distance of two e4m3 numbers.
    slack = moved + (2**-3 if e4m3 else 2**-8)
    assert ((out.double() - expected).abs() <= slack * bound + 1e-6).all()
    assert ((out.double() - expected).abs().sum() <= 2e-3 * bound.sum() + 1e-6).all()


def wan_like(
    tokens: int, heads: int, *, value: float, spikes: float = 4.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of the sizes captured from Wan: rms 1.2, 1.25 and `value`.

    Keys have two channels that spread `spikes` as far as others and an offset in common; values
    have a mean per channel and change slowly along the sequence, as those of neighbouring patches.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def scaled(x: torch.Tensor, rms: float) -> torch.Tensor:
        return (x * rms / x.square().mean().sqrt()).bfloat16()

    query = scaled(normal(1, tokens, heads, 128), 1.2)
    gain = torch.ones(128)
    gain[[3, 70]] = spikes
    key = scaled(normal(1, tokens, heads, 128) * gain, 1.25)
    key[..., [3, 70, 90]] += torch.tensor([10.0, -8.0, 12.0], dtype=torch.bfloat16)
    smooth = torch.nn.functional.interpolate(
        normal(heads, 128, tokens // 256), size=tokens, mode="linear"
    ).permute(2, 0, 1)
    values = normal(1, tokens, heads, 128) + smooth + 0.5 * normal(1, 1, heads, 128)
    return query, key, scaled(values, value)


@pytest.mark.slow_cases("1.0-16-bit", "1.0-e4m3")
@pytest.mark.parametrize("values", ["e4m3", "16-bit"])
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_inputs_of_wans_sizes_stay_within_the_budget_of_8_bits(value: float, values: str) -> None:
    q, k, v = wan_like(1536, 2, value=value)
    blocks = Blocks.regular(1536, 128)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    out = quantized_attention(q, k, v, plan, values=values)
    assert_within_error_budget(out, q, k, v, scale=128**-0.5, quantised=True)


def spiky(
    spikes: float, *, head_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BlockPlan]:
    """Return inputs like those, but for values without a mean, which hides errors of weights."""
    q, k, _ = (x[..., :head_size] for x in wan_like(1536, 2, value=1.0, spikes=spikes))
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocks = Blocks.regular(1536, 128)
    return q, k, v, BlockPlan.dense(blocks, blocks, "cpu")


@pytest.mark.slow_cases("1.0-128", "4.0-96")
@pytest.mark.parametrize(
    ("spikes", "head_size"),
    [
        pytest.param(spikes, head_size, marks=[] if i == j else [pytest.mark.slow])
        for i, spikes in enumerate((1.0, 4.0, 16.0))
        for j, head_size in enumerate((128, 96, 72))
    ],
)
def test_channels_of_the_keys_that_stand_out_stay_within_the_budget(
    spikes: float, head_size: int
) -> None:
    q, k, v, plan = spiky(spikes, head_size=head_size)
    scale = head_size**-0.5
    out = quantized_attention(q, k, v, plan, scale=scale)
    assert_within_error_budget(out, q, k, v, scale=scale, quantised=True)


def test_the_rotation_is_what_keeps_channels_that_stand_out_harmless() -> None:
    q, k, v, plan = (x.float() if isinstance(x, torch.Tensor) else x for x in spiky(4.0))
    # Rotated twice is not rotated.
    rough = quantized_attention(rotate(q), rotate(k), v, plan)
    with pytest.raises(AssertionError, match="relative L1 error is"):
        assert_within_error_budget(rough, q, k, v, scale=128**-0.5, quantised=True)


@pytest.mark.parametrize("width", [64, 128])
def test_the_rotation_is_orthogonal(width: int) -> None:
    matrix = rotation(width, torch.bfloat16, torch.device("cpu")).double()
    torch.testing.assert_close(matrix @ matrix, width * torch.eye(width).double())
    torch.testing.assert_close(matrix, rotate(torch.eye(width).double()) * width**0.5)


def test_smoothing_is_what_keeps_an_offset_of_the_keys_harmless() -> None:
    q, k, v = make_qkv(1, 512, 2, 64, dtype=torch.bfloat16)
    far = k + 20
    blocks = Blocks.regular(512, 64)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    out = quantized_attention(q, far, v, plan, scale=0.125)
    assert_within_error_budget(out, q, far, v, scale=0.125, quantised=True)
    no_mean = torch.zeros(1, 2, 64)
    rough = quantized_attention(q, far, v, plan, scale=0.125, mean=no_mean)
    with pytest.raises(AssertionError, match="cosine similarity is"):
        assert_within_error_budget(rough, q, far, v, scale=0.125, quantised=True)


def test_what_queries_have_in_common_costs_few_bits() -> None:
    shape, scale = (1, 2048, 4, 128), 128**-0.5
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    blocks = Blocks.regular(2048, 128)
    plan = BlockPlan.dense(blocks, blocks, "cpu")

    def error(q: torch.Tensor, k: torch.Tensor) -> float:
        query, key, value = (x.double().transpose(1, 2) for x in (q, k, v))
        truth = ((query @ key.mT * scale).softmax(-1) @ value).transpose(1, 2)
        out = quantized_attention(q, k, v, plan, scale=scale)
        return float((out - truth).norm() / truth.norm())

    plain = error(q, k)
    for of_queries in (1, 2, 4):
        far = (
            x + size * torch.randn(1, 1, 4, 128, generator=generator)
            for x, size in ((q, of_queries), (k, 3))
        )
        assert error(*far) < 1.25 * plain < 1.5e-2
    slots = slots_of(blocks, 64)
    assert not shrink_reference(q, k, key_mean_reference(k, slots), slots, slots).any()


@pytest.mark.parametrize("value", [0.0, 1.0, 1e4])
def test_queries_that_are_all_the_same_are_no_trouble(value: float) -> None:
    q, k, v = make_qkv(1, 100, 2, 64)
    q = torch.full_like(q, value)
    blocks = Blocks.regular(100, 64)
    out = quantized_attention(q, k, v, BlockPlan.dense(blocks, blocks, "cpu"), scale=1e-9)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=0.0, atol=1e-3)


def test_a_query_that_is_not_finite_spoils_its_own_row_alone() -> None:
    q, k, v = make_qkv(1, 100, 2, 64)
    q += 3 * torch.linspace(-1, 1, 64)
    blocks = Blocks.regular(100, 64)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    whole = quantized_attention(q, k, v, plan)
    q[:, 7] = torch.inf
    spoilt = quantized_attention(q, k, v, plan)
    rest = torch.arange(100) != 7
    assert (spoilt - whole)[:, rest].norm() < 0.03 * whole.norm()


def test_lse_is_that_of_the_keys_as_they_were() -> None:
    q, k, v = make_qkv(2, 200, 4, 64, num_kv_heads=2)
    blocks = Blocks.regular(200, 64)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    far = k + 5
    _, lse = quantized_attention(q, far, v, plan, scale=0.1, return_lse=True)
    _, exact = reference_attention(q, far, v, scale=0.1)
    step = 1 / 127
    largest = 0.1 * q.norm(dim=-1).max() * (far - far.mean(1, keepdim=True)).norm(dim=-1).max()
    assert (lse - exact).abs().max() <= 2 * step * largest


def test_scales_of_zeros_have_a_product_that_no_gpu_takes_for_zero() -> None:
    q, k, v = (torch.zeros(1, 100, 2, 64) for _ in range(3))
    slots = slots_of(Blocks.regular(100, 64), 64)
    packed = quantise_reference(
        q, k, v, slots, slots, scale=1e-3, mean=torch.zeros(1, 2, 64), e4m3=False, permuted=False
    )
    assert packed.q_scale.min() * packed.k_scale.min() >= torch.finfo(torch.float32).tiny


@given(st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_the_order_of_keys_within_a_tile_does_not_matter(seed: int) -> None:
    q, k, v = make_qkv(1, 96, 2, 64, seed=seed)
    blocks = Blocks.regular(96, 64)
    plan = BlockPlan.dense(blocks, blocks, "cpu")
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(64, generator=generator), 64 + torch.arange(32)])
    mean = k.mean(1)
    out = quantized_attention(q, k, v, plan, mean=mean)
    moved = quantized_attention(q, k[:, order], v[:, order], plan, mean=mean)
    torch.testing.assert_close(out, moved, rtol=1e-5, atol=1e-5)


def test_keys_outside_every_block_may_hold_anything() -> None:
    q, k, v = make_qkv(1, 64, 2, 64, num_keys=100)
    starts, lengths = torch.tensor([10, 60]).int(), torch.tensor([30, 20]).int()
    kv = Blocks.ragged(starts, lengths, total=100, size=32)
    plan = BlockPlan.dense(Blocks.regular(64, 64), kv, "cpu")
    inside = dense_mask(plan, 1, 1)[0, 0, 0]
    dirty = [x.masked_fill(~inside[None, :, None, None], torch.nan) for x in (k, v)]
    out = quantized_attention(q, k, v, plan)
    assert torch.equal(out, quantized_attention(q, *dirty, plan))
