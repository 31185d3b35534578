"""Centroids that one denoising step leaves to the next.

A layer keeps them per request and guidance branch, so that neither two interleaved requests nor the
two branches of one ever start from each other's. Of calls without a request's name nothing is kept:
nobody could tell whose it is.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from multimodal_gen.runtime.managers.forward_context import ForwardContext

__all__ = ["CentroidCache", "Centroids"]

# Of requests that nobody says have ended, so many branches are remembered.
_MAX_BRANCHES = 8

_Run = tuple[str, str | None]
_Branch = tuple[str, str | None, str | None, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Centroids:
    """Where the clusters of one layer ended.

    Attributes:
        step: denoising step they are of.
        query: [B, H, Cq, D].
        key: [B, Hkv, Ck, D].
    """

    step: int
    query: torch.Tensor
    key: torch.Tensor


class CentroidCache:
    """The centroids of one layer, by request and guidance branch."""

    def __init__(self) -> None:
        self._found: OrderedDict[_Branch, Centroids] = OrderedDict()
        self._calls: OrderedDict[_Run, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def branch(self, context: ForwardContext) -> _Branch | None:
        """Return what the running call's centroids go by; to be asked once per call.

        Calls of one step whose branch is unknown count as branches in turn. Calls without a
        request's name have no branch.
        """
        if context.request_id is None:
            return None
        run, step = (context.request_id, context.component), context.current_timestep
        if context.cfg_branch is not None:
            return *run, context.cfg_branch, 0
        last, calls = self._calls.pop(run, (step, -1))
        calls = calls + 1 if last == step else 0
        self._calls[run] = step, calls
        while len(self._calls) > _MAX_BRANCHES:
            self._calls.popitem(last=False)
        return *run, None, calls

    def find(self, branch: _Branch | None, step: int) -> Centroids | None:
        """Return what an earlier step of the same run left, or None.

        Args:
            branch: as `branch` returned it.
            step: the running step; the first one starts anew, and so does one that is before the
                centroids', which then are an earlier run's.
        """
        found = None if branch is None else self._found.get(branch)
        if found is None or step == 0 or step < found.step:
            return None
        return found

    def keep(self, branch: _Branch | None, centroids: Centroids, num_steps: int | None) -> None:
        """Keep centroids for the next step; after the last one, drop what there is."""
        if branch is None:
            return
        self._found.pop(branch, None)
        if num_steps is not None and centroids.step >= num_steps - 1:
            return
        self._found[branch] = centroids
        while len(self._found) > _MAX_BRANCHES:
            self._found.popitem(last=False)

    def end(self, request_id: str) -> None:
        """Drop what there is of a request."""
        for branch in list(self._found):
            if branch[0] == request_id:
                self._found.pop(branch, None)
        for run in list(self._calls):
            if run[0] == request_id:
                self._calls.pop(run, None)
