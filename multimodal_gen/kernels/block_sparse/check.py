"""What only the values of a plan can tell, and waiting for the device."""

from typing import TYPE_CHECKING

import torch

from multimodal_gen.errors import UsageError

if TYPE_CHECKING:
    from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks

__all__ = ["check_values"]


def check_values(plan: "BlockPlan") -> None:
    """Check the values of a plan; see `BlockPlan.check`."""
    _check_lists(plan)
    for name, blocks in (("q", plan.q), ("kv", plan.kv)):
        _check_blocks(name, blocks, plan.device)
    if plan.order is not None:
        rows = torch.arange(len(plan.order), dtype=torch.int32, device=plan.device)
        if not torch.equal(plan.order.sort().values, rows):
            raise UsageError(
                f"`order` must hold each of the {len(rows)} rows of `counts` once; "
                f"longest_first() makes one"
            )


def _check_lists(plan: "BlockPlan") -> None:
    room, counts = plan.indices.shape[3], plan.counts
    if counts.numel() and bool(((counts < 0) | (counts > room)).any()):
        least, most = (int(bound) for bound in counts.aminmax())
        raise UsageError(f"`counts` must lie in [0, {room}], got {least} to {most}")
    listed = torch.arange(room, device=plan.device) < counts.unsqueeze(-1)
    if bool((listed & ((plan.indices < 0) | (plan.indices >= plan.kv.num))).any()):
        raise UsageError(f"`indices` must lie in [0, {plan.kv.num}) where they are counted")
    if bool((listed[..., 1:] & (plan.indices.diff(dim=-1) <= 0)).any()):
        raise UsageError("`indices` must be strictly increasing along every row")
    if plan.uniform and bool((counts != counts.flatten()[:1]).any()):
        raise UsageError("`uniform` must be given only where all counts are equal, they differ")
    if plan.causal and bool((counts != plan.kv.num).any()):
        raise UsageError(
            "`causal` must be given only with plans that keep every block, got another; make it "
            "with BlockPlan.dense"
        )


def _check_blocks(name: str, blocks: "Blocks", device: torch.device) -> None:
    starts, lengths = (bound.long() for bound in blocks.bounds(device))
    if bool(((lengths < 0) | (lengths > blocks.size)).any()):
        raise UsageError(f"`{name}.lengths` must lie in [0, {blocks.size}]")
    if bool(((starts < 0) | (starts + lengths > blocks.total)).any()):
        raise UsageError(f"`{name}` blocks must lie in [0, {blocks.total})")
    # Empty blocks overlap nothing, wherever they start.
    begins, order = torch.where(lengths > 0, starts, blocks.total).sort(dim=-1)
    ends = begins + lengths.expand_as(begins).gather(-1, order)
    if bool((ends[..., :-1] > begins[..., 1:]).any()):
        raise UsageError(f"`{name}` blocks must be disjoint, two of them overlap")
