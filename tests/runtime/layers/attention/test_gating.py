"""The gate of a coarse branch: who gets it, and what is refused."""

import pytest
import torch
import torch._dynamo

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.binding import Binding
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA
from multimodal_gen.runtime.layers.attention.sparse.methods.vsa import VideoSparseBackend
from multimodal_gen.runtime.managers.forward_context import (
    current_forward_context,
    set_forward_context,
)
from tests.helpers.fakes import PlainImpl
from tests.helpers.inputs import make_qkv


class Gated(PlainImpl, VideoSparseBackend.get_impl_cls()):
    """Attention whose coarse branch is the mean of the values."""

    steps = ()

    def forward(self, query, key, value, context=None, *, gate=None, **rest):
        out = super().forward(query, key, value, context)
        return out if gate is None else self.add_branch(out, query, key, value, gate, context)

    def add_branch(self, out, query, key, value, gate, context):
        context = context or current_forward_context()
        type(self).steps += (context and context.current_timestep,)
        return out + gate * value.mean(dim=1, keepdim=True)


def give_coarse_branch(schedule, patch):
    """Let the entries of a schedule run an implementation with a coarse branch."""
    for entry in schedule:
        bound = entry.primary
        impl = Gated(4, 8, 8**-0.5)
        own = Binding(bound.demand, bound.selection, bound.features, impl)
        patch.setattr(entry, "primary", own)


@pytest.fixture
def inputs():
    return make_qkv(2, 6, 4, 8)


@pytest.fixture
def gate():
    return torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def layer(monkeypatch):
    """A layer whose backend has a coarse branch."""
    layer = UlyssesAttention_VSA(4, 8)
    give_coarse_branch(layer.schedule(), monkeypatch)
    return layer


def test_the_gate_weighs_the_coarse_branch(layer, inputs, gate):
    plain = layer(*inputs)
    weighed = layer(*inputs, gate_compress=gate)
    mean = inputs.value.mean(dim=1, keepdim=True)
    torch.testing.assert_close(weighed, plain + gate * mean)
    assert layer.report().calls == 2


def test_no_gate_is_weight_zero(layer, inputs, gate):
    assert torch.equal(layer(*inputs), layer(*inputs, gate_compress=torch.zeros_like(gate)))


def test_the_compiled_layer_takes_the_gate_too(layer, inputs, gate):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected = layer(*inputs, gate_compress=gate)
    torch.testing.assert_close(compiled(*inputs, gate_compress=gate), expected)


def test_gradients_reach_the_gate(layer, inputs, gate):
    gate.requires_grad_()
    layer(*inputs, gate_compress=gate).sum().backward()
    mean = inputs.value.mean(dim=1, keepdim=True)
    torch.testing.assert_close(gate.grad, mean.expand_as(gate))


def test_the_gate_takes_the_dtype_of_the_query_under_autocast(layer, inputs, gate):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        layer(*inputs)  # selects for bfloat16
        give_coarse_branch(layer.schedule(), patch)
        assert layer(*inputs, gate_compress=gate).dtype == torch.bfloat16


def test_a_gate_of_another_shape_is_refused(layer, inputs, gate):
    with pytest.raises(
        UsageError, match=r"the gate must have the shape of query, \[2, 6, 4, 8\], and"
    ):
        layer(*inputs, gate_compress=gate[:, :5])


def test_a_gate_with_a_mask_is_refused(layer, inputs, gate):
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"come without a mask, got .* a mask of shape \[2, 6\]"):
        layer.attend(AttentionCall(*inputs, mask, gate))


def test_a_gate_without_a_coarse_branch_is_refused(inputs, gate):
    layer = UlyssesAttention_VSA(4, 8)
    assert not layer.takes_gate
    with pytest.raises(UsageError, match=r"gate must be None unless .*, this layer runs torch_sdp"):
        layer.attend(AttentionCall(*inputs, gate=gate))


def test_dense_steps_of_the_schedule_get_the_coarse_branch_too(inputs, gate, monkeypatch):
    from multimodal_gen.runtime.layers.attention.scope import scope_from

    rules = {"rules": [{"steps": "0", "backend": "torch_sdpa"}]}
    layer = UlyssesAttention_VSA(4, 8, scope=scope_from(attention_config=rules))
    dense, sparse = layer.schedule()
    give_coarse_branch([sparse], monkeypatch)
    monkeypatch.setattr(Gated, "steps", ())
    outs = []
    for step in (0, 1):
        with set_forward_context(step):
            outs.append(layer(*inputs, gate_compress=gate))
    assert Gated.steps == (0, 1)
    assert (dense.primary.calls, sparse.primary.calls) == (1, 1)
    torch.testing.assert_close(outs[0], outs[1])


def test_a_method_of_0_1_keeps_its_coarse_branch(inputs, gate):
    from multimodal_gen.runtime.layers.attention.sparse.base import SparseImpl

    with pytest.warns(DeprecationWarning, match="derives from SparseImpl"):

        class Old(SparseImpl):
            declaration = VideoSparseBackend

            def attend(self, call, context):
                return torch.zeros_like(call.query)

            def add_coarse(self, out, query, key, value, gate, context=None):
                return out + gate * value.mean(dim=1, keepdim=True)

            def forward_gated(self, query, key, value, gate, context=None, *, first_head=0):
                out = self.forward(query, key, value, context)
                return self.add_coarse(out, query, key, value, gate, context)

    impl, branch = Old(4, 8, 8**-0.5), gate * inputs.value.mean(dim=1, keepdim=True)
    assert "gate" in impl.takes
    with set_forward_context(0, latent_grid=(1, 2, 3)) as context:
        torch.testing.assert_close(impl.forward(*inputs, context, gate=gate), branch)
    torch.testing.assert_close(impl.add_branch(branch, *inputs, gate, None), 2 * branch)
