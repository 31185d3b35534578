"""Masks through the public layers, against attention by its definition in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention import LocalAttention, USPAttention
from multimodal_gen.runtime.layers.attention.kinds import masks
from multimodal_gen.runtime.layers.attention.masks import build_varlen_mask_meta
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from tests.helpers.fakes import ALL_FEATURES, PlainImpl, fake_backend
from tests.helpers.inputs import make_qkv
from tests.helpers.reference import reference_attention
from tests.helpers.tolerance import assert_within_error_budget

MASKS = {Feature.KEY_MASK, Feature.DENSE_MASK}
DENSE = fake_backend("dense_attn", features=ALL_FEATURES - {Feature.VARLEN})
# What a layer may have to work with: each path must give the same result.
PATHS = {
    "sdpa": None,
    "masks": (DENSE,),
    "packing": (fake_backend("packing_attn"),),
    "packing_then_masks": (
        fake_backend("packing_attn", features=ALL_FEATURES - MASKS),
        DENSE,
    ),
    "key_masks_then_masks": (
        fake_backend("key_attn", features=ALL_FEATURES - {Feature.VARLEN, Feature.DENSE_MASK}),
        DENSE,
    ),
    "unmasked_then_masks": (
        fake_backend("bare_attn", features=ALL_FEATURES - MASKS - {Feature.VARLEN}),
        DENSE,
    ),
}
FAST = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=PATHS)
def path(request, use_backends):
    if PATHS[request.param] is not None:
        use_backends(*PATHS[request.param])
    return request.param


@st.composite
def calls(draw, kinds=("bool", "int", "additive"), dims=(2, 3, 4)):
    """Return one call: layer arguments, shapes, and the mask as given and as [B, H, Sq, Sk]."""
    batch = draw(st.integers(1, 3))
    num_queries, num_keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        num_keys = num_queries
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    shape = {
        2: [batch, num_keys],
        3: [batch, num_queries, num_keys],
        4: [batch, num_heads, num_queries, num_keys],
    }[draw(st.sampled_from(dims))]
    shape = [1 if draw(st.booleans()) else size for size in shape[:-1]] + [num_keys]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    keep = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    kind = draw(st.sampled_from(kinds))
    mask = {
        "bool": keep,
        "int": keep.int() * draw(st.sampled_from([1, 7, -1])),
        "additive": torch.randn(shape, generator=generator).masked_fill(~keep, -torch.inf),
    }[kind]
    return {
        "batch": batch,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "causal": draw(st.booleans()),
        "cross": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.3])),
        "mask": mask,
    }


def inputs(call, **changes):
    sizes = {"num_keys": call["num_keys"], "num_kv_heads": call["num_kv_heads"]}
    return make_qkv(call["batch"], call["num_queries"], call["num_heads"], 8, **sizes, **changes)


def layer_for(call, cls=LocalAttention):
    return cls(
        call["num_heads"],
        8,
        call["num_kv_heads"],
        softmax_scale=call["scale"],
        causal=call["causal"],
        is_cross_attention=call["cross"],
    )


def full_mask(call):
    """Return the call's mask as [B, H, Sq, Sk], with the rows of masked queries hidden."""
    mask = call["mask"]
    two_dimensional, additive = mask.dim() == 2, mask.is_floating_point()
    mask = mask if additive else mask != 0
    shape = (call["batch"], call["num_heads"], call["num_queries"], call["num_keys"])
    wide = {2: lambda: mask[:, None, None], 3: lambda: mask[:, None], 4: lambda: mask}
    full = wide[mask.dim()]().expand(shape)
    covers = two_dimensional and not additive and not call["cross"]
    if covers and call["num_queries"] == call["num_keys"]:
        full = full & mask[:, None, :, None]
    return full


def check(call, out, q, k, v):
    scale = 8**-0.5 if call["scale"] is None else call["scale"]
    options = {"scale": scale, "causal": call["causal"], "mask": full_mask(call)}
    assert_within_error_budget(out, q, k, v, **options)


@pytest.mark.slow_cases("masks", "packing_then_masks", "sdpa", "unmasked_then_masks")
@FAST
@given(call=calls())
def test_every_mask_on_every_path_agrees_with_the_definition(path, call):
    q, k, v = inputs(call)
    check(call, layer_for(call)(q, k, v, call["mask"]), q, k, v)


@pytest.mark.slow_cases(
    "key_masks_then_masks", "packing", "packing_then_masks", "unmasked_then_masks"
)
@FAST
@given(call=calls(kinds=("bool", "int"), dims=(2,)))
def test_nan_at_masked_positions_never_reaches_the_output(path, call):
    q, k, v = inputs(call)
    hidden = (call["mask"] == 0).expand(call["batch"], -1)
    poison = {"k": k, "v": v}
    if not call["cross"] and call["num_queries"] == call["num_keys"]:
        poison["q"] = q
    poisoned = {
        "q": q,
        **{n: x.masked_fill(hidden[..., None, None], torch.nan) for n, x in poison.items()},
    }
    check(call, layer_for(call)(**poisoned, attn_mask=call["mask"]), q, k, v)


@pytest.mark.slow_cases("key_masks_then_masks", "masks", "packing_then_masks", "sdpa")
@FAST
@given(call=calls(kinds=("bool", "int"), dims=(2,)))
def test_a_packing_given_by_the_caller_changes_nothing(path, call):
    q, k, v = inputs(call)
    meta = build_varlen_mask_meta(call["mask"].expand(call["batch"], -1))
    out = layer_for(call, USPAttention)(q, k, v, call["mask"], attn_mask_meta=meta)
    check(call, out, q, k, v)


@pytest.mark.slow_cases("key_masks_then_masks", "packing_then_masks", "sdpa", "unmasked_then_masks")
@FAST
@given(call=calls(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_masks_agree_in_half_precision(path, call, dtype):
    q, k, v = inputs(call, dtype=dtype)
    check(call, layer_for(call)(q, k, v, call["mask"]), q, k, v)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_under_a_key_mask_agree_with_the_definition(causal):
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    q, k, v = make_qkv(3, 5, 4, 8, num_kv_heads=2, requires_grad=True)
    LocalAttention(4, 8, 2, causal=causal)(q, k, v, mask).square().sum().backward()
    expected = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = reference_attention(
        *expected, scale=8**-0.5, causal=causal, mask=mask.bool()[:, None, None]
    )
    (out * mask[:, :, None, None]).square().sum().backward()
    for mine, theirs in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.float())


class ShapesImpl(PlainImpl):
    """Computes shapes only, so that it runs where there are no values."""

    def forward_varlen(self, query, key, value, **lengths):
        assert lengths["cu_seqlens_k"].device == query.device
        return query.new_empty((*query.shape[:2], value.shape[2]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 6), (2, 1, 6), (2, 6, 6), (1, 4, 6, 6)])
@pytest.mark.parametrize("features", [ALL_FEATURES, ALL_FEATURES - {Feature.VARLEN}])
def test_no_mask_waits_for_the_device(use_backends, features, shape, causal):
    # A tensor on "meta" has no values: whatever needs one on the host raises.
    use_backends(fake_backend("shapes_attn", impl=ShapesImpl, features=features))
    q = torch.empty(2, 6, 4, 8, device="meta")
    k = torch.empty(2, 6, 2, 8, device="meta")
    for dtype in (torch.bool, torch.int64, torch.float32):
        mask = torch.ones(shape, device="meta").to(dtype)
        with set_forward_context(0):
            out = LocalAttention(4, 8, 2, causal=causal)(q, k, k, mask)
        assert (out.shape, out.device.type) == (q.shape, "meta")


@pytest.fixture
def packings(monkeypatch):
    """Count how often a mask is packed."""
    built = []

    def build(mask):
        built.append(mask.shape)
        return build_varlen_mask_meta(mask)

    monkeypatch.setattr(masks, "build_varlen_mask_meta", build)
    return built


@pytest.mark.parametrize("inference", [False, True])
def test_layers_share_the_packing_of_a_mask_within_a_denoiser_call(
    use_backends, packings, inference
):
    use_backends(*PATHS["packing"])
    layers = [LocalAttention(2, 8) for _ in range(3)]
    q, k, v = make_qkv(2, 6, 2, 8)
    with torch.inference_mode(inference):
        mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
        for step in range(2):
            with set_forward_context(step):
                outputs = [layer(q, k, v, mask) for layer in layers]
    assert len(packings) == 2
    assert torch.equal(outputs[0], outputs[2])


def test_a_mask_that_changes_within_a_call_is_packed_anew(use_backends, packings):
    use_backends(*PATHS["packing"])
    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 4, 2, 8)
    mask = torch.tensor([[True, True, False, False]])
    with set_forward_context(0):
        layer(q, k, v, mask)
        mask[0, 2] = True
        assert layer(q, k, v, mask)[0, 2].any()
    assert len(packings) == 2


def test_a_mask_broadcast_over_two_batch_sizes_is_packed_for_each(use_backends, packings):
    use_backends(*PATHS["packing"])
    layer = LocalAttention(2, 8)
    mask = torch.tensor([[True, True, False, False]])
    q, k, v = make_qkv(2, 4, 2, 8)
    with set_forward_context(0):
        layer(q[:1], k[:1], v[:1], mask)
        out = layer(q, k, v, mask)
    assert packings == [(1, 4), (2, 4)]
    hidden = mask & mask.mT
    assert_within_error_budget(out, q, k, v, scale=8**-0.5, mask=hidden[None, None])


def test_a_call_a_backend_cannot_honour_is_recorded_as_a_detour(use_backends, caplog):
    caplog.set_level("INFO")
    use_backends(*PATHS["packing_then_masks"])
    layer = LocalAttention(2, 8)
    q, k, v = make_qkv(1, 4, 2, 8)
    layer(q, k, v)
    layer(q, k, v, torch.ones(1, 4, dtype=torch.bool))
    for _ in range(3):
        layer(q, k, v, torch.ones(1, 4, 4, dtype=torch.bool))
    report = layer.report()
    assert [(str(e.selection.backend), e.calls) for e in report.entries] == [("packing_attn", 2)]
    assert [(str(e.selection.backend), e.calls) for e in report.detours] == [("dense_attn", 3)]
    assert report.detours[0].selection.reason.startswith("packing_attn has no dense_mask; first of")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.messages == [
        "packing_attn has no dense_mask; such calls run on another dense backend"
    ]


def test_a_causal_mask_on_the_layers_own_backend_is_no_detour(use_backends):
    use_backends(DENSE)
    layer = LocalAttention(2, 8, causal=True)
    q, k, v = make_qkv(1, 4, 2, 8)
    layer(q, k, v)
    layer(q, k, v, torch.ones(1, 4, 4, dtype=torch.bool))
    report = layer.report()
    assert (report.entries[0].calls, report.detours, report.calls) == (2, (), 2)


def test_a_mask_that_does_not_fit_is_refused():
    q, k, v = make_qkv(2, 4, 2, 8)
    with pytest.raises(
        UsageError, match=r"attn_mask must be \[B, Sk\] = \[2, 4\], .* got \[2, 5\]"
    ):
        LocalAttention(2, 8)(q, k, v, torch.ones(2, 5))


def test_what_masked_positions_hold_does_not_reach_the_gradients_of_others(path):
    layer = LocalAttention(2, 8)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    gradients = []
    for filler in (0.0, torch.nan):
        tensors = make_qkv(1, 6, 2, 8)
        for x in tensors:
            x[:, 4:] = filler
            x.requires_grad_()
        layer(*tensors, mask)[:, :4].square().sum().backward()
        gradients.append(torch.stack([x.grad[:, :4] for x in tensors]))
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("cross", [False, True])
def test_no_queries_give_an_empty_output_under_a_mask(path, cross):
    layer = LocalAttention(2, 8, is_cross_attention=cross)
    q, k, v = make_qkv(2, 1, 2, 8, num_keys=3)
    assert layer(q[:, :0], k, v, torch.ones(2, 3).bool()).shape == (2, 0, 2, 8)
