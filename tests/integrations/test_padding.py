import pytest
import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.denoiser_context import DenoiserContext, current_padding
from multimodal_gen.integrations.module_attention import AttentionParams, ModuleAttention
from multimodal_gen.integrations.padding import FunctionalWithPairMask, KeyPadding, PairMask
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import LayerSite, SelectionScope
from multimodal_gen.runtime.managers.forward_context import set_forward_context, use_forward_context


def current(role, key):
    return current_padding(role, (key.shape[0], key.shape[1]), key.device)


def knowing(padding):
    return use_forward_context(DenoiserContext(current_timestep=0, padding=padding))


def padding_of(rows, role=AttentionRole.SELF, **kwargs):
    padding = KeyPadding(role, torch.tensor(rows), **kwargs)
    padding.resolve(padding.facts().tolist())
    return padding


@pytest.mark.parametrize(
    ("rows", "kwargs", "valid"),
    [
        ([[1, 1, 1], [1, 1, 1]], {"before": 4}, 7),
        ([[1, 1, 1]], {"after": 4}, 7),
        ([[1, 1, 0], [1, 1, 0]], {"before": 4}, 6),
        ([[1, 1, 0], [1, 0, 0]], {"before": 4}, None),
        ([[0, 1, 1]], {"before": 4}, None),
        ([[0, 1, 1]], {"before": 4, "valid_first": True}, 6),
        ([[1, 1, 0]], {"after": 4}, None),
        ([[0, 0, 0]], {"before": 4}, 4),
    ],
)
def test_the_valid_prefix_is_found_where_it_says_everything(rows, kwargs, valid):
    assert padding_of(rows, **kwargs).valid == valid


def test_the_mask_covers_what_is_around_the_text():
    padding = padding_of([[1, 0, 1], [1, 1, 0]], before=2, after=1)
    assert padding.mask().int().tolist() == [[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]]
    assert padding.shape == (2, 6)
    assert padding.key_mask() is padding.key_mask()
    assert padding.key_mask().shape == (2, 1, 1, 6)


def test_text_that_the_model_sorts_is_masked_as_sorted():
    padding = padding_of([[0, 1, 1], [0, 0, 1]], before=1, valid_first=True)
    assert padding.mask().int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_it_speaks_of_keys_of_its_role_and_size_only():
    padding = padding_of([[1, 0]], before=3)
    key = torch.zeros(1, 5, 2, 4)
    with set_forward_context(0):
        assert current(AttentionRole.SELF, key) is None
    with knowing(padding):
        assert current(AttentionRole.SELF, key) is padding
        assert current(AttentionRole.CROSS, key) is None
        assert current(AttentionRole.SELF, key[:, :4]) is None
    assert current(AttentionRole.SELF, key) is None


def test_a_sample_without_any_key_is_left_to_the_models_mask():
    padding = padding_of([[0, 0], [1, 1]])
    with knowing(padding):
        assert current(AttentionRole.SELF, torch.zeros(2, 2, 1, 4)) is None


def test_a_mask_on_another_device_is_left_to_the_model():
    padding = padding_of([[1, 1], [1, 0]], before=1)
    with knowing(padding):
        assert current(AttentionRole.SELF, torch.zeros(2, 3, 1, 4)) is padding
        key = torch.zeros(2, 3, 1, 4, device="meta")
        assert current(AttentionRole.SELF, key) is None


@pytest.mark.parametrize("rows", [[[1, 1, 1]] * 2, [[1, 1, 0]] * 2, [[1, 1, 0], [1, 0, 0]]])
def test_attention_is_that_of_the_models_own_mask(rows):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 7, 2, 16) for _ in range(3))
    site = LayerSite(role=AttentionRole.SELF)
    params = AttentionParams(num_heads=2, head_size=16, num_kv_heads=2)
    layer = ModuleAttention(site, params, torch.float32, SelectionScope(), masks_padding=True)
    padding = padding_of(rows, before=4)
    mask = padding.key_mask()
    expected = layer.attend(query, key, value, mask)
    with knowing(padding):
        out = layer.attend(query, key, value, mask)
        plain = layer.attend(query, key, value)
    assert (out - expected).abs().max() <= 1e-6
    # A call without a mask is one that the padding does not concern.
    assert torch.equal(plain, layer.attend(query, key, value))


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_mask_that_says_more_than_the_padding_is_kept(rows, stock):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 7, 2, 16) for _ in range(3))
    mask = torch.rand(2, 1, rows, 7) > 0.4
    mask[..., 0] = True
    params = AttentionParams(num_heads=2, head_size=16, num_kv_heads=2)
    layer = ModuleAttention(
        LayerSite(), params, torch.float32, SelectionScope(), masks_padding=stock and rows > 1
    )
    expected = layer.attend(query, key, value, mask)
    with knowing(padding_of([[1, 1, 1], [1, 1, 0]], before=4)):
        out = layer.attend(query, key, value, mask)
    assert torch.equal(out, expected)


TEXT = torch.tensor([[1, 1, 0], [1, 0, 0]])


def spelled_out(functional, mask):
    """What HunyuanVideo-1.5 does to its mask in every layer."""
    mask = functional.pad(mask, (2, 0), value=True)
    mask = mask.bool()
    rows = mask.view(2, 1, 1, 5).repeat(1, 1, 5, 1)
    return (rows & rows.transpose(2, 3)).bool()


def test_it_stands_for_the_mask_it_is_made_like():
    mask = spelled_out(FunctionalWithPairMask, TEXT)
    assert isinstance(mask, PairMask)
    assert mask.axis == "both"
    assert torch.equal(mask.dense(), spelled_out(F, TEXT))
    assert mask.mask.shape == (2, 5)


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask.view(1, 6),
        lambda mask: mask.view(2, 1, 1, 3).repeat(1, 2, 3, 1),
        lambda mask: mask.transpose(0, 1),
        lambda mask: mask.view(2, 1, 1, 3).transpose(1, 2),
        lambda mask: mask & mask,
    ],
)
def test_another_way_to_build_the_mask_is_refused(operation):
    with pytest.raises(UsageError, match="the installed diffusers must build its attention mask"):
        operation(PairMask(TEXT))
