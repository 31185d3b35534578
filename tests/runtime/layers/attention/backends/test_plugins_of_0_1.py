"""A dense backend written as a plug-in for version 0.1 runs unchanged, from the old import paths.

The first two classes are those of the guide of that version, to the letter.
"""

from typing import ClassVar

import pytest
import torch

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import HeadSizes, Variant
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selector import (
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from multimodal_gen.testing.fakes import fake_backend
from multimodal_gen.testing.inputs import make_qkv
from multimodal_gen.testing.reference import reference_attention


class PlainImpl(AttentionImpl):
    """Attention in two matrix products; optional packages would be imported in `__init__`."""

    def forward(self, query, key, value, context=None, *, attn_mask=None):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores = (q @ k.mT) * self.softmax_scale
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


class PlainBackend(AttentionBackend):
    """What selection reads: plain data, no import of anything optional."""

    backend: ClassVar = AttentionBackendEnum.register_plugin_name("plain_attn")
    summary: ClassVar = "attention in two matrix products"
    variants: ClassVar = (
        Variant(
            name="plain_attn",
            platforms=frozenset(PlatformEnum),
            dtypes=frozenset({torch.float32}),
            head_sizes=HeadSizes(maximum=256),
            features=frozenset({Feature.KEY_MASK, Feature.BACKWARD}),
        ),
    )

    @classmethod
    def get_impl_cls(cls):
        return PlainImpl


class LseImpl(PlainImpl):
    """One with a constructor of its own and a log-sum-exp, whose arguments were three."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.built_for = (self.num_heads, self.head_size, self.causal, self.variant)

    def forward_lse(self, query, key, value):
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.softmax_scale
        return self.forward(query, key, value), scores.logsumexp(-1)


@pytest.fixture
def plain(use_backends):
    use_backends(fake_backend("torch_sdpa"), PlainBackend)
    with global_force_attn_backend_context_manager("plain-attn"):
        yield LocalAttention(4, 16)


def test_it_serves_plain_calls_and_gradients(plain) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 7, 4, 16, dtype=torch.float32))
    out = plain(q, k, v)
    torch.testing.assert_close(out, reference_attention(q, k, v, scale=16**-0.5)[0].float())
    out.sum().backward()
    assert q.grad is not None
    (entry,) = plain.report().entries
    assert (entry.selection.label, entry.calls) == ("plain_attn", 1)


def test_it_serves_the_masks_that_it_declares_and_no_others(plain) -> None:
    q, k, v = make_qkv(2, 7, 4, 16, dtype=torch.float32)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 3:] = False
    wanted, _ = reference_attention(q, k, v, scale=16**-0.5, mask=keep[:, None, None, :])
    torch.testing.assert_close(plain(q, k, v, keep[:, None, None, :]), wanted.float())
    assert plain.report().detours == ()
    plain(q, k, v, torch.ones(2, 7, 7, dtype=torch.bool))
    assert plain.report().detours[0].selection.backend is AttentionBackendEnum.TORCH_SDPA


def test_a_log_sum_exp_of_three_arguments_is_called_with_three(use_backends) -> None:
    use_backends(fake_backend("lse_attn", impl=LseImpl))
    layer = LocalAttention(4, 16)
    assert layer.attn_impl.built_for == (4, 16, False, "lse_attn")
    q, k, v = make_qkv(1, 5, 4, 16, dtype=torch.float32)
    sinks = torch.full((4,), -torch.inf)
    torch.testing.assert_close(layer(q, k, v, sink_logits=sinks), layer(q, k, v))
