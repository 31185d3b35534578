import copy
import inspect
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.integrations.processor_patch import (
    CannotPatchError,
    dispatch,
    patch,
    patched_class,
    sdpa,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, SelectionScope
from multimodal_gen.runtime.managers.forward_context import set_forward_context

SITE = LayerSite(name="blocks.3.attn", component="transformer")


def layer_of(num_heads=4, head_size=16, num_kv_heads=None, site=SITE):
    params = AttentionParams(
        num_heads=num_heads, head_size=head_size, num_kv_heads=num_kv_heads or num_heads
    )
    return ModuleAttention(site, params, torch.float32, SelectionScope())


def tensors(batch=2, queries=5, keys=5, heads=4, kv_heads=4, size=16):
    torch.manual_seed(0)
    return (
        torch.randn(batch, heads, queries, size),
        torch.randn(batch, kv_heads, keys, size),
        torch.randn(batch, kv_heads, keys, size),
    )


class Direct:
    """Calls PyTorch's attention itself."""

    def __call__(self, attn, query, key, value, *, mask=None, **kwargs):
        def inner(tensor):
            return tensor * attn

        query = inner(query)
        # The call spans lines, as they do.
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **kwargs)

    def fail(self):
        return F.scaled_dot_product_attention(None, None, None)


FACTOR = 2.0


def amplify(tensor):
    return tensor * FACTOR


class Private:
    """Keeps its state under names of its own, and calls a function of its module."""

    def __init__(self):
        self.__gain = 3.0

    def __call__(self, query, key, value):
        return F.scaled_dot_product_attention(amplify(query) * self.__gain, key, value)


class PrivateToo(Private):
    pass


class Slotted:
    __slots__ = ("_attention_backend",)

    def __call__(self, attn, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)


class HalfSlotted(Slotted):
    __slots__ = ("__dict__", "gain")


class Weighted(nn.Module):
    """A processor with weights, as IP adapters have them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def __call__(self, attn, query, key, value):
        return F.scaled_dot_product_attention(query * self.scale, key, value)


class Indirect:
    def __call__(self, attn, query, key, value):
        return [F.scaled_dot_product_attention][0](query, key, value)


def closed():
    factor = 1.0

    class Closed:
        def __call__(self, attn, query, key, value):
            return factor * F.scaled_dot_product_attention(query, key, value)

    return Closed


def test_the_derived_class_keeps_name_signature_and_state():
    stock = Direct()
    stock.note = ["kept"]
    new = patch(stock, layer_of(), patched_class(Direct))
    assert isinstance(new, Direct)
    assert isinstance(new, StandIn)
    assert type(copy.copy(new)) is Direct
    assert type(new).__name__ == "Direct"
    assert new.note is stock.note
    assert inspect.signature(new.__call__) == inspect.signature(stock.__call__)
    assert patched_class(Direct) is patched_class(Direct)


def test_a_direct_call_reaches_the_layer_and_gives_the_same():
    layer = layer_of()
    query, key, value = tensors()
    new = patch(Direct(), layer, patched_class(Direct))
    assert torch.allclose(new(1.5, query, key, value), Direct()(1.5, query, key, value), atol=1e-6)
    assert layer.report().calls == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"is_causal": True},
        {"scale": 0.5},
        {"mask": torch.rand(2, 1, 5, 5) > 0.3},
        {"mask": torch.rand(5, 5) > 0.3},
        {"mask": torch.randn(4, 5, 5)},
        {"mask": torch.randn(2, 4, 1, 5), "scale": 2.0},
    ],
    ids=["causal", "scale", "bool", "2-D", "3-D", "additive"],
)
def test_what_a_call_asks_for_is_honoured(kwargs):
    layer = layer_of()
    query, key, value = tensors()
    new = patch(Direct(), layer, patched_class(Direct))
    mask = kwargs.get("mask")
    if mask is not None and mask.dtype is torch.bool:
        mask |= torch.eye(5, dtype=torch.bool)
    expected = Direct()(1.0, query, key, value, **kwargs)
    for _ in range(2):
        assert torch.allclose(new(1.0, query, key, value, **kwargs), expected, atol=1e-6)
    assert layer.report().calls == 2


@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3)])
def test_causality_is_top_left_aligned_as_in_pytorch(queries, keys):
    query, key, value = tensors(queries=queries, keys=keys)
    new = patch(Direct(), layer_of(), patched_class(Direct))
    expected = Direct()(1.0, query, key, value, is_causal=True)
    assert torch.allclose(new(1.0, query, key, value, is_causal=True), expected, atol=1e-6)


def test_grouped_queries_are_honoured():
    query, key, value = tensors(kv_heads=2)
    layer = layer_of()
    new = patch(Direct(), layer, patched_class(Direct))
    expected = Direct()(1.0, query, key, value, enable_gqa=True)
    assert torch.allclose(new(1.0, query, key, value, enable_gqa=True), expected, atol=1e-6)
    assert [entry.calls for entry in layer.report().entries] == [1]


def test_folded_heads_are_honoured():
    query, key, value = (x.flatten(0, 1) for x in tensors())
    layer = layer_of(num_heads=1)
    expected = F.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(sdpa(layer, query, key, value), expected, atol=1e-6)


def test_a_processor_with_weights_shares_them():
    stock = Weighted()
    new = patch(stock, layer_of(), patched_class(Weighted))
    query, key, value = tensors()
    assert new.scale is stock.scale
    stock.scale.data.fill_(3.0)
    with torch.no_grad():
        assert torch.allclose(new(None, query, key, value), stock(None, query, key, value))


def test_a_traceback_points_at_the_stock_line():
    new = patch(Direct(), layer_of(), patched_class(Direct))
    with pytest.raises(AttributeError, match="NoneType") as caught:
        new.fail()
    frames = traceback.extract_tb(caught.value.__traceback__)
    line = next(frame for frame in frames if frame.name == "fail")
    assert line.line == "return F.scaled_dot_product_attention(None, None, None)"


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (nn.Identity, "Identity calls neither dispatch_attention_fn nor"),
        (Indirect, r"Indirect\.__call__ does not call scaled_dot_product_attention itself"),
        (Slotted, r"Slotted keeps its state in __slots__"),
        (HalfSlotted, r"HalfSlotted keeps its state in __slots__"),
        (closed(), r"Closed\.__call__ is decorated or a closure"),
    ],
)
def test_what_cannot_be_rebound_is_said(processor, reason):
    with pytest.raises(CannotPatchError, match=reason):
        patched_class(processor)


def test_the_stock_class_stays_as_it_is():
    from diffusers.models.transformers import transformer_wan

    call = transformer_wan.WanAttnProcessor.__call__
    derived = patched_class(transformer_wan.WanAttnProcessor)
    assert transformer_wan.WanAttnProcessor.__call__ is call
    assert call.__globals__ is vars(transformer_wan)
    assert derived.__call__.__code__ is call.__code__
    assert derived.__call__.__globals__["dispatch_attention_fn"] is dispatch


def test_a_two_dimensional_mask_of_diffusers_masks_keys_alone():
    query, key, value = (x.transpose(1, 2) for x in tensors())
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    out = dispatch(query, key, value, mask, backend=layer_of())
    expected = dispatch(query, key, value, mask, backend=None)
    assert torch.allclose(out, expected, atol=1e-6)
    assert out[1, 4].abs().min() > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p must be 0\.0 under apply\(\), got 0\.1 in blocks\.3"),
        ({"parallel_config": object()}, "context parallelism of diffusers must be off"),
        ({"attention_kwargs": {"block_mask": 1}}, r"attention_kwargs must be empty.*block_mask"),
    ],
)
def test_what_the_layers_cannot_do_is_refused(kwargs, message):
    query, key, value = (x.transpose(1, 2) for x in tensors())
    with pytest.raises(UsageError, match=message):
        dispatch(query, key, value, backend=layer_of(), **kwargs)


def test_dropout_of_a_direct_call_is_refused_and_elsewhere_pytorchs_matter():
    query, key, value = tensors()
    new = patch(Direct(), layer_of(), patched_class(Direct))
    with pytest.raises(UsageError, match=r"dropout_p must be 0\.0"):
        new(1.0, query, key, value, dropout_p=0.5)
    new._attention_backend = None
    assert new(1.0, query, key, value, dropout_p=0.5).shape == query.shape


def test_a_mask_beside_top_left_causality_is_kept():
    query, key, value = (x.transpose(1, 2) for x in tensors(queries=3, keys=6))
    layer = layer_of(site=LayerSite(role=AttentionRole.CROSS))
    keep = torch.tensor([1, 0, 1, 1, 1, 1]).bool()[None, None, None]
    allowed = torch.ones(3, 6, dtype=torch.bool).tril()[None, None]
    expected = layer.attend(query, key, value, allowed & keep)
    additive = torch.zeros(1, 1, 1, 6).masked_fill(~keep, float("-inf"))
    for mask in (keep, additive):
        out = layer.attend(query, key, value, mask, causal=True)
        assert torch.allclose(out, expected, atol=1e-6)


def test_the_layers_of_a_call_see_a_two_dimensional_mask_as_one_tensor(monkeypatch):
    seen = []
    layers = [layer_of(), layer_of()]
    for layer in layers:
        monkeypatch.setattr(layer, "attend", lambda q, k, v, mask, **kwargs: seen.append(mask))
    query, key, value = (x.transpose(1, 2) for x in tensors())
    mask, other = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    with set_forward_context(0):
        for given in (mask, mask, other):
            for layer in layers:
                dispatch(query, key, value, given, backend=layer)
    assert [x is seen[0] for x in seen] == [True] * 4 + [False] * 2
    assert seen[0].shape == (2, 1, 1, 5)
    assert torch.equal(seen[-1][:, 0, 0], other)


@pytest.mark.parametrize("processor", [Private, PrivateToo])
def test_private_names_of_a_processor_keep_working(processor):
    layer = layer_of()
    new = patch(processor(), layer, patched_class(processor))
    assert torch.allclose(new(*tensors()), processor()(*tensors()), atol=1e-6)
    assert layer.report().calls == 1


def test_a_helper_patched_after_the_first_apply_is_honoured(monkeypatch):
    before = patched_class(Private)
    assert patched_class(Private) is before
    monkeypatch.setitem(globals(), "amplify", lambda tensor: tensor * 5)
    patched = patched_class(Private)
    assert patched is not before
    assert patched_class(Private) is patched
    new = patch(Private(), layer_of(), patched)
    assert torch.allclose(new(*tensors()), Private()(*tensors()), atol=1e-6)
