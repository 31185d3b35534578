"""What `apply` does to a denoiser where this process is one of several ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.components import Component
from multimodal_gen.integrations.models import ADAPTERS, ModelAdapter
from multimodal_gen.integrations.parallel.splitter import TokenSplitter
from multimodal_gen.runtime.distributed.groups import ParallelGroups
from multimodal_gen.runtime.distributed.heads import share_heads
from multimodal_gen.runtime.layers.attention.request import AttentionRole

__all__ = ["ParallelPlan", "is_split"]


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

    Attributes:
        splitter: splits its tokens, or None where they stay together.

    Raises:
        UsageError: ranks share its tokens, which it has no plan or too few heads for.
    """

    def __init__(
        self,
        component: Component,
        adapter: ModelAdapter | None,
        heads: Sequence[int],
        groups: ParallelGroups | None,
    ) -> None:
        self._name = component.name
        self._groups = groups
        self.splitter: TokenSplitter | None = None
        if groups is None or groups.sequence.size == 1 or not heads:
            return
        plan = None if adapter is None else adapter.split
        if plan is None:
            known = ", ".join(sorted(ADAPTERS))
            raise UsageError(
                f"{component.name} must be a model whose tokens can be split over ranks, got "
                f"{type(component.model).__name__}; run it on one GPU, or take one of {known}"
            )
        share_heads(min(heads), min(heads), groups.ulysses.size)
        self.splitter = TokenSplitter(component.model, plan, groups)

    def install(self, undo: ExitStack) -> None:
        """Set the hooks; `undo` takes the way back."""
        if self.splitter is not None:
            self.splitter.install(undo)

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report should know."""
        if self.splitter is not None and self._groups is not None:
            mesh = self._groups.mesh
            parts = [
                f"{kind} {size}"
                for kind, size in (("Ulysses", mesh.ulysses), ("ring", mesh.ring))
                if size > 1
            ]
            yield f"{self._name}: {mesh.sequence} ranks share the sequence ({' x '.join(parts)})"
