"""One attention call: its tensors, and the checks of the arguments that layers take.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import math
from numbers import Integral, Real

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta
from multimodal_gen.runtime.layers.attention.schedule import LayerGeometry

__all__ = [
    "all_or_none",
    "are_tensors",
    "autocast",
    "autocasts",
    "check_mask_meta",
    "check_no_replicated",
    "check_numbers",
    "check_replicated",
    "check_seq_lens",
    "check_sizes",
    "check_split",
    "fits",
    "misfit",
    "no_tensor",
    "wants_gradient",
]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device."""
    # Asking about "meta" is an error, and torch 2.11 cannot trace what tells such devices apart.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for torch's own attention: selection then sees what kernels get."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    # Autocast leaves doubles alone.
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in tensors
    )


def wants_gradient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
) -> bool:
    """Whether autograd records what is computed from the tensors."""
    # Spelled out: a generator would cost more than the rest of the call.
    return torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )


def all_or_none(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: str,
    after: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the three tensors, or None when none is given; a part of them is an error."""
    if q is not None and k is not None and v is not None:
        return q, k, v
    if q is None and k is None and v is None:
        return None
    given = zip("qkv", (q, k, v), strict=True)
    missing = ", ".join(f"{before}{name}{after}" for name, x in given if x is None)
    raise UsageError(
        f"{before}q{after}, {before}k{after} and {before}v{after} must be given together, "
        f"missing {missing}"
    )


def check_seq_lens(
    seq_lens: list[int] | None, q: torch.Tensor, *, exclusive: bool, split: bool = False
) -> None:
    """Refuse `seq_lens` that do not describe this one device, or that exclude other inputs.

    Where tokens are split over several, those are compared with what they hold later on.
    """
    if seq_lens is None:
        return
    if exclusive:
        raise UsageError("seq_lens must not be combined with masks or replicated tokens")
    if not split and list(seq_lens) != [q.shape[1]]:
        raise UsageError(
            f"seq_lens must hold one length per device, here [{q.shape[1]}], got {list(seq_lens)}"
        )


def check_replicated(replicated: tuple[int, int, int], q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse counts of replicated tokens that exceed the sequence or exclude each other."""
    if replicated == (0, 0, 0):
        return
    names = ("num_replicated_prefix", "num_replicated_suffix", "num_replicated_kv_prefix")
    limits = (q.shape[1], q.shape[1], k.shape[1])
    if sum(count != 0 for count in replicated) > 1:
        raise UsageError(
            f"at most one of {', '.join(names)} must be non-zero, got {list(replicated)}"
        )
    for name, count, limit in zip(names, replicated, limits, strict=True):
        if not 0 <= count <= limit:
            raise UsageError(f"{name} must be in [0, {limit}], got {count}")


def check_no_replicated(*replicated: torch.Tensor | None) -> None:
    """Refuse tokens that all ranks hold, where a layer has no place for them."""
    if any(x is not None for x in replicated):
        raise UsageError(
            "replicated_q, replicated_k and replicated_v must be None in UlyssesAttention_VSA; "
            "use UlyssesAttention for joint sequences"
        )


def check_split(has_prefix: bool, pre_exchanged: bool) -> None:
    """Refuse what cannot be honoured where tokens are split over ranks."""
    if has_prefix:
        raise UsageError(
            "q_prefix, k_prefix and v_prefix must be None where tokens are split over ranks; put "
            "tokens that all ranks hold in front and count them in num_replicated_prefix"
        )
    if pre_exchanged:
        raise UsageError(
            "qkv_pre_all_to_all must be False where tokens are split over ranks: heads that were "
            "exchanged before cannot be taken; pass the tokens of this rank"
        )


def check_mask_meta(
    meta: VarlenMaskMeta | None, attn_mask: torch.Tensor | None, k: torch.Tensor
) -> None:
    """Refuse a packing without its mask, or of another batch."""
    if meta is None:
        return
    if not isinstance(meta, VarlenMaskMeta):
        raise UsageError(
            f"attn_mask_meta must be what build_varlen_mask_meta returns, got a "
            f"{type(meta).__name__}"
        )
    if attn_mask is None:
        raise UsageError("attn_mask_meta must come with the attn_mask it packs, got no attn_mask")
    if meta.keep.shape != k.shape[:2]:
        raise UsageError(
            f"attn_mask_meta must pack [B, Sk] = {list(k.shape[:2])}, got {list(meta.keep.shape)}"
        )


def check_sizes(num_heads: int, head_size: int, num_kv_heads: int) -> None:
    """Refuse sizes no attention has."""
    sizes = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise ConfigError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )


def check_numbers(softmax_scale: float | None, compute_dtype: torch.dtype | None) -> None:
    """Refuse a scale that makes every output NaN, and what is no dtype."""
    if softmax_scale is not None and (
        isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real)
    ):
        raise ConfigError(f"softmax_scale must be a number, got {softmax_scale!r}")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ConfigError(f"softmax_scale must be finite, got {softmax_scale}")
    if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
        raise ConfigError(
            f"compute_dtype must be a torch.dtype such as torch.bfloat16, got {compute_dtype!r}"
        )


def fits(query: torch.Size, key: torch.Size, value: torch.Size, geometry: LayerGeometry) -> bool:
    """Whether the shapes of q, k and v belong together and to the layer."""
    if not len(query) == len(key) == len(value) == 4:
        return False
    batch, _, heads, size = query
    # Under sequence parallelism a device holds its share of the heads: only their ratio is fixed.
    return (
        size == key[3] == geometry.head_size
        and batch == key[0] == value[0]
        and heads * geometry.num_kv_heads == key[2] * geometry.num_heads
        and key[2] == value[2]
        and key[1] == value[1]
    )


def misfit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: LayerGeometry
) -> UsageError:
    """Return the error of inputs that do not fit."""
    return UsageError(
        f"q, k and v must be [B, Sq, H, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv] with D = "
        f"{geometry.head_size} and {geometry.num_heads} query heads per {geometry.num_kv_heads} "
        f"key heads, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    )


def are_tensors(query: object, key: object, value: object, attn_mask: object) -> bool:
    """Whether q, k and v are tensors, and the mask one or None; spelled out, for it is per call."""
    return (
        isinstance(query, torch.Tensor)
        and isinstance(key, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (attn_mask is None or isinstance(attn_mask, torch.Tensor))
    )


def no_tensor(**arguments: object) -> UsageError:
    """Return the error of the first argument that is no tensor; a mask may be None."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) and not (name == "attn_mask" and value is None):
            break
    return UsageError(
        f"{name} must be a torch.Tensor, got {type(value).__name__}; make it one with "
        f"torch.as_tensor"
    )
