"""`UlyssesAttention`, `UlyssesAttention_VSA` and `USPAttention` on one device."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention import (
    LocalAttention,
    UlyssesAttention,
    UlyssesAttention_VSA,
    USPAttention,
)
from multimodal_gen.runtime.layers.attention.masks import build_varlen_mask_meta
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, SelectionScope, Source
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.fakes import fake_backend
from tests.helpers.inputs import make_qkv

MASK = torch.ones(2, 6, dtype=torch.bool)


def joined(*pairs):
    return [torch.cat(pair, dim=1) for pair in pairs]


@pytest.fixture
def image():
    return make_qkv(2, 6, 4, 8, num_kv_heads=2, seed=1)


@pytest.fixture
def text():
    return make_qkv(2, 3, 4, 8, num_kv_heads=2, seed=2)


@pytest.fixture
def local():
    return LocalAttention(4, 8, 2)


class TestUlysses:
    """Replicated tokens are joined at the end."""

    @pytest.fixture
    def layer(self):
        return UlyssesAttention(4, 8, 2, prefix="blocks.0.attn")

    def test_without_replicated_tokens_it_is_local_attention(self, layer, local, image):
        out, replicated = layer(*image)
        assert torch.equal(out, local(*image))
        assert replicated is None
        assert layer.site.name == "blocks.0.attn"

    def test_replicated_tokens_attend_and_are_attended_to(self, layer, local, image, text):
        out, replicated = layer(*image, *text)
        expected = local(*joined(*zip(image, text, strict=True)))
        assert torch.equal(torch.cat((out, replicated), dim=1), expected)
        assert (out.shape[1], replicated.shape[1]) == (6, 3)

    def test_causality_holds_over_the_joined_sequence(self, image, text):
        out, replicated = UlyssesAttention(4, 8, 2, causal=True)(*image, *text)
        causal = LocalAttention(4, 8, 2, causal=True)
        expected = causal(*joined(*zip(image, text, strict=True)))
        assert torch.equal(torch.cat((out, replicated), dim=1), expected)

    @pytest.mark.parametrize(
        ("given", "missing"),
        [("q", "replicated_k, replicated_v"), ("kv", "replicated_q"), ("qk", "replicated_v")],
    )
    def test_replicated_tokens_come_as_three(self, layer, image, text, given, missing):
        some = {
            f"replicated_{name}": x for name, x in zip("qkv", text, strict=True) if name in given
        }
        with pytest.raises(
            UsageError, match=rf"replicated_v must be given together, missing {missing}$"
        ):
            layer(*image, **some)

    def test_lengths_per_device_describe_the_one_device(self, layer, local, image):
        assert torch.equal(layer(*image, seq_lens=[6])[0], local(*image))
        for wrong in ([5], [3, 3], []):
            with pytest.raises(UsageError, match=r"seq_lens must hold one length per device, here"):
                layer(*image, seq_lens=wrong)

    def test_lengths_per_device_exclude_replicated_tokens(self, layer, image, text):
        with pytest.raises(UsageError, match=r"seq_lens must not be combined with masks or replic"):
            layer(*image, *text, seq_lens=[6])


class TestUlyssesVSA:
    """The gate belongs to one backend."""

    @pytest.fixture
    def layer(self):
        return UlyssesAttention_VSA(4, 8, 2)

    def test_without_a_gate_it_returns_local_attention(self, layer, local, image):
        assert torch.equal(layer(*image), local(*image))

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_replicated_tokens_are_refused(self, layer, image, text, position):
        replicated = [None, None, None]
        replicated[position] = text[position]
        with pytest.raises(UsageError, match=r"must be None in UlyssesAttention_VSA; use Ulysses"):
            layer(*image, *replicated)

    def test_a_gate_is_refused_where_the_backend_has_no_coarse_branch(self, layer, image):
        with pytest.raises(
            UsageError, match=r"unless the backend is video_sparse_attn, this layer runs torch_sdpa"
        ):
            layer(*image, gate_compress=image.query)


class TestUSP:
    """Prefixes, suffixes and masks."""

    @pytest.fixture
    def layer(self):
        return USPAttention(4, 8, 2)

    def test_without_options_it_is_local_attention(self, layer, local, image):
        assert torch.equal(layer(*image), local(*image))

    @pytest.mark.parametrize(
        "options",
        [
            {"num_replicated_prefix": 2},
            {"num_replicated_suffix": 6},
            {"num_replicated_kv_prefix": 1},
            {"skip_sequence_parallel_override": True},
            {"qkv_pre_all_to_all": True},
            {"seq_lens": [6]},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_what_concerns_other_devices_changes_nothing_on_one(self, layer, local, image, options):
        assert torch.equal(layer(*image, **options), local(*image))

    @pytest.mark.parametrize("skip", [False, True])
    def test_construction_options_of_many_devices_change_nothing_on_one(self, local, image, skip):
        options = {"skip_sequence_parallel": skip, "enable_packed_qkv_input_a2a": skip}
        layer = USPAttention(4, 8, 2, prefix="blocks.1", **options)
        assert torch.equal(layer(*image), local(*image))
        assert layer.site.name == "blocks.1"

    def test_cross_attention_is_a_role(self):
        assert USPAttention(4, 8, is_cross_attention=True).site.role is AttentionRole.CROSS

    def test_prefix_tokens_are_put_in_front(self, layer, local, image, text):
        prefix = dict(zip(("q_prefix", "k_prefix", "v_prefix"), text, strict=True))
        expected = local(*joined(*zip(text, image, strict=True)))
        assert torch.equal(layer(*image, **prefix), expected)

    def test_a_mask_covers_the_prefix(self, layer, local, image, text):
        prefix = dict(zip(("q_prefix", "k_prefix", "v_prefix"), text, strict=True))
        mask = torch.arange(9).expand(2, 9) % 4 != 1
        expected = local(*joined(*zip(text, image, strict=True)), mask)
        assert torch.equal(layer(*image, mask, **prefix), expected)

    @pytest.mark.parametrize(
        ("given", "missing"), [("q", "k_prefix, v_prefix"), ("kv", "q_prefix")]
    )
    def test_prefix_tokens_come_as_three(self, layer, image, text, given, missing):
        some = {f"{name}_prefix": x for name, x in zip("qkv", text, strict=True) if name in given}
        with pytest.raises(
            UsageError, match=rf"q_prefix, k_prefix and v_prefix must be given .*missing {missing}$"
        ):
            layer(*image, **some)

    def test_a_replicated_prefix_of_keys_is_the_concatenation(self, layer, local, image, text):
        out = layer.forward_with_replicated_kv_prefix(
            image.query, text.key, text.value, image.key, image.value
        )
        keys, values = joined((text.key, image.key), (text.value, image.value))
        assert torch.equal(out, local(image.query, keys, values))

    def test_masks_work_as_in_local_attention(self, layer, local, image):
        for shape in ((2, 6), (2, 6, 6), (1, 4, 6, 6)):
            mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
            assert torch.equal(layer(*image, mask), local(*image, mask))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            *(
                (counts, r"at most one of num_replicated_prefix, .* got \[")
                for counts in (
                    {"num_replicated_prefix": 1, "num_replicated_suffix": 1},
                    {"num_replicated_prefix": 1, "num_replicated_kv_prefix": 2},
                    {"num_replicated_suffix": 1, "num_replicated_kv_prefix": 1},
                )
            ),
            ({"num_replicated_prefix": -1}, r"num_replicated_prefix must be in \[0, 6\], got -1"),
            ({"num_replicated_suffix": 7}, r"num_replicated_suffix must be in \[0, 6\], got 7"),
            ({"num_replicated_kv_prefix": 7}, r"num_replicated_kv_prefix must be in \[0, 6\], got"),
            *(
                ({"seq_lens": [6], **more}, "seq_lens must not be combined with masks or replic")
                for more in ({"attn_mask": MASK}, {"num_replicated_prefix": 1})
            ),
            (
                {"attn_mask_meta": build_varlen_mask_meta(torch.ones(2, 6))},
                "attn_mask_meta must come with the attn_mask it packs",
            ),
            (
                {"attn_mask": MASK, "attn_mask_meta": {}},
                "attn_mask_meta must be what build_varlen_mask_meta .*got {}$",
            ),
            (
                {"attn_mask": MASK[:1], "attn_mask_meta": build_varlen_mask_meta(torch.ones(1, 6))},
                r"attn_mask_meta must pack \[B, Sk\] = \[2, 6\], got \[1, 6\]",
            ),
        ],
        ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
    )
    def test_arguments_that_do_not_fit_are_refused(self, layer, image, options, message):
        with pytest.raises(UsageError, match=message):
            layer(*image, **options)

    def test_dropout_is_refused(self):
        with pytest.raises(UsageError, match=r"dropout_rate must be 0\.0, got 0\.1; kernels apply"):
            USPAttention(4, 8, dropout_rate=0.1)


@pytest.mark.parametrize("cls", [UlyssesAttention, UlyssesAttention_VSA, USPAttention])
def test_the_scope_a_layer_is_given_selects_its_backend(use_backends, cls):
    use_backends(fake_backend("torch_sdpa"), fake_backend("fa"))
    fa = AttentionBackendEnum.FA
    scope = SelectionScope(default=BackendPreference(source=Source.SETTINGS, backend=fa))
    assert cls(4, 8, scope=scope).backend is fa
    assert cls(4, 8, compute_dtype=torch.float16).dtype is torch.float16
