"""The checks of what layers are given: when they are built, and at every call.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import NoReturn

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry, autocasts
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta
from multimodal_gen.runtime.layers.attention.request import LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.settings import short

__all__ = [
    "all_or_none",
    "check_alike",
    "check_exchange",
    "check_flags",
    "check_mask_meta",
    "check_no_replicated",
    "check_numbers",
    "check_places",
    "check_projection",
    "check_replicated",
    "check_seq_lens",
    "check_sizes",
    "check_split",
    "join_tokens",
    "refuse_shapes",
]

_MOST_CHANNELS = 1 << 20  # beyond all use, and within all integers of kernels
_MOST_SCALE = sys.float_info.max


def refuse_shapes(call: AttentionCall, geometry: LayerGeometry) -> NoReturn:
    """Say why q, k and v are not those of a layer, once that is known."""
    _check_dense(query=call.query, key=call.key, value=call.value)
    per = "per" if call.some_heads else "and"
    raise UsageError(
        f"q, k and v must be [B, Sq, H, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv] with D = "
        f"{geometry.head_size}, and {geometry.num_heads} query heads {per} "
        f"{geometry.num_kv_heads} key heads, got {list(call.query.shape)}, "
        f"{list(call.key.shape)} and {list(call.value.shape)}"
    )


def check_alike(call: AttentionCall) -> None:
    """Refuse tensors of a call that cannot be computed with each other, whatever their shapes.

    Autocast makes dtypes alike.
    """
    q, k, v = call[:3]
    if not (q.device == k.device == v.device):
        raise UsageError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}; "
            f"move them with .to()"
        )
    if not (q.dtype is k.dtype is v.dtype or autocasts(q.device)):
        raise UsageError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast them "
            f"with .to(), or run under torch.autocast"
        )
    if call.mask is not None:
        _check_like_query("attn_mask", call.mask, q)
    if call.gate is not None:
        _check_like_query("gate", call.gate, q)


def _check_like_query(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse a mask or a gate that is not for `q`, whatever its shape."""
    _check_dense(**{name: x})
    if x.device != q.device:
        raise UsageError(
            f"{name} must be on the device of q, {q.device}, got {x.device}; move it with .to()"
        )
    if x.is_complex():
        raise UsageError(f"{name} must be real, got {x.dtype}; masks are bool, integer or floating")


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
    _check_tokens(q, "q")
    if not isinstance(seq_lens, (list, tuple)) or not all(_is_count(n) for n in seq_lens):
        raise UsageError(f"seq_lens must be a list of whole numbers >= 0, got {seq_lens!r}")
    if exclusive:
        raise UsageError("seq_lens must not be combined with masks or replicated tokens")
    if not split and list(seq_lens) != [q.shape[1]]:
        raise UsageError(
            f"seq_lens must hold one length per device, here [{q.shape[1]}], got {list(seq_lens)}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def check_replicated(replicated: tuple[int, int, int], q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse counts of replicated tokens that exceed the sequence or exclude each other."""
    names = ("num_replicated_prefix", "num_replicated_suffix", "num_replicated_kv_prefix")
    front, back, in_front = replicated
    # Types come first: a tensor is equal to nothing in particular.
    if type(front) is type(back) is type(in_front) is int and not (front or back or in_front):
        return
    for name, count in zip(names, replicated, strict=True):
        if type(count) is not int and (isinstance(count, bool) or not isinstance(count, Integral)):
            raise UsageError(f"{name} must be a whole number, got {short(count)}")
    _check_tokens(q, "q")
    _check_tokens(k, "k")
    limits = (q.shape[1], q.shape[1], k.shape[1])
    if sum(count != 0 for count in replicated) > 1:
        raise UsageError(
            f"at most one of {', '.join(names)} must be non-zero, got {list(replicated)}"
        )
    for name, count, limit in zip(names, replicated, limits, strict=True):
        if not 0 <= count <= limit:
            raise UsageError(f"{name} must be in [0, {limit}], got {count}")


def _check_tokens(x: torch.Tensor, name: str) -> None:
    """Refuse what is no dense tensor of four axes."""
    _check_dense(**{name: x})
    if x.dim() != 4:
        raise UsageError(f"{name} must be [B, S, H, D], got {list(x.shape)}")


def join_tokens(front: torch.Tensor, back: torch.Tensor, names: tuple[str, str]) -> torch.Tensor:
    """Return tokens followed by others of the same sequences, [B, S1 + S2, H, D].

    Args:
        front: [B, S1, H, D].
        back: [B, S2, H, D].
        names: what the two are called, for messages.

    Raises:
        UsageError: batch, heads, channels, dtype or device differ.
    """
    for x, name in zip((front, back), names, strict=True):
        _check_tokens(x, name)
    alike = (
        front.shape[0] == back.shape[0]
        and front.shape[2:] == back.shape[2:]
        and front.device == back.device
        and (front.dtype is back.dtype or autocasts(front.device))
    )
    if not alike:
        first, second = (f"{list(x.shape)} {x.dtype} on {x.device}" for x in (front, back))
        raise UsageError(
            f"{names[0]} and {names[1]} must be alike in all but the number of tokens, got "
            f"{first} and {second}"
        )
    return torch.cat((front, back), dim=1)


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
        if not 1 <= size <= _MOST_CHANNELS:
            bound = "at least 1" if size < 1 else f"at most {_MOST_CHANNELS}"
            raise ConfigError(f"{name} must be {bound}, got {short(size)}")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )


def check_flags(**flags: object) -> None:
    """Refuse what is neither true nor false: a text such as "no" would count as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False, got {flag!r}")


def check_exchange(skip: object, pre_exchanged: object) -> None:
    """Refuse flags of a call that are neither true nor false."""
    if not (skip is pre_exchanged is False):  # which nearly all calls have
        check_flags(skip_sequence_parallel_override=skip, qkv_pre_all_to_all=pre_exchanged)


def check_places(site: object, scope: object, supported: object, prefix: object) -> None:
    """Refuse what does not say where a layer sits, what was configured, or what it prefers."""
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be a dotted path such as 'blocks.3.attn', got {prefix!r}")
    if site is not None and not isinstance(site, LayerSite):
        raise ConfigError(f"site must be a LayerSite or None, got {site!r}")
    if scope is not None and not isinstance(scope, SelectionScope):
        raise ConfigError(
            f"scope must be a SelectionScope or None, got {scope!r}; a backend is named by "
            f"default_attention_backend"
        )
    if supported is not None and (
        isinstance(supported, (str, torch.Tensor)) or not isinstance(supported, Collection)
    ):
        raise ConfigError(
            f"supported_attention_backends must be a collection of backends or None, got "
            f"{supported!r}"
        )


def check_numbers(softmax_scale: float | None, compute_dtype: torch.dtype | None) -> None:
    """Refuse a scale that makes every output NaN, and what is no dtype."""
    if softmax_scale is not None and (
        isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real)
    ):
        raise ConfigError(f"softmax_scale must be a number, got {softmax_scale!r}")
    # A whole number may be finite and yet too large for a float.
    if softmax_scale is not None and not abs(softmax_scale) <= _MOST_SCALE:
        raise ConfigError(f"softmax_scale must be finite, got {short(softmax_scale)}")
    if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
        raise ConfigError(
            f"compute_dtype must be a torch.dtype such as torch.bfloat16, got {compute_dtype!r}"
        )


def check_projection(linear: object, head_size: int) -> None:
    """Refuse what does not map the channels of a head to themselves."""
    weight = getattr(linear, "weight", None)
    shape = list(weight.shape) if isinstance(weight, torch.Tensor) else None
    if linear is not None and shape != [head_size, head_size]:
        got = f"a weight of {shape}" if shape else f"a {type(linear).__name__}"
        raise UsageError(
            f"`linear` must map {head_size} channels to {head_size}, those of a head, got {got}"
        )


def _check_dense(**given: torch.Tensor) -> None:
    """Refuse what is no tensor, and then tensors that are sparse or nested."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise UsageError(
                f"{name} must be a torch.Tensor, got {type(x).__name__}; make it one with "
                f"torch.as_tensor"
            )
    for name, x in given.items():
        if x.is_nested or x.layout is not torch.strided:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise UsageError(
                f"{name} must be a dense tensor, got a {kind} one; use to_dense(), or for nested "
                f"ones to_padded_tensor() and a mask"
            )
