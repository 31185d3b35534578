"""Block-sparse attention: validates once, then runs one opaque operator.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import math
from typing import Any

import torch

from multimodal_gen.kernels.block_sparse import providers
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks, check_arguments
from multimodal_gen.kernels.block_sparse.providers import loadable
from multimodal_gen.kernels.block_sparse.reference import attention_reference_backward
from multimodal_gen.kernels.block_sparse.tuning import CHOICE_ROWS

__all__ = [
    "block_sparse_attention",
    "block_sparse_attention_backward_op",
    "block_sparse_attention_op",
    "kernel_for",
    "loadable",
    "rows_for_choice",
]


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = providers.AUTO,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the pairs of `plan`.

    Under `torch.compile` it is one opaque operator. Only the reference has a backward pass.

    Args:
        q: queries, [B, Sq, H, D], any strides.
        k: keys, [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: values, [B, Sk, Hkv, D], any strides. Rows of keys and values that belong to no block
            must be finite.
        plan: which pairs count; on the device of q.
        scale: positive factor of the scores, 1 / sqrt(D) by default.
        return_lse: whether to return the log-sum-exp of the scores as well.
        kernel: provider that must run, or "auto" for the fastest that can.
        deterministic: whether two runs must agree bit by bit; costs speed in some providers.

    Returns:
        out [B, Sq, H, D] in q's dtype, contiguous; with `return_lse` also lse [B, H, Sq], fp32,
        natural logarithm. Query rows without keys, or in no query block, give 0 and -inf.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other or the plan.
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    check_arguments(q, k, v, plan, scale)
    backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if q.shape[0] == 0:
        lse = q.new_empty((0, q.shape[2], q.shape[1]), dtype=torch.float32)
        return (q.clone(), lse) if return_lse else q.clone()
    if not backward and type(q) is torch.Tensor and not torch.compiler.is_compiling():
        # Past the operator, whose plan would be another object every time, without a cache.
        provider = providers.choose(kernel, providers.request_for(q, k, v, plan, backward=False))
        out, found = provider.run(q, k, v, plan, scale, return_lse, deterministic)
        return out if found is None else (out, found)
    out, lse = block_sparse_attention_op(
        q,
        k,
        v,
        *_flatten(plan),
        scale=scale,
        return_lse=return_lse,
        kernel=kernel,
        deterministic=deterministic,
        backward=backward,
    )
    return (out, lse) if return_lse else out


def kernel_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, kernel: str = providers.AUTO
) -> str:
    """Return the name of the provider that `block_sparse_attention` would run.

    Raises:
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return providers.choose(kernel, providers.request_for(q, k, v, plan, backward=backward)).name


def rows_for_choice(q: torch.Tensor, kernel: str, given: tuple[torch.Tensor, ...]) -> int:
    """Return the rows of a query block that suit plans with row bits best; whatever keys there are.

    Args:
        q: [B, S, H, D], what the queries are copied from.
        kernel: provider that will be asked for.
        given: keys and values, unless they will be copied, too.
    """
    on_cuda = q.device.type == "cuda"
    request = providers.EngineRequest(
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if on_cuda else None,
        rocm=torch.version.hip is not None,
        dtype=q.dtype,
        head_size=q.shape[3],
        q_size=CHOICE_ROWS,
        regular=False,
        row_bits=True,
        aligned=q.shape[3] * q.element_size() % 16 == 0 and all(map(loadable, given)),
    )
    wide = kernel in (providers.AUTO, "gluon") and providers.serves("gluon", request)
    return CHOICE_ROWS if wide and q.dtype == torch.bfloat16 else 128


def _flatten(plan: BlockPlan) -> tuple[Any, ...]:
    """Return the plan as operator arguments, in the operator's order."""
    q, kv = plan.q, plan.kv
    return (
        plan.indices,
        plan.counts,
        q.starts,
        q.lengths,
        kv.starts,
        kv.lengths,
        plan.row_bits,
        plan.order,
        q.num,
        q.size,
        kv.num,
        kv.size,
        plan.uniform,
        plan.causal,
    )


def _unflatten(q: torch.Tensor, k: torch.Tensor, flat: tuple[Any, ...]) -> BlockPlan:
    indices, counts, q_starts, q_lengths, kv_starts, kv_lengths, row_bits, order = flat[:8]
    q_num, q_size, kv_num, kv_size, uniform, causal = flat[8:]
    return BlockPlan(
        indices=indices,
        counts=counts,
        q=Blocks(num=q_num, size=q_size, total=q.shape[1], starts=q_starts, lengths=q_lengths),
        kv=Blocks(num=kv_num, size=kv_size, total=k.shape[1], starts=kv_starts, lengths=kv_lengths),
        row_bits=row_bits,
        order=order,
        uniform=uniform,
        causal=causal,
    )


@torch.library.custom_op("multimodal_gen::block_sparse_attention", mutates_args=())
def block_sparse_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    q_starts: torch.Tensor | None,
    q_lengths: torch.Tensor | None,
    kv_starts: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    row_bits: torch.Tensor | None,
    order: torch.Tensor | None,
    q_num: int,
    q_size: int,
    kv_num: int,
    kv_size: int,
    uniform: bool,
    causal: bool,
    scale: float,
    return_lse: bool,
    kernel: str,
    deterministic: bool,
    backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the provider; the plan comes as its tensors and sizes. lse is empty unless asked for."""
    lists = (indices, counts, q_starts, q_lengths, kv_starts, kv_lengths, row_bits, order)
    plan = _unflatten(q, k, (*lists, q_num, q_size, kv_num, kv_size, uniform, causal))
    provider = providers.choose(kernel, providers.request_for(q, k, v, plan, backward=backward))
    # The reference computes lse anyway, and the backward pass is only its.
    out, lse = provider.run(q, k, v, plan, scale, return_lse, deterministic)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


@block_sparse_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Any:
    *_, return_lse, _kernel, _deterministic, _backward = (*rest, *options.values())
    shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("multimodal_gen::block_sparse_attention_backward", mutates_args=())
def block_sparse_attention_backward_op(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    q_starts: torch.Tensor | None,
    q_lengths: torch.Tensor | None,
    kv_starts: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    row_bits: torch.Tensor | None,
    order: torch.Tensor | None,
    q_num: int,
    q_size: int,
    kv_num: int,
    kv_size: int,
    uniform: bool,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, by the reference."""
    lists = (indices, counts, q_starts, q_lengths, kv_starts, kv_lengths, row_bits, order)
    plan = _unflatten(q, k, (*lists, q_num, q_size, kv_num, kv_size, uniform, causal))
    return attention_reference_backward(grad_out, grad_lse, q, k, v, plan, scale=scale)


@block_sparse_attention_backward_op.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, (*sizes, scale, return_lse, _kernel, _deterministic, _backward) = (
        inputs[:11],
        inputs[11:],
    )
    ctx.save_for_backward(*tensors)
    ctx.sizes, ctx.scale, ctx.return_lse = sizes, scale, return_lse


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, *lists = ctx.saved_tensors
    grads = block_sparse_attention_backward_op(
        grad_out,
        grad_lse if ctx.return_lse else None,
        q,
        k,
        v,
        *lists,
        *ctx.sizes,
        ctx.scale,
    )
    return (*grads, *[None] * 19)


block_sparse_attention_op.register_autograd(_backward, setup_context=_setup_context)
