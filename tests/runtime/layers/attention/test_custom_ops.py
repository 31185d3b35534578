"""Layers inside `torch.compile`: one opaque operator that many layers share."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention import LocalAttention, UlyssesAttention, USPAttention
from multimodal_gen.runtime.layers.attention.config import IndexSelector
from multimodal_gen.runtime.layers.attention.custom_ops import _RECORDS, attention_op
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    Rule,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.selector import (
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from tests.helpers.fakes import PlainImpl, fake_backend
from tests.helpers.inputs import make_qkv

FA, SDPA = AttentionBackendEnum.FA, AttentionBackendEnum.TORCH_SDPA
BLOCKS, HEADS, SIZE = 12, 2, 8

# The compiler's own: it imports what it deprecates, and looks at `.grad` of what has none.
INDUCTOR_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
GRAD_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# Nothing replicated, no lengths; tokens may be exchanged, and all heads are there.
REST = ((0, 0, 0), None, True, False)


class Block(nn.Module):
    def __init__(self, scope: SelectionScope | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.attention = LocalAttention(HEADS, SIZE, scope=scope)

    def forward(self, x, mask=None):
        q, k, v = self.project(x).unflatten(-1, (3 * HEADS, SIZE)).chunk(3, dim=2)
        return x + self.attention(q, k, v, mask).flatten(2)


class Model(nn.Module):
    def __init__(self, scope: SelectionScope | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(scope) for _ in range(BLOCKS))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.fixture(autouse=True)
def _fresh_compiler(request, use_backends):
    if request.node.get_closest_marker("gpu") is None:
        use_backends(fake_backend("torch_sdpa"), fake_backend("fa"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def x():
    return torch.randn(2, 5, HEADS * SIZE)


def compile_blocks(model: Model, backend) -> None:
    """Compile each block by itself, as diffusers' `compile_repeated_blocks` does."""
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)


def calls(model: Model) -> list[int]:
    return [block.attention.report().calls for block in model.blocks]


@pytest.mark.slow_cases("inductor")
@INDUCTOR_WARNS
@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager", "inductor"]
)
def test_a_compiled_model_computes_what_it_computes_eagerly(backend, x):
    model = Model()
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(compiled(x), expected)
    assert calls(model) == [3] * BLOCKS


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_may_come_and_go_under_compile(x):
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    keys = torch.tensor([[True, True, False, True, False], [True] * 5])
    for mask in (None, keys, keys.int(), torch.randn(1, 5, 5), None):
        torch.testing.assert_close(compiled(x, mask), model(x, mask))


@torch.no_grad()
def test_all_blocks_share_one_graph(x):
    model = Model()
    expected = model(x)
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(model, counter)
    torch.testing.assert_close(model(x), expected)
    assert counter.frame_count == 1
    assert calls(model) == [2] * BLOCKS


@torch.no_grad()
def test_steps_forces_and_layers_cause_no_recompilation(x):
    scope = SelectionScope(
        rules=(Rule(backend=FA, steps=IndexSelector.parse("0-1")),),
        default=BackendPreference(source=Source.SETTINGS, backend=SDPA),
    )
    model = Model(scope)
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(model, counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            with set_forward_context(step):
                model(x)
        global_force_attn_backend(FA)
        model(x)
        with global_force_attn_backend_context_manager(SDPA):
            model(x)
    assert counter.frame_count == 1
    for block in model.blocks:
        entries = block.attention.report().entries
        ran = sorted((str(e.selection.source), str(e.selection.backend), e.calls) for e in entries)
        assert ran == [
            ("forced", "fa", 1),
            ("forced", "torch_sdpa", 1),
            ("settings", "fa", 2),
            ("settings", "torch_sdpa", 2),
        ]


@torch.no_grad()
def test_what_a_layer_does_is_not_frozen_into_the_graph(x):
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x)
    global_force_attn_backend(FA)
    compiled(x)
    ran = [(str(e.selection.backend), e.calls) for e in model.blocks[3].attention.report().entries]
    assert ran == [("torch_sdpa", 1), ("fa", 1)]


@torch.no_grad()
def test_views_unlike_lengths_and_grouped_heads_compile():
    layer = LocalAttention(4, SIZE, 2, causal=True)
    q, k, v = make_qkv(2, 3, 4, SIZE, num_keys=6, num_kv_heads=2)
    k, v = torch.cat((k, v), dim=-1).split(SIZE, dim=-1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


class HeadsFirstImpl(PlainImpl):
    """Lays its output out as [B, H, S, D], as many kernels do."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


def test_the_operator_gives_the_layout_it_promises_whatever_the_kernel_does(use_backends):
    use_backends(fake_backend("torch_sdpa", impl=HeadsFirstImpl))
    layer = LocalAttention(HEADS, SIZE)
    q, k, v = make_qkv(2, 4, HEADS, SIZE)
    assert not layer(q, k, v).is_contiguous()
    assert attention_op(q, k, v, None, None, layer._layer_id, *REST).is_contiguous()


@torch.no_grad()
@pytest.mark.parametrize("cls", [UlyssesAttention, USPAttention])
def test_the_sequence_parallel_layers_compile(cls):
    layer = cls(HEADS, SIZE)
    image, text = make_qkv(1, 5, HEADS, SIZE), make_qkv(1, 2, HEADS, SIZE, seed=1)
    if cls is UlyssesAttention:
        arguments = (*image, *text)
    else:
        arguments = (*image, None, 0, 0, 0, False, None, False, None, *text)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


@pytest.mark.slow
@INDUCTOR_WARNS
@GRAD_WARNS
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))],
)
def test_gradients_under_compile_are_those_of_eager(backend, x):
    model = Model()
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        model.zero_grad()
        compiled(x).square().mean().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
    assert not _RECORDS
    assert calls(model) == [3] * BLOCKS


def test_what_is_never_differentiated_is_not_kept(x):
    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert len(_RECORDS) == 1
    del out
    gc.collect()
    assert not _RECORDS


class Together(torch.autograd.Function):
    """Returns the gradients of two tensors, which are alike, as parts of one."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        return torch.stack((grad, grad)).unbind()


class TogetherImpl(PlainImpl):
    """Whose gradients of keys and values share memory, as those of a kernel may."""

    def forward(self, query, key, value, *args, **kwargs):
        return query + Together.apply(key, value)


def test_gradients_that_share_memory_may_leave_a_graph(use_backends):
    use_backends(fake_backend("torch_sdpa", impl=TogetherImpl))
    layer = LocalAttention(HEADS, SIZE)
    inputs = make_qkv(1, 4, HEADS, SIZE, requires_grad=True)
    expected = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_is_differentiated_once(x):
    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager")
    loss = compiled(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="must be differentiated once, was so before; leave"):
        loss.backward()


@GRAD_WARNS
def test_a_compiled_block_may_be_checkpointed(x):
    block = Block()
    expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    out = checkpoint(compiled, x, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), list(block.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not _RECORDS


@pytest.mark.slow_cases("attn_mask", "v")
@pytest.mark.parametrize("which", ["q", "k", "v", "attn_mask"])
def test_a_gradient_of_any_single_input_is_right_under_compile(which):
    layer = LocalAttention(HEADS, SIZE)
    inputs = make_qkv(1, 4, HEADS, SIZE)._asdict()
    inputs = dict(zip("qkv", inputs.values(), strict=True), attn_mask=torch.zeros(1, 1, 4, 4))
    inputs[which].requires_grad_()
    layer(**inputs).square().sum().backward()
    expected, inputs[which].grad = inputs[which].grad, None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(**inputs).square().sum().backward()
    torch.testing.assert_close(inputs[which].grad, expected)


@pytest.mark.parametrize("shape", [None, (2, 4), (2, 4, 4), (1, HEADS, 4, 4)])
def test_the_operator_keeps_its_contract(shape):
    layer = LocalAttention(HEADS, SIZE)
    q, k, v = make_qkv(2, 4, HEADS, SIZE)
    mask = None if shape is None else torch.ones(shape, dtype=torch.bool)
    result = torch.library.opcheck(attention_op, (q, k, v, mask, None, layer._layer_id, *REST))
    assert set(result.values()) == {"SUCCESS"}


def test_the_operators_shape_follows_query_and_value():
    layer = LocalAttention(HEADS, SIZE)
    q = torch.empty(2, 4, HEADS, SIZE, device="meta")
    k = torch.empty(2, 6, HEADS, SIZE, device="meta")
    v = torch.empty(2, 6, HEADS, 3, device="meta")
    assert attention_op(q, k, v, None, None, layer._layer_id, *REST).shape == (
        2,
        4,
        HEADS,
        3,
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # older torch's compiler uses such
@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_cuda_graph_does_not_freeze_the_step(mode):
    rule = Rule(backend=AttentionBackendEnum.TORCH_CUDNN_SDPA, steps=IndexSelector.parse("0"))
    default = BackendPreference(source=Source.SETTINGS, backend=SDPA)
    scope = SelectionScope(rules=(rule,), default=default)
    layer = LocalAttention(HEADS, 64, compute_dtype=torch.bfloat16, scope=scope)
    q, k, v = make_qkv(1, 256, HEADS, 64, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        for step in range(3):
            with set_forward_context(step):
                torch.testing.assert_close(compiled(q, k, v).clone(), layer(q, k, v))
    calls = [entry.calls for entry in layer.report().entries]
    assert calls == [6, 12]
