"""Block-sparse attention: validates once, then runs one opaque operator.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse import cudnn, fa4
from multimodal_gen.kernels.block_sparse.call import Backward, Call, CallForm, known_form
from multimodal_gen.kernels.block_sparse.plan import (
    BlockPlan,
    check_arguments,
    empty_results,
    flatten,
    unflatten,
)
from multimodal_gen.kernels.block_sparse.reference import (
    attention_reference,
    attention_reference_backward,
)
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.block_sparse.tail import (
    PooledTail,
    add_tail_of,
)
from multimodal_gen.kernels.block_sparse.tuning import (
    CHOICE_ROWS,
    REDO_PAYS,
    WIDE_CHOICES,
    BackwardTiles,
    backward_tiles,
    gluon_backward_tile,
    gluon_tile,
    triton_tile,
)
from multimodal_gen.kernels.engine import (
    AUTO,
    BLOCK_SPARSE,
    KernelChoice,
    Request,
    SelectedKernel,
    choose,
    kernel_name,
    records_gradient,
    serves,
)
from multimodal_gen.kernels.tensors import is_plain, loadable, place_of

if TYPE_CHECKING:
    from multimodal_gen.kernels.block_sparse.gluon_kernel import Prepared

_Results: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: KernelChoice = AUTO,
    deterministic: bool = False,
    tail: PooledTail | None = None,
    skip: Skip | None = None,
    overwrite_q: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the pairs of `plan`.

    Under `torch.compile` it is one opaque operator, whose backward pass is another.

    Args:
        q: queries, [B, Sq, H, D], any strides.
        k: keys, [B, Sk, Hkv, D], any strides; query head h uses key head h // (H / Hkv).
        v: values, [B, Sk, Hkv, D], any strides. Rows of keys and values that belong to no block
            must be finite; where a gradient is asked for, those of queries and of the gradient of
            out too.
        plan: which pairs count; on the device of q.
        scale: positive factor of the scores, 1 / sqrt(D) by default.
        return_lse: whether to return the log-sum-exp of the scores as well.
        kernel: what must run, "auto" for the fastest that can, or what was selected for a layer.
        deterministic: whether two runs must agree bit by bit, as they must under
            `torch.use_deterministic_algorithms`; costs speed in some kernels.
        tail: lets the blocks that a row does not keep count by their means; None drops them.
        skip: leaves out what lies far below the scores seen so far; None leaves nothing out. Not
            under `torch.compile`, nor for subclasses of tensors, nor where a gradient is asked for.
        overwrite_q: whether `q` may be written to, for which a kernel may return out in its place;
            the caller must not read it then. Nothing is where a gradient is asked for.

    Returns:
        out [B, Sq, H, D] in q's dtype, contiguous unless it is `q`; with `return_lse` also lse
        [B, H, Sq], fp32, natural logarithm, of the tail too. Query rows without keys, or in no
        query block, give 0 and -inf.

    Raises:
        UsageError: shapes, dtypes or devices do not fit each other or the plan.
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    form = _checked(q, k, v, plan, scale)
    backward = records_gradient(q, k, v) if form is None else form.request.backward
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if skip is not None and (backward or form is None):
        raise UsageError(
            "`skip` must be None where a gradient is asked for, a graph is traced or a tensor is "
            "of a subclass, which do not know what a kernel leaves out; call it with plain tensors "
            "under torch.no_grad() and outside of the graph"
        )
    if tail is not None:
        if not isinstance(tail, PooledTail):
            raise UsageError(f"`tail` must be a PooledTail or None, got {type(tail).__name__}")
        options: dict[str, Any] = {"scale": scale, "kernel": kernel}
        tail.blocks_of(plan)  # which refuses plans without one
        out, lse = block_sparse_attention(
            q, k, v, plan, return_lse=True, deterministic=deterministic, skip=skip, **options
        )
        out, lse = add_tail_of(tail, out, lse, (q, k, v), plan, **options)
        return (out, lse) if return_lse else out
    if q.shape[0] == 0:
        lse = q.new_empty((0, q.shape[2], q.shape[1]), dtype=torch.float32)
        return (q.clone(), lse) if return_lse else q.clone()
    if form is not None:
        # Past the operator, whose plan would be another object every time, without a cache.
        asked = form.request if skip is None else form.request._replace(skip_below=True)
        chosen = choose(BLOCK_SPARSE, kernel, asked)
        call = Call(q, k, v, plan, scale, return_lse, deterministic, form, skip, overwrite_q)
        if backward:
            selected = None if isinstance(kernel, str) else kernel
            given = (q, k, v, call, chosen, selected)
            out, found = _Attention.apply(*given)  # type: ignore[no-untyped-call]
            return (out, found.float()) if return_lse else out
        out, found = RUN[chosen](call)
        return out if found is None else (out, found)
    if not torch.compiler.is_compiling():
        kernel = choose(BLOCK_SPARSE, kernel, request_for(q, k, v, plan, backward=backward))
    elif not isinstance(kernel, str):
        # What a call is like is known when the graph runs; layers never come here.
        kernel = kernel.name if kernel.named else AUTO
    out, lse = block_sparse_attention_op(
        q, k, v, *flatten(plan), scale, return_lse, kernel, deterministic, backward
    )
    return (out, lse.float()) if return_lse else out


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, scale: float | None
) -> CallForm | None:
    """Check the arguments; return the form of a call that needs no operator, else None.

    Plain tensors are checked once per form; see `check_arguments`.
    """
    plain = is_plain(q) and is_plain(k) and is_plain(v) and type(plan) is BlockPlan
    right = scale is None or (type(scale) is float and 0.0 < scale < math.inf)
    graph = torch.compiler.is_compiling()
    if graph or not (plain and right):
        check_arguments(q, k, v, plan, scale)
    if graph or not plain:
        return None
    backward = records_gradient(q, k, v)
    key = (
        "form", q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, place_of(q.device),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, backward,
    )  # fmt: skip

    def make() -> Request:
        check_arguments(q, k, v, plan, scale)
        return request_for(q, k, v, plan, backward=backward)

    return known_form(key, plan, make)


def refresh_plan(plan: BlockPlan) -> None:
    """Bring what kernels derived from a plan up to date after its lists were changed in place.

    The same tensors are written, so that a CUDA graph that was captured replays on the new lists.
    For plans whose shapes stay and whose counts remain `uniform`; does not wait for the device.
    What only the backward pass or a pooled tail reads stays as it was, and so do copies of lists,
    starts and lengths whose last stride is not 1.
    """
    if any(key[0] == "steps" for key in list(plan.cache)):
        from multimodal_gen.kernels.block_sparse.steps_kernel import refresh_steps

        refresh_steps(plan)
    for known in list(plan.cache.values()):
        if isinstance(known, BlockPlan):  # of the same lists, over keys in slots
            refresh_plan(known)


def kernel_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, kernel: KernelChoice = AUTO
) -> str:
    """Return the name of the kernel that `block_sparse_attention` would run.

    Raises:
        UnsupportedBackendError: the kernel asked for cannot serve this call; lists the reasons.
    """
    backward = records_gradient(q, k, v)
    return choose(BLOCK_SPARSE, kernel, request_for(q, k, v, plan, backward=backward))


def request_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, *, backward: bool
) -> Request:
    """Return what the choice of a kernel depends on for one call."""
    return Request(
        *place_of(q.device),
        q.dtype,
        q.shape[3],
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        ragged=plan.q.lengths is not None or plan.kv.lengths is not None,
        row_bits=plan.row_bits is not None,
        causal=plan.causal,
        unaligned=not loadable(q, k, v),
        backward=backward,
        grouped=q.shape[2] != k.shape[2],
        device=q.device.index,
    )


def rows_for_choice(q: torch.Tensor, kernel: KernelChoice, given: tuple[torch.Tensor, ...]) -> int:
    """Return the rows of a query block that suit plans with row bits best; whatever keys there are.

    Args:
        q: [B, S, H, D], what the queries are copied from.
        kernel: what will be asked for.
        given: keys and values, unless they will be copied, too.
    """
    request = Request(
        *place_of(q.device),
        q.dtype,
        q.shape[3],
        q_size=CHOICE_ROWS,
        ragged=True,
        row_bits=True,
        unaligned=q.shape[3] * q.element_size() % 16 != 0 or not loadable(*given),
        device=q.device.index,
    )
    name = kernel_name(kernel)
    if name == AUTO:
        name = choose(BLOCK_SPARSE, AUTO, request)
    wide = (name, q.dtype) in WIDE_CHOICES and serves(BLOCK_SPARSE, name, request)
    return CHOICE_ROWS if wide else 128


def _run_gluon(call: Call) -> _Results:
    q, _, _, plan, _, return_lse, deterministic, form, skip, overwrite_q = call
    # Queries of a block are read before its rows are written, by the program that writes them.
    out, lse = empty_results(q, plan, return_lse, out=q if overwrite_q else None)
    below = 0.0 if skip is None else skip.octaves
    key = (return_lse, deterministic, overwrite_q, below)
    prepared = form.prepared.get(key)
    if prepared is None:
        prepared = form.prepared[key] = _prepare_gluon(call, out, lse)
    prepared(call, out, lse)
    return out, lse


def _prepare_gluon(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> "Prepared":
    from multimodal_gen.kernels.block_sparse.gluon_kernel import prepare

    q, plan, skip = call.q, call.plan, call.skip
    small = q.numel() * plan.kv.total < REDO_PAYS
    tile = gluon_tile(
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        regular=plan.kv.is_regular,
        row_bits=plan.row_bits is not None,
        fast=q.dtype == torch.bfloat16 and skip is None and not small,
        deterministic=call.deterministic or small,
        skips=skip is not None,
    )
    return prepare(call, out, lse, tile=tile)


def _run_triton(call: Call) -> _Results:
    from multimodal_gen.kernels.block_sparse.triton_kernel import attend

    q, plan = call.q, call.plan
    out, lse = empty_results(q, plan, call.return_lse)
    capability, shared_memory = _limits(q.get_device())
    tile = triton_tile(
        head_size=q.shape[3],
        q_size=plan.q.size,
        kv_size=plan.kv.size if plan.kv.is_regular else 1,
        capability=capability,
        shared_memory=shared_memory,
    )
    engine = capability is not None and capability >= (9, 0) and not call.form.request.unaligned
    attend(call, out, lse, tile=tile, copy_engine=engine)
    return out, lse


@cache
def _limits(index: int) -> tuple[tuple[int, int] | None, int]:
    """Return compute capability and shared memory per thread block; index -1 is the CPU."""
    if index < 0:
        return (9, 0), 232448  # the interpreter follows the path that is measured
    if torch.version.hip is not None:
        return None, 65536
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # Older releases of torch do not tell the limit; 99 KiB is the least of SM80 and later.
    return capability, int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


def _run_reference(call: Call) -> _Results:
    out, lse = attention_reference(
        call.q, call.k, call.v, call.plan, scale=call.scale, skip=call.skip
    )
    if call.form.request.backward:
        return out, lse  # in the precision that gradients need
    return out, lse.float() if call.return_lse else None


RUN: MappingProxyType[str, Callable[[Call], _Results]] = MappingProxyType(
    {
        "gluon": _run_gluon,
        "fa4": fa4.attend,
        "cudnn": cudnn.attend,
        "triton": _run_triton,
        "reference": _run_reference,
    }
)
"""Kernel -> how it is run."""


_Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _tiles_backward(q: torch.Tensor, plan: BlockPlan) -> BackwardTiles:
    capability, shared_memory = _limits(q.get_device())
    return backward_tiles(
        head_size=q.shape[3],
        q_size=plan.q.size,
        kv_size=plan.kv.size,
        whole=plan.q.is_regular and plan.row_bits is None and not plan.causal,
        capability=capability,
        shared_memory=shared_memory,
    )


def _gradients_fused(call: Backward) -> _Gradients:
    from multimodal_gen.kernels.block_sparse.gluon_fused_kernel import attend_backward

    return attend_backward(call.loadable())


def _gradients_gluon(call: Backward) -> _Gradients:
    from multimodal_gen.kernels.block_sparse.gluon_backward_kernel import attend_backward

    return attend_backward(call.loadable())


def _gradients_triton(call: Backward) -> _Gradients:
    from multimodal_gen.kernels.block_sparse.backward_kernel import attend_backward

    call = call.loadable()
    capability, _ = _limits(call.q.get_device())
    engine = capability is not None and capability >= (9, 0)
    return attend_backward(
        call,
        tiles=_tiles_backward(call.q, call.plan),
        copy_engine=engine and loadable(call.q, call.k, call.v, call.grad_out),
    )


_GRADIENTS: MappingProxyType[str, Callable[[Backward], _Gradients]] = MappingProxyType(
    {
        "gluon_fused": _gradients_fused,
        "gluon": _gradients_gluon,
        "triton": _gradients_triton,
        "reference": attention_reference_backward,
    }
)
"""Kernel of a backward pass -> how it is run."""


def _prepare_gradients(kernel: str, q: torch.Tensor, k: torch.Tensor, plan: BlockPlan) -> None:
    """Derive from a plan what the backward pass by a kernel reads; does not wait for the device."""
    if kernel == "reference":
        return
    from multimodal_gen.kernels.block_sparse.backward_kernel import transposed
    from multimodal_gen.kernels.block_sparse.steps_kernel import work_list

    if kernel == "triton":
        tiles = _tiles_backward(q, plan)
        keys, queries = tiles.queries.keys, tiles.keys.rows
    else:
        keys, queries = (gluon_backward_tile(block=x.size).keys for x in (plan.q, plan.kv))
    for lists, step in ((plan, keys), (transposed(plan), queries)):
        work_list(lists, step, q.shape[0], q.shape[2], k.shape[2])


def gradient_kernel(
    kernel: str, q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, request: Request, fixed: bool
) -> str:
    """Return the name of the kernel that computes gradients of what `kernel` computed.

    Args:
        kernel: what ran in the forward pass.
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        plan: the pairs.
        request: what the choice of `kernel` depended on.
        fixed: whether two runs must agree bit by bit.
    """
    gradients = BLOCK_SPARSE.kernel(kernel).gradients
    assert gradients is not None, "others are not chosen where a gradient is asked for"
    asked = request._replace(
        backward=False,
        padded=any(x.lengths is not None and x.starts is None for x in (plan.q, plan.kv)),
        grouped=q.shape[2] != k.shape[2],
        deterministic=fixed or torch.are_deterministic_algorithms_enabled(),
    )
    return choose(gradients, AUTO, asked)


class _Attention(torch.autograd.Function):
    """A kernel and its backward pass, which derive what they need from one plan."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        kernel: str,
        selected: SelectedKernel | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan, asked = call.plan, call.form.request
        # Here, where the first use of a plan that is used often is on the right stream.
        gradients = gradient_kernel(kernel, q, k, plan, asked, call.deterministic)
        _prepare_gradients(gradients, q, k, plan)
        call = call._replace(q=q, k=k, v=v, return_lse=True, overwrite_q=False)
        out, lse = RUN[kernel](call)
        assert lse is not None, "it was asked for"
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.request = plan, call.scale, asked
        ctx.kernel, ctx.deterministic, ctx.selected = kernel, call.deterministic, selected
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        ran = gradient_kernel(ctx.kernel, q, k, ctx.plan, ctx.request, ctx.deterministic)
        if ctx.selected is not None:
            ctx.selected.note_gradients(ctx.kernel, ran)
        call = Backward(q, k, v, ctx.plan, out, lse, grad_out, grad_lse, ctx.scale)
        return (*_GRADIENTS[ran](call), None, None, None)


@torch.library.custom_op("multimodal_gen::block_sparse_attention", mutates_args=())
def block_sparse_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Sequence[torch.Tensor],
    sizes: Sequence[int],
    scale: float,
    return_lse: bool,
    kernel: str,
    deterministic: bool,
    backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel; the plan comes as `flatten` takes it apart.

    lse is empty unless it, or a gradient, is asked for.
    """
    whole = unflatten(q, k, plan, sizes)
    request = request_for(q, k, v, whole, backward=backward)
    call = Call(q, k, v, whole, scale, return_lse or backward, deterministic, CallForm(request))
    out, lse = RUN[choose(BLOCK_SPARSE, kernel, request)](call)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


@block_sparse_attention_op.register_fake
def _(q: torch.Tensor, *rest: Any) -> Any:
    *_, return_lse, _kernel, _deterministic, backward = rest
    shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse or backward else (0,)
    # Float64 inputs only run on the reference.
    dtype = q.dtype if backward and q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(shape, dtype=dtype)


@torch.library.custom_op("multimodal_gen::block_sparse_attention_backward", mutates_args=())
def block_sparse_attention_backward_op(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: Sequence[torch.Tensor],
    sizes: Sequence[int],
    scale: float,
    kernel: str,
    deterministic: bool,
) -> _Gradients:
    """Return the gradients of q, k and v, for the kernel that computed out and lse."""
    whole = unflatten(q, k, plan, sizes)
    request = request_for(q, k, v, whole, backward=True)
    ran = choose(BLOCK_SPARSE, kernel, request)
    call = Backward(q, k, v, whole, out, lse, grad_out, grad_lse, scale)
    return _GRADIENTS[gradient_kernel(ran, q, k, whole, request, deterministic)](call)


@block_sparse_attention_backward_op.register_fake
def _(grad_out: Any, grad_lse: Any, *given: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in given[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, plan, *rest = inputs
    ctx.sizes, ctx.scale, _return_lse, ctx.kernel, ctx.deterministic, _backward = rest
    ctx.save_for_backward(q, k, v, *output, *plan)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[Any, ...]:
    q, k, v, out, lse, *plan = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    options = (ctx.sizes, ctx.scale, ctx.kernel, ctx.deterministic)
    grads = block_sparse_attention_backward_op(
        grad_out, grad_lse, q, k, v, out, lse, plan, *options
    )
    return (*grads, [None] * len(plan), *[None] * 6)


block_sparse_attention_op.register_autograd(_backward, setup_context=_setup_context)
