"""What `apply` does to a denoiser where this process is one of several ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.components import Component
from multimodal_gen.integrations.hooks import untraced_hook
from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.models.registry import ADAPTERS
from multimodal_gen.integrations.models.split_plan import SplitPlan, own_plan
from multimodal_gen.integrations.parallel.cfg_parallel import (
    BatchedCfg,
    CfgRanks,
    SequentialCfg,
    run_own_branch,
)
from multimodal_gen.integrations.parallel.token_split import TokenSplitter
from multimodal_gen.runtime.distributed.collectives import partition_heads
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.distributed.timing import TimeTaken, sum_of
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.managers.guidance import has_branches, one_branch_error


def is_split(role: AttentionRole) -> bool:
    """Whether modules of a role attend to tokens that are split: text is on all ranks."""
    return role is AttentionRole.SELF


class ParallelPlan:
    """How one denoiser runs on several ranks; on one, it is empty.

    Args:
        component: the denoiser.
        adapter: its family, or None when unknown.
        heads: query heads of its modules that attend to split tokens.
        groups: the groups of this process, or None on one device.
        pipeline: the pipeline, or None for a bare model.

    Attributes:
        splitter: splits its tokens, or None where they stay together.
        unsplit_reason: why they do although ranks share sequences, or None.

    Raises:
        UsageError: ranks share its tokens, which it has too few heads for; or guidance branches,
            of which its pipeline has one.
    """

    def __init__(
        self,
        component: Component,
        adapter: ModelAdapter | None,
        heads: Sequence[int],
        groups: ParallelGroups | None,
        pipeline: Any = None,
    ) -> None:
        self._component = component
        self._mesh = Mesh() if groups is None else groups.mesh
        self.splitter: TokenSplitter | None = None
        self.unsplit_reason: str | None = None
        self._sequential: SequentialCfg | None = None
        self._batched: BatchedCfg | None = None
        self._ranks: CfgRanks | None = None
        known = None if adapter is None else adapter.split
        if groups is None or not (heads or isinstance(known, str)):
            return
        if self._mesh.sequence > 1:
            plan = own_plan(component.model) if known is None else known
            if isinstance(plan, SplitPlan):
                partition_heads(min(heads), min(heads), groups.ulysses.size)
                self.splitter = TokenSplitter(component.model, plan, groups)
            else:
                self.unsplit_reason = f"{component.name}: {type(component.model).__name__} {plan}"
        if self._mesh.cfg > 1:
            ranks = self._ranks = CfgRanks(groups)
            name, model = component.name, component.model
            if pipeline is not None and not has_branches(type(pipeline), [type(model)]):
                raise one_branch_error(type(pipeline).__name__)
            if adapter is not None and adapter.batches_guidance:
                self._batched = BatchedCfg(ranks, model, name, pipeline, adapter.batched)
            else:
                self._sequential = SequentialCfg(ranks, name, pipeline)

    def install_outside(self, undo: ExitStack) -> None:
        """Set what must come before all other hooks of the denoiser."""
        if self._batched is not None:
            before = untraced_hook(self._batched.before)
            handle = self._component.model.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(handle.remove)

    def install(self, undo: ExitStack) -> None:
        """Set the hooks; `undo` takes the way back."""
        model = self._component.model
        if self.splitter is not None:
            self.splitter.install(undo)
        if self._sequential is not None:
            run_own_branch(model, self._sequential, undo)
        if self._batched is not None:
            undo.callback(model.register_forward_hook(untraced_hook(self._batched.after)).remove)

    def end_request(self) -> None:
        """Take note that a generation is over."""
        for part in (self.splitter, self._sequential):
            if part is not None:
                part.end_request()

    def times(self) -> TimeTaken | None:
        """Return what exchanges around the denoiser took, or None where there were none."""
        split = None if self.splitter is None else self.splitter.split
        return sum_of(part.times.taken() for part in (split, self._ranks) if part is not None)

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report should know."""
        name, mesh = self._component.name, self._mesh
        if self._sequential is not None or self._batched is not None:
            each = f"{mesh.sequence} ranks" if mesh.sequence > 1 else "1 rank"
            yield f"{name}: 2 guidance branches at the same time, {each} each"
        if self.unsplit_reason is not None:
            yield f"{self.unsplit_reason}, so every rank computes all of its tokens"
        if self.splitter is not None:
            kinds = (("Ulysses", mesh.ulysses), ("ring", mesh.ring))
            parts = " x ".join(f"{kind} {size}" for kind, size in kinds if size > 1)
            yield f"{name}: {mesh.sequence} ranks share the sequence ({parts})"


def require_split(plans: Sequence[ParallelPlan], groups: ParallelGroups | None) -> None:
    """Refuse a target of which no denoiser can be split over the ranks that share its tokens.

    Raises:
        UsageError: says why, and what can be.
    """
    reasons = [plan.unsplit_reason for plan in plans if plan.unsplit_reason is not None]
    if groups is None or not reasons or any(plan.splitter for plan in plans):
        return
    known = {name: adapter.split for name, adapter in ADAPTERS.items()}
    able = ", ".join(sorted(name for name, split in known.items() if isinstance(split, SplitPlan)))
    raise UsageError(
        f"apply() must find a denoiser whose tokens the {groups.sequence.size} ranks can share, "
        f"got {'; '.join(reasons)}; run it on one GPU, or take one of {able}"
    )
