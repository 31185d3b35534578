"""8-bit attention on a GPU: every kernel against the definition, and layers against 16 bits."""

import dataclasses
import itertools
import math

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.api import refresh_plan
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.engine import QUANTIZED, choose
from multimodal_gen.kernels.launch.launcher import form_of
from multimodal_gen.kernels.quantized_attention.api import _checked, quantized_attention
from multimodal_gen.kernels.quantized_attention.packed import Kind, Packed, slots_of
from multimodal_gen.kernels.quantized_attention.reference import (
    key_mean_reference,
    quantise_reference,
)
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttnConfig
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.methods.sla import SageSLAConfig, SLAConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.subblock import SubblockConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.managers.forward_context import TextSpan, set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.block_plans import FORMS, PlanShape, random_plan
from tests.helpers.inputs import QKV, make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import QUANTISED_MAX_RELATIVE_L1, QUANTISED_MIN_COSINE

KERNELS = [("gluon", "16-bit"), ("gluon", "e4m3"), ("triton", "16-bit"), ("triton", "e4m3")]
kernels = pytest.mark.parametrize(("kernel", "values"), KERNELS, ids=[" ".join(k) for k in KERNELS])


def skip_without(qkv: QKV, plan: BlockPlan, kernel: str, values: str) -> None:
    try:
        choose(QUANTIZED, kernel, _checked(*qkv, plan, None, values).request)
    except UnsupportedBackendError as error:
        pytest.skip(str(error))


def inputs(
    plan: BlockPlan, *, head_size: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> QKV:
    q = make_qkv(2, plan.q.total, 4, head_size, dtype=dtype, device="cuda", seed=seed).query
    _, k, v = make_qkv(2, plan.kv.total, 2, head_size, dtype=dtype, device="cuda", seed=seed + 1)
    return QKV(q, k, v)


def check(plan: BlockPlan, qkv: QKV, kernel: str, values: str, *, scale: float = 0.1) -> None:
    """Assert that a kernel gives what the definition does, but for what it rounds besides.

    That is the weights, and the scales: the definition has one for 64 keys, some kernels for 128.
    A score then differs by a step of the coarser one, 1/127 of the largest product.
    """
    skip_without(qkv, plan, kernel, values)
    options = {"scale": scale, "values": values, "return_lse": True}
    out, lse = quantized_attention(*qkv, plan, kernel=kernel, **options)
    expected, expected_lse = quantized_attention(*qkv, plan, kernel="reference", **options)
    absolute = QKV(qkv.query, qkv.key, qkv.value.abs())
    bound, _ = quantized_attention(*absolute, plan, kernel="reference", **options)
    bound = bound.double()
    moved = scale * float(qkv.query.abs().max() * 2 * qkv.key.abs().max()) / 127
    rounding = 2.0**-4 if values == "e4m3" else 2.0**-8
    error = (out.double() - expected.double()).abs()
    tiny = 2.0**-18 * plan.kv.total * float(qkv.value.abs().max())
    assert (error <= (3 * rounding + 2 * moved + 2.0**-7) * bound + tiny + 1e-5).all()
    assert error.sum() <= (rounding / 2 + moved / 4 + 2.0**-7) * bound.sum() + 1e-5
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    seen = lse.isfinite()
    torch.testing.assert_close(lse[seen], expected_lse[seen], rtol=1e-5, atol=2 * moved)


@kernels
@pytest.mark.parametrize("q_size", [64, 128])
@pytest.mark.parametrize("kv_size", [64, 90, 128, 384])
@pytest.mark.parametrize("form", FORMS)
def test_every_plan_is_right(
    kernel: str, values: str, form: str, kv_size: int, q_size: int
) -> None:
    for seed, keep in enumerate((0.0, 0.3, 0.6, 1.0)):
        shape = PlanShape(
            batch=2, num_q=5, num_kv=7, q_size=q_size, kv_size=kv_size, q_form=form, kv_form=form,
            keep=keep,
        )  # fmt: skip
        plan = random_plan(shape, seed=seed, device="cuda")
        check(plan, inputs(plan, seed=seed), kernel, values)


@kernels
@pytest.mark.parametrize("head_size", [16, 40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_size_is_right(
    kernel: str, values: str, head_size: int, dtype: torch.dtype
) -> None:
    plan = random_plan(PlanShape(num_q=3, num_kv=5, q_size=128, kv_size=128), seed=2, device="cuda")
    check(plan, inputs(plan, head_size=head_size, dtype=dtype), kernel, values)


@kernels
def test_later_keys_far_above_the_first_are_redone(kernel: str, values: str) -> None:
    """The fixed reference of the first step overflows there."""
    blocks = Blocks.regular(1024, 128)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    q, k, v = inputs(plan)
    k = k.clone()
    k[:, 700:] *= 40
    out, lse = quantized_attention(q, k, v, plan, scale=1.0, kernel=kernel, values=values,
                                   return_lse=True)  # fmt: skip
    assert out.isfinite().all()
    _, exact = reference_attention(q.float(), k.float(), v.float(), scale=1.0)
    largest = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    assert (lse - exact).abs().max() <= 2 / 127 * largest


@kernels
def test_queries_whose_blocks_change_in_place_are_heeded(kernel: str, values: str) -> None:
    starts = torch.tensor([0, 150], dtype=torch.int32, device="cuda").expand(1, 4, -1).clone()
    lengths = torch.full_like(starts, 128)
    q = Blocks.ragged(starts, lengths, total=300, size=128)
    plan = BlockPlan.dense(q, Blocks.regular(300, 128), "cuda")
    qkv = inputs(plan)
    skip_without(qkv, plan, kernel, values)
    for start, length in (([0, 150], [128, 128]), ([128, 0], [90, 100]), ([0, 64], [64, 16])):
        starts.copy_(torch.tensor(start))
        lengths.copy_(torch.tensor(length))
        refresh_plan(plan)
        found, wanted = (
            quantized_attention(*qkv, on, kernel=kernel, values=values)
            for on in (plan, dataclasses.replace(plan))
        )
        assert torch.equal(found, wanted)
        assert int(found.any(-1)[0, :, 0].sum()) == sum(length)


@kernels
def test_equal_calls_give_equal_bits(kernel: str, values: str) -> None:
    plan = random_plan(PlanShape(num_q=5, num_kv=9, q_size=128, kv_size=64), seed=1, device="cuda")
    qkv = inputs(plan)
    skip_without(qkv, plan, kernel, values)
    first, second = (
        quantized_attention(*qkv, plan, kernel=kernel, values=values) for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("head_size", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_quantised_tensors_are_those_of_the_definition(
    head_size: int, dtype: torch.dtype
) -> None:
    from multimodal_gen.kernels.quantized_attention.quantise_kernel import prepare

    plan = random_plan(PlanShape(num_q=5, num_kv=9, q_size=128, kv_size=90, kv_form="ragged"),
                       seed=1, device="cuda")  # fmt: skip
    q, k, v = inputs(plan, head_size=head_size, dtype=dtype)
    # The difference of such keys and their mean does not fit into 16 bits.
    k[..., [3, 30]] += torch.tensor([12.0, -10.0], dtype=dtype, device="cuda")
    qkv = QKV(q, k, v)
    slots = slots_of(plan.q, 128), slots_of(plan.kv, 64)
    mean = key_mean_reference(k, slots[1])
    options = {"e4m3": True, "permuted": True}
    forms = tuple(map(form_of, qkv))
    kinds = (Kind(own_mean, True, True, True) for own_mean in (True, False))
    own, given = (prepare(forms, *slots, kind) for kind in kinds)
    wanted = quantise_reference(*qkv, *slots, scale=0.1, mean=mean, **options)
    assert_alike(own(*qkv, plan, scale=0.1), wanted)
    assert_alike(given(*qkv, plan, scale=0.1, mean=mean), wanted)


def assert_alike(made: Packed, wanted: Packed) -> None:
    for name in ("q_scale", "k_scale", "v_scale", "shift"):
        torch.testing.assert_close(getattr(made, name), getattr(wanted, name), rtol=1e-5, atol=1e-5)
    for name, step in (("q", 1), ("k", 1), ("v", 32)):
        found, expected = (getattr(x, name).float() for x in (made, wanted))
        assert ((found - expected).abs() <= step).all()
        # Only where a quotient lies on a rounding border.
        assert (found != expected).float().mean() < 0.005


def wan_like(tokens: int, value: float, spikes: float = 4.0) -> QKV:
    """Return inputs of the sizes captured from Wan; two channels of K spread `spikes` as far."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def scaled(x: torch.Tensor, rms: float) -> torch.Tensor:
        return (x * rms / x.square().mean().sqrt()).bfloat16()

    gain = torch.ones(128, device="cuda")
    gain[[3, 70]] = spikes
    offset = torch.zeros(128, device="cuda", dtype=torch.bfloat16)
    offset[[3, 70, 90]] = torch.tensor([10.0, -8.0, 12.0], dtype=torch.bfloat16, device="cuda")
    query = scaled(normal(1, tokens, 2, 128), 1.2)
    key = scaled(normal(1, tokens, 2, 128) * gain, 1.25) + offset
    return QKV(query, key, scaled(normal(1, tokens, 2, 128) + 0.5 * normal(1, 1, 2, 128), value))


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    out, exact = out.double(), exact.double()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)
    assert cosine >= QUANTISED_MIN_COSINE
    assert (out - exact).abs().sum() <= QUANTISED_MAX_RELATIVE_L1 * exact.abs().sum()


@kernels
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_inputs_of_wans_sizes_stay_within_the_budget(
    kernel: str, values: str, value: float
) -> None:
    q, k, v = wan_like(4680, value)
    blocks = Blocks.regular(4680, 128)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    skip_without(QKV(q, k, v), plan, kernel, values)
    out = quantized_attention(q, k, v, plan, kernel=kernel, values=values)
    assert_close(out, reference_attention(q, k, v, scale=128**-0.5)[0])


@pytest.mark.parametrize("kernel", ["gluon", "triton"])
@pytest.mark.parametrize("spikes", [1.0, 4.0, 8.0, 16.0])
def test_16_bit_values_meet_the_budget_even_on_values_without_a_mean(
    kernel: str, spikes: float
) -> None:
    q, k, _ = wan_like(4680, 1.0, spikes)
    v = torch.randn(q.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    v = v.bfloat16()
    blocks = Blocks.regular(4680, 128)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    skip_without(QKV(q, k, v), plan, kernel, "16-bit")
    out = quantized_attention(q, k, v, plan, kernel=kernel)
    assert_close(out, reference_attention(q, k, v, scale=128**-0.5)[0])


def test_kernels_on_one_plan_do_not_take_what_another_quantised() -> None:
    shape = PlanShape(batch=2, num_q=3, num_kv=5, q_size=128, kv_size=90, kv_form="ragged")
    plan = random_plan(shape, seed=3, device="cuda")
    qkv, mean = inputs(plan), torch.randn(2, 2, 128, device="cuda")
    calls = list(itertools.product(("triton", "gluon"), ("16-bit", "e4m3"), (None, mean)))
    for _ in range(2):
        for kernel, values, given in calls:
            skip_without(qkv, plan, kernel, values)
            found, wanted = (
                quantized_attention(*qkv, on, kernel=kernel, values=values, mean=given)
                for on in (plan, dataclasses.replace(plan))
            )
            assert torch.equal(found, wanted)


def layer(backend: AttentionBackendEnum, config: object, causal: bool = False) -> LocalAttention:
    asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
    return LocalAttention(
        4,
        128,
        2,
        causal=causal,
        compute_dtype=torch.bfloat16,
        site=LayerSite(name="blocks.0.attn1", layer=0),
        scope=SelectionScope(default=asked, strict=True),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1000), (300, 77), (77, 1000)])
def test_sage_attn_needs_no_package(queries: int, keys: int, causal: bool) -> None:
    q, k, v = make_qkv(2, queries, 4, 128, num_keys=keys, num_kv_heads=2, dtype=torch.bfloat16,
                       device="cuda")  # fmt: skip
    attention = layer(AttentionBackendEnum.SAGE_ATTN, SageAttnConfig(kernel="triton"), causal)
    exact, _ = reference_attention(q, k, v, scale=128**-0.5, causal=causal)
    assert_close(attention(q, k, v), exact)


@pytest.mark.parametrize("text", [None, TextSpan(start=0, length=77)], ids=["video", "joint"])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_sage_sla_attn_is_sla_attn_in_8_bits(ratio: float, text: TextSpan | None) -> None:
    grid = (5, 13, 30)
    tokens = math.prod(grid) + (text.length if text else 0)
    qkv = make_qkv(2, tokens, 4, 128, num_kv_heads=2, dtype=torch.bfloat16, device="cuda")
    layers = (
        layer(AttentionBackendEnum.SAGE_SLA_ATTN, SageSLAConfig(topk_ratio=ratio, dense_above=1.0)),
        layer(AttentionBackendEnum.SLA_ATTN, SLAConfig(topk_ratio=ratio, dense_above=1.0)),
    )
    with set_forward_context(0, latent_grid=grid, text_span=text):
        out, exact = (attention(*qkv) for attention in layers)
    assert_close(out, exact)


VIDEO_SPARSE = AttentionBackendEnum.VIDEO_SPARSE_ATTN, VideoSparseConfig
SOL = AttentionBackendEnum.SOL_ATTN, SolConfig
SUBBLOCK = AttentionBackendEnum.SUBBLOCK_SPARSE_ATTN, SubblockConfig
EVERY_STEP = {"dense_above": 1.0, "dense_steps": None, "dense_layers": None}
IN_BOTH_MODES = {
    "vsa": (VIDEO_SPARSE, {"sparsity": 0.9}),
    "vsa, everything": (VIDEO_SPARSE, {"sparsity": 0.0}),
    "vsa, tail": (VIDEO_SPARSE, {"sparsity": 0.9, "tail": "pooled"}),
    "vsa of 256": (VIDEO_SPARSE, {"sparsity": 0.5, "tile_size": (4, 8, 8)}),
    "sol": (SOL, {"topk_ratio": 0.1}),
    "sol, no tail": (SOL, {"tau": 1.0, "tail": "none"}),
    "sol of 128": (SOL, {"topk_ratio": 0.2, "block_size": 128}),
    "subblock": (SUBBLOCK, {"sparsity": 0.5, "skip_first_steps": 0, "min_seq_len": 0}),
}


@pytest.mark.parametrize("kernel", ["gluon", "triton"])
@pytest.mark.parametrize("text", [None, TextSpan(start=0, length=77)], ids=["video", "joint"])
@pytest.mark.parametrize("name", IN_BOTH_MODES)
def test_blocks_of_a_method_are_attended_to_in_8_bits(
    name: str, text: TextSpan | None, kernel: str
) -> None:
    """Copies of a few heads at a time, on two streams, where tiles move tokens."""
    (backend, config_cls), given = IN_BOTH_MODES[name]
    grid = (9, 26, 30)
    tokens = math.prod(grid) + (text.length if text else 0)
    qkv = make_qkv(2, tokens, 4, 128, num_kv_heads=2, dtype=torch.bfloat16, device="cuda")
    outs = []
    for mode in ("sage_bf16", "bf16"):
        config = config_cls(**{**EVERY_STEP, **given}, compute_mode=mode, kernel=kernel)
        attention = layer(backend, config)
        with torch.no_grad(), set_forward_context(0, latent_grid=grid, text_span=text):
            outs.append(attention(*qkv))
        variant = attention.report().entries[0].selection.variant
        assert variant == (f"{kernel}_sage" if mode == "sage_bf16" else kernel)
        assert not attention.attn_impl.kernel.fallbacks()
    assert_close(*outs)
    assert not torch.equal(*outs), "nothing was quantised"


@kernels
@pytest.mark.parametrize("size", [64, 128])
def test_queries_and_keys_of_zeros_give_the_mean_of_values(
    kernel: str, values: str, size: int
) -> None:
    """Also where a block ends in keys that are masked."""
    blocks = Blocks.regular(1000, size)
    plan = BlockPlan.dense(blocks, blocks, "cuda")
    value = make_qkv(2, 1000, 4, 128, dtype=torch.bfloat16, device="cuda").value
    skip_without(QKV(value, value, value), plan, kernel, values)
    zeros = torch.zeros_like(value)
    out = quantized_attention(zeros, zeros, value, plan, kernel=kernel, values=values)
    mean = value.double().mean(1, keepdim=True)
    # 16-bit and e4m3 numbers err by up to 2^-8 and 2^-4 of themselves, each in its own direction.
    bound = (2**-4 if values == "e4m3" else 2**-8) * value.double().abs().mean(1, keepdim=True)
    assert ((out.double() - mean).abs() <= bound).all()


def test_a_plan_with_empty_rows_gives_zeros() -> None:
    plan = random_plan(PlanShape(num_q=4, num_kv=6, q_size=128, kv_size=64), seed=3, device="cuda")
    counts = plan.counts.clone()
    counts[..., 1:3] = 0
    plan = dataclasses.replace(plan, counts=counts)
    out, lse = quantized_attention(*inputs(plan), plan, return_lse=True)
    assert (out[:, 128:384] == 0).all()
    assert (lse[..., 128:384] == -torch.inf).all()
