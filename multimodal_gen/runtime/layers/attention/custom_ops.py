"""A layer as one opaque operator under `torch.compile`.

The operator takes the layer's identity as a 0-d CPU tensor: a graph input, not a constant, so any
number of layers share one compiled graph, and what a layer does at run time (its denoising step, a
forced backend) is never frozen into it.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
    from multimodal_gen.runtime.layers.attention.sequence_parallel.layer import SplitAttentionLayer

# Process-wide, because a compiled graph can carry numbers but no Python objects.
_LAYERS: "WeakValueDictionary[int, AttentionLayer]" = WeakValueDictionary()
_NUMBERS = itertools.count()

_WHY_OUTSIDE = (
    "gradients through attention layers are recorded outside compiled graphs; run under "
    "torch.no_grad() or compile without fullgraph"
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


def register_layer(layer: "AttentionLayer") -> torch.Tensor:
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
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a registered layer.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        attn_mask: as `LocalAttention.forward` takes it.
        layer: what `register_layer` returned.
        gate: [B, Sq, H, D] weight of the coarse branch, or None.

    Returns:
        [B, Sq, H, Dv], contiguous.
    """
    with _with_vmap():
        return _LAYERS[int(layer)].attend_now(query, key, value, attn_mask, gate).contiguous()


@torch.library.custom_op("multimodal_gen::parallel_attention", mutates_args=(), **_never_captured())
def parallel_attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    layer: torch.Tensor,
    replicated: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a registered layer whose tokens are split over ranks.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        attn_mask: [B, Sk] or [B, 1, 1, Sk].
        layer: what `register_layer` returned.
        replicated: tokens that all ranks hold: in front, at the end, keys in front.
        seq_lens: tokens of each rank, or None.
        gate: [B, Sq, H, D] weight of the coarse branch, or None.

    Returns:
        [B, Sq, H, Dv], contiguous.
    """
    with _with_vmap():
        own = cast("SplitAttentionLayer", _LAYERS[int(layer)])
        given = (query, key, value, attn_mask, tuple(replicated), seq_lens, gate)
        return own.attend_split(*given).contiguous()


@parallel_attention_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    layer: torch.Tensor,
    replicated: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@attention_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    layer: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
