"""The checks of what layers are called with.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from numbers import Integral
from typing import NoReturn

import torch

from multimodal_gen.errors import UsageError, short
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry, autocasts
from multimodal_gen.runtime.layers.attention.masks import VarlenMaskMeta


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
        what = "what build_varlen_mask_meta returns"
        raise UsageError(f"attn_mask_meta must be {what}, got {short(meta)}")
    if attn_mask is None:
        raise UsageError("attn_mask_meta must come with the attn_mask it packs, got no attn_mask")
    if meta.mask.shape != k.shape[:2]:
        raise UsageError(
            f"attn_mask_meta must pack [B, Sk] = {list(k.shape[:2])}, got {list(meta.mask.shape)}"
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
