"""One call, its backward pass and its tail, as kernels are given them.

Shapes: B batch, Sq and Sk tokens, H query heads, Hkv key heads, D head size, Nq and N blocks.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.block_sparse.skip import Skip
from multimodal_gen.kernels.engine import Request
from multimodal_gen.kernels.tensors import loadable


class CallForm:
    """Stands for calls that are alike in all that launches depend on, but for what tensors hold.

    A call is looked up by shapes, strides, dtypes, device, alignment and whether a gradient is
    asked for, and by the form of its plan: a plan that is new in every call is no new form.

    Attributes:
        request: what the choice of the kernel depends on.
        prepared: what kernels prepared for such calls; holds no tensors.
    """

    __slots__ = ("prepared", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prepared: dict[Hashable, Any] = {}


def known_form(call: Hashable, plan: BlockPlan, make: Callable[[], Request]) -> CallForm:
    """Return the form of calls on plans that are alike.

    Args:
        call: what is alike besides the plan.
        plan: keeps what was found for it.
        make: checks the first call of a form, and returns its request.
    """
    form: CallForm | None = plan.cache.get(call)
    if form is None:
        known = forms_of(call, plan.form())
        if not known:
            known.append(CallForm(make()))
        form = plan.cache[call] = known[0]
    return form


@lru_cache(maxsize=1024)
def forms_of(call: Hashable, plan: Hashable) -> list[CallForm]:
    """Return what holds the form of calls that are alike, once one was checked."""
    return []


class Call(NamedTuple):
    """One call; see `block_sparse_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: BlockPlan
    scale: float
    return_lse: bool
    deterministic: bool
    form: CallForm
    skip: Skip | None = None
    overwrite_q: bool = False


class Backward(NamedTuple):
    """A call, its results, and what their gradients are.

    Attributes:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D], any strides.
        v: [B, Sk, Hkv, D], any strides.
        plan: the pairs, on the same device.
        out: what the forward pass gave, [B, Sq, H, D].
        lse: likewise, fp32 [B, H, Sq].
        grad_out: gradient of out, any strides.
        grad_lse: gradient of lse, fp32, any strides; None for zero.
        scale: factor of the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: BlockPlan
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    scale: float

    def loadable(self) -> "Backward":
        """Return the same with a gradient that the copy engine can read."""
        grad = self.grad_out
        return self if loadable(grad) else self._replace(grad_out=grad.contiguous())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PooledBlocks:
    """The means of key blocks.

    Attributes:
        keys: [B, Hp, N, D]; query head h uses head h // (H / Hp).
        values: [B, Hp, N, D].
        counts: int32 [B|1, Hp|1, N], tokens of each block; empty blocks count for nothing.
        slope: [B, Hp, D, D], how values change with keys inside of blocks, or None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    slope: torch.Tensor | None = None

    def heads(self, heads: slice) -> "PooledBlocks":
        """Return the same for some of the heads Hp."""
        counts = self.counts if self.counts.shape[1] == 1 else self.counts[:, heads]
        return PooledBlocks(
            keys=self.keys[:, heads],
            values=self.values[:, heads],
            counts=counts,
            slope=None if self.slope is None else self.slope[:, heads],
        )


class TailCall(NamedTuple):
    """What the means of blocks are added to; see `tail.add_tail`."""

    out: torch.Tensor
    lse: torch.Tensor
    q: torch.Tensor
    pooled: PooledBlocks
    kept: torch.Tensor
    queries: Blocks | None
    scale: float
