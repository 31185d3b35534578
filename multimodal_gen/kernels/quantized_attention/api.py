"""8-bit attention: validates, chooses a provider, quantises and computes.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import math
from typing import Literal, get_args

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, check_arguments
from multimodal_gen.kernels.quantized_attention import providers
from multimodal_gen.kernels.quantized_attention.providers import Call, QuantisedRequest

__all__ = ["Values", "kernel_for", "quantized_attention"]

Values = Literal["16-bit", "e4m3"]


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = providers.AUTO,
    values: Values = "16-bit",
    mean: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the pairs of `plan`, on int8 queries and keys.

    The keys' mean is subtracted from them first, which changes no weight; lse is corrected for it.
    Then both are rotated over their channels, which changes no score: channels that stand out are
    spread over the others, instead of making the steps of 8 bits coarse for all.

    Does not wait for the device after its first call there, and has no backward pass.

    Args:
        q: queries, [B, Sq, H, D], any strides.
        k: keys, [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: values, [B, Sk, Hkv, D], any strides. Keys and values that lie in blocks must be finite.
        plan: which pairs count, without row bits; on the device of q.
        scale: positive factor of the scores, 1 / sqrt(D) by default.
        return_lse: whether to return the log-sum-exp of the scores as well.
        kernel: provider that must run, or "auto" for the fastest that can.
        values: what weights and values are rounded to before they are multiplied: "16-bit", where
            float16 may become bfloat16, or "e4m3", which needs compute capability 8.9 and is a
            third to half as exact: where values have no mean, the relative L1 error exceeds 3 %.
        mean: fp32 [B, Hkv, D], the mean of the keys where it is known.

    Returns:
        out [B, Sq, H, D] in q's dtype, contiguous; with `return_lse` also lse [B, H, Sq], fp32,
        natural logarithm. Query rows without keys, or in no query block, give 0 and -inf.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other or the plan.
        UnsupportedBackendError: the call cannot be served; lists the reasons.
    """
    check_arguments(q, k, v, plan, scale)
    _validate(q, k, v, plan)
    if values not in get_args(Values):
        raise UsageError(f"`values` must be 16-bit or e4m3, got {values!r}")
    wanted = (k.shape[0], k.shape[2], k.shape[3])
    if mean is not None and (mean.shape != wanted or mean.dtype != torch.float32):
        raise UsageError(
            f"`mean` must be float32 {list(wanted)}, got {mean.dtype} {list(mean.shape)}"
        )
    request = _request(q, plan, values)
    call = Call(
        q=q,
        k=k,
        v=v,
        plan=plan,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        return_lse=return_lse,
        e4m3=values == "e4m3",
        mean=None if mean is None else mean.contiguous(),
    )
    out, lse = providers.choose(kernel, request).run(call)
    return out if lse is None else (out, lse)


def kernel_for(
    q: torch.Tensor, plan: BlockPlan, kernel: str = providers.AUTO, values: Values = "16-bit"
) -> str:
    """Return the name of the provider that `quantized_attention` would run.

    Raises:
        UnsupportedBackendError: the call cannot be served; lists the reasons.
    """
    return providers.choose(kernel, _request(q, plan, values)).name


def _request(q: torch.Tensor, plan: BlockPlan, values: Values) -> QuantisedRequest:
    on_cuda = q.device.type == "cuda"
    return QuantisedRequest(
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if on_cuda else None,
        rocm=torch.version.hip is not None,
        dtype=q.dtype,
        head_size=q.shape[3],
        values=values,
        causal=plan.causal,
        aligned_causal=plan.q.size % 64 == plan.kv.size % 64 == 0,
    )


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UsageError(
                f"`{name}` must not require grad, 8-bit attention has no backward pass; call it "
                f"under torch.no_grad()"
            )
    if plan.row_bits is not None:
        raise UsageError("`plan` must be without row bits for 8-bit attention, got some")
    kv_heads = k.shape[2]
    for tensor in plan.kv.tensors():
        if tensor.shape[1] not in (1, kv_heads):
            raise UsageError(
                f"`plan` must cut keys alike for the query heads that share them, or 1 or "
                f"{kv_heads} times, got {tensor.shape[1]} times"
            )
