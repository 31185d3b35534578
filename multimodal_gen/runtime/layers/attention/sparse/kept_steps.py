"""What one layer keeps from denoising step to step, by request and guidance branch."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

from multimodal_gen.runtime.managers.forward_context import ForwardContext

# Of requests that never say that they have ended, so many branches are remembered.
MAX_BRANCHES = 8
_MAX_NAMES = 256  # of which no entry is remembered

Branch = tuple[str, str | None, Hashable]
_Run = tuple[str, str | None]


class _OfStep(Protocol):
    @property
    def step(self) -> int:
        """The denoising step that it is of."""


_KeptT = TypeVar("_KeptT", bound=_OfStep)


class KeptSteps(Generic[_KeptT]):
    """What an earlier step left for a later one of the same branch."""

    def __init__(self) -> None:
        self._found: OrderedDict[Branch, _KeptT] = OrderedDict()
        self._lost: OrderedDict[Branch, None] = OrderedDict()
        self._calls: OrderedDict[_Run, tuple[int, int]] = OrderedDict()  # the last step, and number

    def __len__(self) -> int:
        return len(self._found)

    def branch(self, context: ForwardContext) -> Branch | None:
        """Return what the running call's entry goes by; to be asked once per call.

        Calls of one step whose branch is unknown count as branches in turn. Calls without a
        request's name have no branch.
        """
        if context.request_id is None:
            return None
        run, step = (context.request_id, context.component), context.current_timestep
        if context.branch_key is not None:
            return *run, context.branch_key
        if context.cfg_branch is not None:
            return *run, (context.cfg_branch, 0)
        last, calls = self._calls.get(run, (step, -1))
        calls = calls + 1 if last == step else 0
        _remember(self._calls, run, (step, calls), _MAX_NAMES)
        return *run, (None, calls)

    def find(self, branch: Branch | None, step: int) -> _KeptT | None:
        """Return what an earlier step of the same run left, or None.

        Args:
            branch: as `branch` returned it.
            step: the running step; the first one starts anew, and so does one that is before the
                entry's, which then is an earlier run's.
        """
        found = None if branch is None else self._found.get(branch)
        if found is None or step == 0 or step < found.step:
            return None
        return found

    def has_lost(self, branch: Branch | None) -> bool:
        """Whether what there was of a branch went for want of room, and nothing was kept since."""
        return branch in self._lost

    def store(self, branch: Branch | None, found: _KeptT, num_steps: int | None) -> None:
        """Keep an entry for the next step; after the last one, drop what there is."""
        if branch is None:
            return
        if num_steps is not None and found.step >= num_steps - 1:
            self.drop(branch)
            return
        self._lost.pop(branch, None)
        lost = _remember(self._found, branch, found)
        if lost is not None:
            _remember(self._lost, lost, None, _MAX_NAMES)

    def drop(self, branch: Branch | None) -> None:
        """Drop what there is of a branch."""
        if branch is not None:
            self._found.pop(branch, None)
            self._lost.pop(branch, None)

    def end(self, request_id: str) -> None:
        """Drop what there is of a request."""
        self._found = OrderedDict(x for x in self._found.items() if x[0][0] != request_id)
        self._lost = OrderedDict(x for x in self._lost.items() if x[0][0] != request_id)
        self._calls = OrderedDict(x for x in self._calls.items() if x[0][0] != request_id)


def _remember(
    known: OrderedDict[Any, Any], place: _Run | Branch, what: object, most: int = MAX_BRANCHES
) -> Any:
    """Set an entry, the newest; of too many the oldest goes, and its place is returned."""
    known[place] = what
    known.move_to_end(place)
    return known.popitem(last=False)[0] if len(known) > most else None
