"""8-bit attention: validates, chooses a kernel, quantises and computes.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.call import CallForm, known_form
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, check_arguments, empty_results
from multimodal_gen.kernels.engine import AUTO, QUANTIZED, KernelChoice, Request, choose
from multimodal_gen.kernels.launch.launcher import Form, form_of
from multimodal_gen.kernels.quantized_attention.packed import Kind, Packed, Results, slots_of
from multimodal_gen.kernels.quantized_attention.reference import (
    key_mean_reference,
    quantise_reference,
    quantized_reference,
)
from multimodal_gen.kernels.quantized_attention.tuning import gluon_tile, triton_tile
from multimodal_gen.kernels.tensors import is_plain, loadable, place_of

if TYPE_CHECKING:
    from multimodal_gen.kernels.quantized_attention.quantise_kernel import Quantiser

Values = Literal["16-bit", "e4m3"]
_VALUES = get_args(Values)

# What the reference takes for a tile of rows or keys.
_REFERENCE_TILE = 64


class Call(NamedTuple):
    """One call as kernels are given it; see `quantized_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: BlockPlan
    scale: float
    return_lse: bool
    e4m3: bool
    mean: torch.Tensor | None
    form: CallForm


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: KernelChoice = AUTO,
    values: Values = "16-bit",
    mean: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the pairs of `plan`, on int8 queries and keys.

    A mean of the keys is subtracted from them first, which changes no weight; lse is corrected for
    it. Then queries are made shorter along what they have in common and keys longer, and both are
    rotated over their channels, which changes no score: neither an offset nor channels that stand
    out make the steps of 8 bits coarse for all.

    Does not wait for the device after its first call there, and has no backward pass.

    Args:
        q: queries, [B, Sq, H, D], any strides.
        k: keys, [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: values, [B, Sk, Hkv, D], any strides. Keys and values that lie in blocks must be finite.
        plan: which pairs count, without row bits; on the device of q.
        scale: positive factor of the scores, 1 / sqrt(D) by default.
        return_lse: whether to return the log-sum-exp of the scores as well.
        kernel: what must run, "auto" for the fastest that can, or what was selected for a layer.
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
    form = _checked(q, k, v, plan, scale, values)
    if torch.is_grad_enabled():
        _refuse_gradients(q, k, v)
    wanted = (k.shape[0], k.shape[2], k.shape[3])
    if mean is not None and (mean.shape != wanted or mean.dtype != torch.float32):
        raise UsageError(
            f"`mean` must be float32 {list(wanted)}, got {mean.dtype} {list(mean.shape)}"
        )
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    mean = None if mean is None else mean.contiguous()
    call = Call(q, k, v, plan, scale, return_lse, values == "e4m3", mean, form)
    out, lse = RUN[choose(QUANTIZED, kernel, form.request)](call)
    return out if lse is None else (out, lse)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float | None,
    values: Values,
) -> CallForm:
    """Check the arguments; return what the choice of a kernel and its launches depend on.

    Plain tensors are checked once per form.
    """
    alike = all(map(is_plain, (q, k, v))) and type(plan) is BlockPlan and type(values) is str
    alike = alike and not torch.compiler.is_compiling()
    right = scale is None or (type(scale) is float and 0.0 < scale < math.inf)
    if not (alike and right):
        check_arguments(q, k, v, plan, scale)

    def make() -> Request:
        check_arguments(q, k, v, plan, scale)
        _validate(k, plan, values)
        return Request(
            *place_of(q.device),
            q.dtype,
            q.shape[3],
            q_size=plan.q.size,
            kv_size=plan.kv.size,
            causal=plan.causal,
            e4m3=values == "e4m3",
            device=q.device.index,
        )

    forms = _forms(q, k, v) if alike else ()
    if not forms:
        return CallForm(make())
    return known_form(("8-bit form", *forms, place_of(q.device), values), plan, make)


def _forms(*inputs: torch.Tensor) -> tuple[Form, ...]:
    """Return the forms of tensors, or none where one has no memory of its own.

    Those that `torch.func` wraps have none, nor have sparse ones.
    """
    try:
        return tuple(map(form_of, inputs))
    except RuntimeError:
        return ()


def _refuse_gradients(*inputs: torch.Tensor) -> None:
    for name, tensor in zip("qkv", inputs, strict=True):
        if tensor.requires_grad:
            raise UsageError(
                f"`{name}` must not require grad, 8-bit attention has no backward pass; call it "
                f"under torch.no_grad()"
            )


def _validate(k: torch.Tensor, plan: BlockPlan, values: Values) -> None:
    if values not in _VALUES:
        raise UsageError(f"`values` must be 16-bit or e4m3, got {values!r}")
    if plan.row_bits is not None:
        raise UsageError("`plan` must be without row bits for 8-bit attention, got some")
    kv_heads = k.shape[2]
    for tensor in plan.kv.tensors():
        if tensor.shape[1] not in (1, kv_heads):
            raise UsageError(
                f"`plan` must cut keys alike for the query heads that share them, or 1 or "
                f"{kv_heads} times, got {tensor.shape[1]} times"
            )


def _run_gluon(call: Call) -> Results:
    from multimodal_gen.kernels.quantized_attention.gluon_kernel import attend

    plan, blocks = call.plan, call.plan.kv
    tile = gluon_tile(
        q_size=plan.q.size, kv_size=blocks.size, regular=blocks.is_regular, e4m3=call.e4m3
    )
    packed = _quantised(call, tile.rows, tile.unit, permuted=call.e4m3, bfloat16=True)
    prepared = call.form.prepared
    return attend(packed, plan, empty_results(call.q, plan, call.return_lse), tile, prepared)


def _run_triton(call: Call) -> Results:
    from multimodal_gen.kernels.quantized_attention.triton_kernel import attend

    tile = triton_tile(q_size=call.plan.q.size)
    packed = _quantised(call, tile.rows, tile.keys)
    return attend(packed, call.plan, empty_results(call.q, call.plan, call.return_lse), tile)


def _quantised(
    call: Call, rows: int, keys: int, *, permuted: bool = False, bfloat16: bool = False
) -> Packed:
    """Return the tensors of a call in 8 bits.

    Args:
        call: the call.
        rows: of a tile of queries.
        keys: of a tile of keys and values.
        permuted: whether the keys of e4m3 values are stored in the order of a thread's scores.
        bfloat16: whether the kernel loads 16-bit values with the copy engine, and in bfloat16.
    """
    plan, prepared = call.plan, call.form.prepared
    kind = Kind(call.mean is None, call.return_lse, call.e4m3, permuted)
    key = (rows, keys, *kind, bfloat16)
    quantiser: Quantiser | None = prepared.get(key)
    if quantiser is None:
        from multimodal_gen.kernels.quantized_attention.quantise_kernel import prepare

        if bfloat16 and not (call.v.dtype == torch.bfloat16 and loadable(call.v)):
            kind = kind._replace(copied=torch.bfloat16)
        forms = tuple(map(form_of, call[:3]))
        quantiser = prepare(forms, slots_of(plan.q, rows), slots_of(plan.kv, keys), kind)
        prepared[key] = quantiser
    return quantiser(*call[:4], scale=call.scale, mean=call.mean)


def _run_reference(call: Call) -> Results:
    q_slots, kv_slots = (
        slots_of(blocks, _REFERENCE_TILE) for blocks in (call.plan.q, call.plan.kv)
    )
    packed = quantise_reference(
        *call[:3],
        q_slots,
        kv_slots,
        scale=call.scale,
        mean=key_mean_reference(call.k, kv_slots) if call.mean is None else call.mean,
        e4m3=call.e4m3,
        permuted=False,
    )
    out, lse = quantized_reference(packed, call.plan, q_slots, call.q.shape[3])
    return out.to(call.q.dtype), lse if call.return_lse else None


RUN: MappingProxyType[str, Callable[[Call], Results]] = MappingProxyType(
    {"gluon": _run_gluon, "triton": _run_triton, "reference": _run_reference}
)
"""Kernel -> how it is run."""
