"""Records, during a search, how far every head's output is from full attention.

Losses stay on the device as long as the search runs: reading them would make every layer wait.

C candidates, T steps, N layers, H heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.candidates import (
    default_candidates,
    distinct_candidates,
)
from multimodal_gen.runtime.layers.attention.sta.windows import Window

__all__ = [
    "NEGATIVE",
    "POSITIVE",
    "BranchLosses",
    "LossRecorder",
    "current_recorder",
    "head_losses",
    "record_into",
]

POSITIVE = "positive"
"""The branch of classifier-free guidance that follows the prompt."""
NEGATIVE = "negative"
"""The branch that follows the negative prompt."""


def head_losses(out: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return how far each head's output is from that of full attention.

    Args:
        out: output of a candidate, [B, S, H, D].
        full: output of full attention, [B, S, H, D].

    Returns:
        fp32 [2, H]: mean over B, S and D of the squared and of the absolute difference.
    """
    losses = []
    for head in range(out.shape[2]):  # one at a time: fp32 copies of everything are too large
        difference = out[:, :, head].float() - full[:, :, head].float()
        losses.append(torch.stack((difference.square().mean(), difference.abs().mean())))
    return torch.stack(losses, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLosses:
    """What a search found for one prompt in one branch.

    Attributes:
        windows: the candidates.
        l2: fp64 [C, T, N, H], mean squared difference from full attention.
        l1: fp64 [C, T, N, H], mean absolute difference.
    """

    windows: tuple[Window, ...]
    l2: torch.Tensor
    l1: torch.Tensor


class LossRecorder:
    """Gathers the losses of one generation; several calls of a layer at a step are averaged.

    Args:
        windows: what to try; by default what suits the grid.
    """

    def __init__(self, windows: Sequence[Window] = ()) -> None:
        self._asked = tuple(windows)
        self._windows: tuple[Window, ...] = ()
        self._tiles: Window | None = None
        self._found: dict[str, dict[tuple[int, int], list[torch.Tensor]]] = {}

    @property
    def tiles(self) -> Window | None:
        """The grid of tiles, once a layer asked for its candidates."""
        return self._tiles

    def candidates(self, tiles: Window) -> tuple[Window, ...]:
        """Return the windows to try on a grid of `tiles`.

        Raises:
            UsageError: the grid changed, as it does between sizes of the output, or is too small.
        """
        if self._tiles is None:
            asked = self._asked
            self._windows = (
                distinct_candidates(asked, tiles) if asked else default_candidates(tiles)
            )
            self._tiles = tiles
        elif tiles != self._tiles:
            raise UsageError(
                f"a search must keep to one grid, got {tiles} tiles after {self._tiles}; search "
                f"one size of output at a time"
            )
        return self._windows

    def add(self, losses: torch.Tensor, *, step: int, layer: int, branch: str) -> None:
        """Record the losses of one call.

        Args:
            losses: fp32 [C, 2, H], squared and absolute, of each of `candidates`.
            step: denoising step.
            layer: attention layer.
            branch: `POSITIVE` or `NEGATIVE`.
        """
        self._found.setdefault(branch, {}).setdefault((step, layer), []).append(losses)

    def complete(self, branch: str, num_steps: int) -> bool:
        """Whether the last step has the losses of as many layers as the first one."""
        found = self._found.get(branch, {})
        of_step = [sum(step == wanted for step, _ in found) for wanted in (0, num_steps - 1)]
        return of_step[0] == of_step[1] > 0

    def ended(self, branch: str, num_steps: int) -> bool:
        """Whether the last step also has as many calls as the first one: no more will come.

        Unknown in a run of one step, where the answer is no.
        """
        found = self._found.get(branch, {})
        calls = [
            sum(len(losses) for (step, _), losses in found.items() if step == wanted)
            for wanted in (0, num_steps - 1)
        ]
        return num_steps > 1 and calls[1] >= calls[0]

    def discard(self, branch: str) -> None:
        """Forget the losses of a branch."""
        self._found.pop(branch, None)

    @property
    def is_empty(self) -> bool:
        """Whether no losses are held."""
        return not self._found

    def losses(self) -> dict[str, BranchLosses]:
        """Return what was found, by branch; waits for the device.

        Raises:
            UsageError: nothing was recorded, or a layer ran at some steps only.
        """
        if not self._found:
            raise UsageError(
                "a search must reach at least one attention layer with a latent grid, got none"
            )
        return {branch: self._stacked(branch) for branch in self._found}

    def _stacked(self, branch: str) -> BranchLosses:
        found = self._found[branch]
        steps, layers = (1 + max(key[axis] for key in found) for axis in (0, 1))
        absent = [
            (step, layer)
            for step in range(steps)
            for layer in range(layers)
            if (step, layer) not in found
        ]
        if absent:
            raise UsageError(
                f"a search must see every layer at every step, it saw {len(found)} of "
                f"{steps} steps x {layers} layers; first missing: step {absent[0][0]}, layer "
                f"{absent[0][1]}; nothing may skip layers or steps while it runs"
            )
        means = [torch.stack(found[key]).mean(0) for key in sorted(found)]
        stacked = torch.stack(means).double().cpu()  # [T * N, C, 2, H]
        both = stacked.view(steps, layers, *stacked.shape[1:]).permute(3, 2, 0, 1, 4)
        return BranchLosses(windows=self._windows, l2=both[0], l1=both[1])


_RECORDER: ContextVar[LossRecorder | None] = ContextVar("multimodal_gen_sta_recorder", default=None)


@contextmanager
def record_into(recorder: LossRecorder) -> Iterator[None]:
    """Let searching layers called inside the `with` block record into `recorder`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def current_recorder() -> LossRecorder | None:
    """Return the recorder in use, or None."""
    return _RECORDER.get()
