"""A layer as one opaque operator under `torch.compile`.

The operator takes the layer's identity as a 0-d CPU tensor: a graph input, not a constant, so any
number of layers share one compiled graph, and what a layer does at run time (its denoising step, a
forced backend) is never frozen into it.

Where gradients are wanted another operator has autograd record the call, as it would outside of a
graph, and gives the record a number. Its backward pass is an operator that looks the record up. A
record is dropped once it was used, or when the compiled graph lets go of its number.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch._library.custom_ops import CustomOpDef

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.call import AttentionCall


class RegisteredLayer(Protocol):
    """A layer that the operators find by its number."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return attention of a call."""

    def trained(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weight and bias of its trained projection, or None."""


class _Record(NamedTuple):
    """What autograd recorded of a call: the output, and what it is differentiated by."""

    out: torch.Tensor
    leaves: tuple[torch.Tensor, ...]


LAYERS: "WeakValueDictionary[int, RegisteredLayer]" = WeakValueDictionary()
"""Number -> layer; process-wide, because a compiled graph can carry numbers but no objects."""
NUMBERS = itertools.count()
"""What layers and records are numbered by."""
# Process-wide for the same reason.
_RECORDS: dict[int, _Record] = {}


def _keys(*names: str) -> list[torch._C.DispatchKey]:
    return [getattr(torch._C.DispatchKey, name) for name in names]


_VMAP_KEYS = _keys(
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
)
# Without them autograd does not record inside of an operator. Views are tracked by the last of
# them: without it, what is written to a view is not recorded.
_AUTOGRAD_KEYS = _keys(
    "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"
)


def _never_captured() -> dict[str, Any]:
    # A CUDA graph would replay the kernels of one denoising step for ever. Versions of torch
    # without the tag capture no graph that takes a tensor of the CPU, as the layer's identity is.
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    return {} if tag is None else {"tags": (tag,)}


def _with_vmap() -> AbstractContextManager[object]:
    """Let backends use `torch.vmap`, as FlexAttention does.

    The first call of a compiled graph runs inside a dispatch mode of the compiler. What such modes
    call runs with the dispatch keys of `torch.vmap` switched off, where it fails.
    """
    outside = torch._C._functorch.peek_interpreter_stack() is None  # not itself under vmap
    if not (outside and torch._C._dispatch_tls_is_dispatch_key_excluded(_VMAP_KEYS[0])):
        return nullcontext()
    return _dispatching(_VMAP_KEYS)


def _dispatching(keys: Sequence[torch._C.DispatchKey]) -> AbstractContextManager[object]:
    """Let some dispatch keys count that are switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _call(tensors: Sequence[Any], replicated: Sequence[int], *rest: Any) -> AttentionCall:
    front, back, keys = replicated
    more = zip(("seq_lens", "exchange", "some_heads"), rest, strict=True)
    return AttentionCall(*tensors, replicated=(front, back, keys), **dict(more))  # type: ignore[misc]


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? gate"
_REST = "SymInt[] replicated, SymInt[]? seq_lens, bool exchange, bool some_heads"


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    name = f"multimodal_gen::{name}"
    return torch.library.custom_op(name, mutates_args=(), schema=schema, **_never_captured())


@_operator("attention", f"({_TENSORS}, Tensor layer, {_REST}) -> Tensor")
def attention_op(*given: Any) -> torch.Tensor:
    """Run a call of a registered layer; see `AttentionCall` for the arguments.

    Args:
        given: query [B, Sq, H, D], key [B, Sk, Hkv, D] and value [B, Sk, Hkv, Dv]; the call's mask,
            or None; the gate [B, Sq, H, D], or None; the layer's number, int64, 0-d, on the CPU;
            tokens that all ranks hold: in front, at the end, and keys in front; tokens of each
            rank, or None; whether the layer may exchange tokens with other ranks; whether the
            tensors may hold a share of the layer's heads.

    Returns:
        [B, Sq, H, Dv], contiguous.
    """
    call = _call(given[:5], *given[6:])
    with _with_vmap():
        return LAYERS[int(given[5])].attend(call).contiguous()


@attention_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@_operator(
    "recorded_attention",
    f"({_TENSORS}, Tensor? weight, Tensor? bias, Tensor layer, bool[] wanted, {_REST}) -> "
    f"(Tensor, Tensor)",
)
def recorded_attention_op(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `attention_op`, and keep what autograd recorded.

    Args:
        given: what `attention_op` is given, with the weight and bias of the layer's projection, or
            None, in front of the layer; and behind it, which of the first seven a gradient is
            wanted of.

    Returns:
        [B, Sq, H, Dv], contiguous, and the number of the record: int64, 0-d, on the CPU.
    """
    called, wanted = LAYERS[int(given[7])], given[8]
    own = [
        None if x is None else _leaf(x, flag) for x, flag in zip(given[:5], wanted[:5], strict=True)
    ]
    trained = (*own, *called.trained())
    leaves = [x for x, flag in zip(trained, wanted, strict=True) if x is not None and flag]
    call = _call(own, *given[9:])
    with _dispatching(_AUTOGRAD_KEYS), torch.enable_grad(), _with_vmap():
        out = called.attend(call)
    number = next(NUMBERS)
    found = torch.tensor(number, dtype=torch.int64, device="cpu")
    _RECORDS[number] = _Record(out, tuple(leaves))
    weakref.finalize(found, _RECORDS.pop, number, None)
    return out.detach().clone(memory_format=torch.contiguous_format), found


def _leaf(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Return a copy: a compiled graph may write to a tensor once it needs it no more."""
    return x.detach().clone().requires_grad_(wanted)


@recorded_attention_op.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    return out, torch.empty((), dtype=torch.int64, device="cpu")


@_operator("recorded_attention_backward", "(Tensor grad, Tensor number, Tensor[] like) -> Tensor[]")
def recorded_attention_backward_op(
    grad: torch.Tensor, number: torch.Tensor, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradients of a recorded call.

    Args:
        grad: of its output.
        number: of its record.
        like: tensors of the size and dtype of what gradients were wanted of.

    Raises:
        UsageError: the record was used before.
    """
    record = _RECORDS.pop(int(number), None)
    if record is None:
        raise UsageError(
            "attention inside of a compiled graph must be differentiated once, was so before; "
            "leave retain_graph out, or keep the call out of the graph"
        )
    with _dispatching(_AUTOGRAD_KEYS):
        found = torch.autograd.grad(record.out, record.leaves, grad, allow_unused=True)
    # No result of an operator may share memory with another, or with what it was given.
    seen = {grad.untyped_storage().data_ptr()}
    results = []
    for g, x in zip(found, like, strict=True):
        own = x.new_zeros(x.shape) if g is None else g.to(x.dtype).contiguous()
        place = own.untyped_storage().data_ptr()
        results.append(own.clone() if place in seen else own)
        seen.add(place)
    return results


@recorded_attention_backward_op.register_fake
def _(grad: torch.Tensor, number: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in like]


def _keep_number(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    wanted = inputs[8]
    # Not the tensors: the record has its own.
    ctx.like = [(x.shape, x.dtype) for x, flag in zip(inputs[:7], wanted, strict=True) if flag]
    ctx.wanted = list(wanted)
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: torch.Tensor | None, _number: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    (number,), others = ctx.saved_tensors, (None,) * 6  # of what is no tensor to differentiate by
    if grad is None:
        return (*(None for _ in ctx.wanted), *others)
    like = [grad.new_empty((), dtype=dtype).expand(shape) for shape, dtype in ctx.like]
    grads = iter(recorded_attention_backward_op(grad, number, like))
    return (*(next(grads) if flag else None for flag in ctx.wanted), *others)


recorded_attention_op.register_autograd(_differentiate, setup_context=_keep_number)
