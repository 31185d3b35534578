"""`compute_mode: sage_bf16`: the blocks of a method attended to in 8 bits, and what refuses it."""

from dataclasses import replace

import pytest
import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.reference import attention_reference
from multimodal_gen.runtime.layers.attention import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.request import AttentionRequest
from multimodal_gen.runtime.layers.attention.sparse.methods.sol import SolConfig
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseConfig
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from tests.helpers.fakes import FakeDevice, simulated_environment
from tests.helpers.inputs import QKV
from tests.helpers.methods import DEFINED
from tests.helpers.sparse import run_sparse, text_places
from tests.helpers.tolerance import QUANTISED_MAX_RELATIVE_L1, QUANTISED_MIN_COSINE

EIGHT = {"compute_mode": "sage_bf16"}
NAMES = ["vsa", "vsa by cells", "sol", "sol, exact", "sol by cells", "subblock"]
PLACES = ["no text", "text first", "text last"]


def attend(defined, qkv, text=None, mask=None, known=None, **given):
    """Return a layer, and its output in one step."""
    options = {"kv_heads": qkv.key.shape[2], "dtype": qkv.query.dtype, **given}
    layer = defined.method.layer(**options)
    with torch.no_grad():
        return layer, run_sparse(layer, qkv, defined.grid, text=text, attn_mask=mask, known=known)


def assert_close(out, exact):
    out, exact = out.double(), exact.double()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0)
    assert cosine >= QUANTISED_MIN_COSINE
    assert (out - exact).abs().sum() <= QUANTISED_MAX_RELATIVE_L1 * exact.abs().sum()


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_of_the_method_are_attended_to_in_8_bits(name, where, tail):
    """Against float64 over the same pairs, with the budget of 8 bits."""
    defined = DEFINED[name]
    text = text_places(defined.grid, 70)[where]
    qkv = defined.inputs(text, batch=2)
    layer, out = attend(defined, qkv, text, tail=tail, **EIGHT)
    assert_close(out, defined.defined(defined.mask(qkv, text), text, None, *qkv, tail=tail))
    plain, in_full = attend(defined, qkv, text, tail=tail)
    assert not torch.equal(out, in_full), "nothing was quantised"
    assert layer.attn_impl.facts().densities == plain.attn_impl.facts().densities


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("name", ["vsa", "sol"])
def test_masked_keys_have_no_influence_and_may_hold_anything(name, tail):
    defined = DEFINED[name]
    text = text_places(defined.grid, 70)["text last"]
    qkv = defined.inputs(text, batch=2)
    keep = torch.ones(2, qkv.key.shape[1], dtype=torch.bool)
    keep[0, -40:] = False
    keep[1, 100:110] = False
    dirty = QKV(*(x.masked_fill(~keep[..., None, None], torch.nan) for x in qkv))
    _, out = attend(defined, dirty, text, keep, tail=tail, **EIGHT)
    mask = defined.mask(qkv, text, keep)
    want = defined.defined(mask, text, keep, *qkv, tail=tail)
    assert_close(out[keep], want[keep])


@pytest.mark.parametrize("name", ["vsa", "sol"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_keep_their_dtype(name, dtype):
    defined = DEFINED[name]
    qkv = defined.inputs(dtype=dtype)
    _, out = attend(defined, qkv, **EIGHT)
    assert out.dtype == dtype
    assert_close(out, defined.defined(defined.mask(qkv), None, None, *qkv))


@pytest.mark.parametrize("tile", [(4, 8, 4), (4, 8, 8)], ids=str)
def test_larger_tiles_are_served(tile):
    defined = DEFINED["vsa"]
    qkv = defined.inputs()
    given = {"topk": 2, "tile_size": tile}
    _, out = attend(defined, qkv, **given, **EIGHT)
    assert_close(out, attend(defined, qkv, **given)[1])


def test_at_sparsity_0_all_pairs_are_multiplied_in_8_bits():
    defined = DEFINED["vsa"]
    qkv = defined.inputs()
    given = {"topk": ..., "sparsity": 0.0}
    _, out = attend(defined, qkv, **given, **EIGHT)
    exact = attend(defined, qkv, **given)[1]
    assert_close(out, exact)
    assert (out - exact).abs().max() > 1e-4, "nothing was quantised"


def test_the_gate_weighs_the_coarse_stage_as_in_16_bits():
    defined = DEFINED["vsa"]
    qkv = defined.inputs()
    gate = torch.randn(qkv.query.shape, generator=torch.Generator().manual_seed(3))
    added = []
    for given in ({}, EIGHT):
        gated = replace(defined.method, layer_cls=UlyssesAttention_VSA)
        layer = gated.layer(kv_heads=1, **given)
        outs = (run_sparse(layer, qkv, defined.grid, gate_compress=x) for x in (gate, None))
        added.append(next(outs) - next(outs))
    torch.testing.assert_close(*added, rtol=1e-4, atol=1e-5)
    assert added[0].abs().max() > 0.1


def test_a_choice_that_serves_several_steps_is_attended_to_in_8_bits():
    defined = DEFINED["vsa"]
    first, second = defined.inputs(), defined.inputs()
    second.query.copy_(first.query.flip(1))
    layers = [defined.method.layer(kv_heads=1, refresh_every=2, **given) for given in ({}, EIGHT)]
    for step, qkv in enumerate((first, second)):
        known = {"num_steps": 20, "request_id": "one", "branch_key": "cond"}
        with torch.no_grad():
            full, eight = (
                run_sparse(layer, qkv, defined.grid, step=step, known=known) for layer in layers
            )
        assert_close(eight, full)


@pytest.mark.parametrize("tail", ["none", "pooled"])
@pytest.mark.parametrize("name", ["vsa", "sol", "sol by cells"])
def test_plans_and_means_are_those_of_16_bits(name, tail, monkeypatch):
    """With the kernel swapped for exact attention over the same plan, the two modes agree."""
    means = []

    def exactly(query, key, value, plan, *, scale, kernel, values, mean, return_lse):
        assert values == "16-bit"
        means.append(None if mean is None else mean - key.float().mean(1))
        found = attention_reference(query, key, value, plan, scale=scale)
        return found if return_lse else found[0]

    module = "multimodal_gen.runtime.layers.attention.sparse.router.quantized_attention"
    monkeypatch.setattr(module, exactly)
    defined = DEFINED[name]
    qkv = defined.inputs(kv_heads=2)
    _, out = attend(defined, qkv, tail=tail, **EIGHT)
    torch.testing.assert_close(out, attend(defined, qkv, tail=tail)[1])
    assert means
    if "cells" in name:  # nothing has pooled whole blocks
        assert means == [None] * len(means)
    else:
        assert all(mean.abs().max() < 1e-5 for mean in means)


def test_the_report_names_8_bits():
    layer, _ = attend(DEFINED["vsa"], DEFINED["vsa"].inputs(), **EIGHT)
    (entry,) = layer.report().entries
    assert entry.selection.variant == "reference_sage"
    assert entry.as_dict()["config"]["compute_mode"] == "sage_bf16"
    (bound,) = layer.bindings()
    assert (bound.operand_bits, bound.rounds) == (8, False)
    plain, _ = attend(DEFINED["vsa"], DEFINED["vsa"].inputs())
    assert plain.report().entries[0].selection.variant == "reference"
    assert [each.operand_bits for each in plain.bindings()] == [16]


def test_gradients_are_refused_with_the_remedy():
    defined = DEFINED["vsa"]
    qkv = QKV(*(x.requires_grad_() for x in defined.inputs()))
    layer = defined.method.layer(kv_heads=1, **EIGHT)
    wanted = r"must not get inputs that require grad: .* torch.no_grad\(\) or leave out `compute_m"
    with pytest.raises(UnsupportedBackendError, match=wanted):
        run_sparse(layer, qkv, defined.grid)


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        (VideoSparseConfig, {"kernel": "vsa"}, "kernel vsa, which multiplies in 16 bits, got sag"),
        (SolConfig, {"kernel": "fa4"}, "kernel fa4, which multiplies in 16 bits, got sage_bf16; r"),
        (SolConfig, {"skip_below": 30}, "`skip_below`, as 8-bit kernels leave no products out, "),
    ],
)  # fmt: skip
def test_what_has_no_8_bits_is_refused_beside_them(config, given, reason):
    wanted = f"`compute_mode` of {config.__name__} must be bf16 with {reason}"
    with pytest.raises(ConfigError, match=wanted):
        config(**given, **EIGHT)
    with pytest.raises(ConfigError, match="must be one of bf16, sage_bf16"):
        config(compute_mode="sage_fp8")


def test_a_kernel_that_cannot_run_here_is_named_in_the_refusal():
    wanted = (
        r"with kernel=gluon and compute_mode=sage_bf16 cannot .*leave kernel and compute_mode ou"
    )
    with pytest.raises(UnsupportedBackendError, match=wanted):
        attend(DEFINED["vsa"], DEFINED["vsa"].inputs(), kernel="gluon", **EIGHT)


@pytest.mark.parametrize(
    ("capability", "given", "variant"),
    [
        ((9, 0), {}, "gluon_sage"),
        ((8, 6), {}, "triton_sage"),
        ((9, 0), {"kernel": "triton"}, "triton_sage"),
        ((7, 5), {"kernel": "triton"}, None),
    ],
)
def test_a_gpu_gets_the_fastest_kernel_of_8_bits(capability, given, variant):
    packages = frozenset({("triton", "triton", "3.6.0")})
    device = FakeDevice(platform=PlatformEnum.CUDA, capability=capability, packages=packages)
    request = AttentionRequest(
        environment=simulated_environment(device),
        head_size=128,
        num_heads=2,
        num_kv_heads=2,
        dtype=torch.bfloat16,
    )
    cls = find_backend(AttentionBackendEnum.VIDEO_SPARSE_ATTN, PlatformEnum.CUDA)
    found = cls.choose_variant(request, VideoSparseConfig(**given, **EIGHT))
    assert (found and found.name) == variant
    if variant is None:
        config = VideoSparseConfig(**given, **EIGHT)
        wanted = "needs compute capability >= 8.0, this GPU has 7.5"
        assert cls.unsupported_reasons(request, config) == (wanted,)


def test_limits_say_what_8_bits_cannot_do_and_no_density_was_measured():
    cls = find_backend(AttentionBackendEnum.VIDEO_SPARSE_ATTN, PlatformEnum.CUDA)
    limits = cls.limits(VideoSparseConfig(**EIGHT))
    assert limits.ring is None
    assert "one call" in str(limits.cache)
    assert "no gradients" in str(limits.ring_gradients)
    made = {
        name: cls.get_impl_cls()(
            2, 128, 0.1, False, config=VideoSparseConfig(**given), variant=name
        )
        for name, given in (("gluon", {}), ("gluon_sage", EIGHT))
    }
    assert {impl.kernel.name for impl in made.values()} == {"gluon"}
    assert [impl.layer.dense_above.never for impl in made.values()] == [False, True]
