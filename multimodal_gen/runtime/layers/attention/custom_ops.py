"""A layer as one opaque operator under `torch.compile`.

The operator takes the layer's identity as a 0-d CPU tensor: a graph input, not a constant, so any
number of layers share one compiled graph, and what a layer does at run time (its denoising step, a
forced backend) is never frozen into it.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from multimodal_gen.runtime.layers.attention.call import AttentionCall


class _Layer(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor: ...


# Process-wide, because a compiled graph can carry numbers but no Python objects.
_LAYERS: "WeakValueDictionary[int, _Layer]" = WeakValueDictionary()
_NUMBERS = itertools.count()

_WHY_OUTSIDE = (
    "gradients through attention layers are recorded outside compiled graphs; run under "
    "torch.no_grad() or compile without fullgraph. Calls with a cache, a mask of blocks or "
    "sink_logits run outside of them, too"
)

_VMAP_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        "FuncTorchDynamicLayerFrontMode",
        "FuncTorchDynamicLayerBackMode",
        "FuncTorchBatched",
        "FuncTorchVmapMode",
    )
)


def register_layer(layer: _Layer) -> torch.Tensor:
    """Return the identity of `layer`: int64, 0-d, on the CPU wherever the layer lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def outside_graphs(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep `function` out of compiled graphs; with `fullgraph` the error of torch says why."""
    disable: Callable[..., Callable[..., torch.Tensor]] = torch.compiler.disable
    # Older versions of torch take no reason.
    takes_reason = "reason" in inspect.signature(disable).parameters
    return disable(function, **({"reason": _WHY_OUTSIDE} if takes_reason else {}))


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
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _VMAP_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@torch.library.custom_op("multimodal_gen::attention", mutates_args=(), **_never_captured())
def attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    layer: torch.Tensor,
    gate: torch.Tensor | None,
    replicated: Sequence[int],
    seq_lens: Sequence[int] | None,
    exchange: bool,
    some_heads: bool,
) -> torch.Tensor:
    """Run a call of a registered layer; see `AttentionCall` for the arguments.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        attn_mask: the call's mask, or None.
        layer: what `register_layer` returned.
        gate: [B, Sq, H, D], or None.
        replicated: tokens that all ranks hold: in front, at the end, and keys in front.
        seq_lens: tokens of each rank, or None.
        exchange: whether the layer may exchange tokens with other ranks.
        some_heads: whether the tensors may hold a share of the layer's heads.

    Returns:
        [B, Sq, H, Dv], contiguous.
    """
    front, back, keys = replicated
    call = AttentionCall(
        query,
        key,
        value,
        attn_mask,
        gate,
        replicated=(front, back, keys),
        seq_lens=seq_lens,
        exchange=exchange,
        some_heads=some_heads,
    )
    with _with_vmap():
        return _LAYERS[int(layer)].attend(call).contiguous()


@attention_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
