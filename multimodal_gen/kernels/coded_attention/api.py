"""Attention to keys and values in codes: validates, then runs Triton or the reference.

Shapes: B batch, Sq tokens, H query heads, Hkv key heads, D head size, N slots, C rows of a slot.
"""

import math

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.coded_attention.codes import BITS, OF_KEYS, OF_VALUES, Coded
from multimodal_gen.kernels.coded_attention.reference import coded_attention_reference
from multimodal_gen.kernels.engine import CODED, choose_for


def coded_attention(
    q: torch.Tensor,
    keys: Coded,
    values: Coded,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention to the first rows of every slot; carries no gradient.

    Keys and values are what codes stand for, rounded to q's dtype. The Triton kernel makes them in
    registers, a step of 64 tokens at a time; the reference makes those of one slot at a time.

    Args:
        q: queries, [B, Sq, H, D], any strides.
        keys: codes uint8 [B, N * C, Hkv, D * bits / 8] of 2 or 4 bits, and scales bf16
            [B, N * ceil(C / 64), Hkv, D, 2]: groups begin anew in every slot.
        values: codes as of the keys, and scales bf16 [B, N * C, Hkv, ceil(D / 64), 2].
        lengths: int32 [N], how many rows of a slot are attended to, on the device of q. That they
            lie in [0, C] is up to the caller: to look would wait for the device, and what others
            give is not defined.
        scale: positive and finite factor of the scores, 1 / sqrt(D) by default.

    Returns:
        out [B, Sq, H, D] in q's dtype, contiguous; lse [B, H, Sq], fp32, natural logarithm. Where
        no row is attended to they are 0 and -inf.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other, or `scale` is not positive and
            finite.
    """
    bits = _bits_of(q, keys, values, lengths)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise UsageError(f"`scale` must be positive and finite, got {scale:g}")
    if q.numel() and coded_kernel_for(q) == "triton":
        from multimodal_gen.kernels.coded_attention import coded_attention_kernel

        return coded_attention_kernel.attend(q, keys, values, lengths, bits=bits, scale=scale)
    given = (q, keys, values, lengths)
    out, lse = coded_attention_reference(*given, bits=bits, scale=scale)
    return out.contiguous(), lse.float()


def coded_kernel_for(q: torch.Tensor) -> str:
    """Return the name of the kernel that `coded_attention` runs."""
    return choose_for(CODED, q, head_size=q.shape[3])


def _bits_of(q: torch.Tensor, keys: Coded, values: Coded, lengths: torch.Tensor) -> int:
    """Check the arguments, and return the bits of a code."""
    if q.dim() != 4 or not q.shape[3] or lengths.dim() != 1 or lengths.dtype is not torch.int32:
        raise UsageError(
            f"`q` must be [B, S, H, D] and `lengths` int32 [N], got {list(q.shape)} and "
            f"{lengths.dtype} {list(lengths.shape)}"
        )
    batch, _, heads, size = q.shape
    num, of_codes = len(lengths), keys.codes.shape
    _, rows, kv_heads, width = of_codes if len(of_codes) == 4 else (0, 0, 0, 0)
    bits, rest = divmod(8 * width, size)
    if bits not in BITS or rest or not num or rows % num or not kv_heads or heads % kv_heads:
        raise UsageError(
            f"`keys` must have codes of 2 or 4 bits for {size} channels, whole rows in {num} slots "
            f"and a divisor of {heads} heads, got {list(keys.codes.shape)}"
        )
    shape = (batch, rows, kv_heads, width)
    for name, coded, grouping in (("keys", keys, OF_KEYS), ("values", values, OF_VALUES)):
        groups, parts = grouping.of(rows // num, size)
        scales = (batch, num * groups, kv_heads, parts, 2)
        if tuple(coded.codes.shape) != shape or tuple(coded.scales.shape) != scales:
            raise UsageError(
                f"`{name}` must have codes {list(shape)} and scales {list(scales)}, got "
                f"{list(coded.codes.shape)} and {list(coded.scales.shape)}"
            )
        if coded.codes.dtype is not torch.uint8 or coded.scales.dtype is not torch.bfloat16:
            raise UsageError(
                f"`{name}` must be uint8 with scales in bfloat16, got {coded.codes.dtype} and "
                f"{coded.scales.dtype}"
            )
    devices = {x.device for x in (q, *keys, *values, lengths)}
    if len(devices) > 1:
        raise UsageError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    return bits
