"""Writes what a search found, where it runs without somebody who gathers it."""

from functools import lru_cache
from pathlib import Path

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.losses import (
    NEGATIVE,
    POSITIVE,
    LossRecorder,
    current_recorder,
)
from multimodal_gen.runtime.layers.attention.sta.search import SearchFile, branch_folder
from multimodal_gen.runtime.layers.attention.sta.windows import Window

__all__ = ["SearchSession", "branch_parts", "session_for"]


class SearchSession:
    """The search over one generation.

    Args:
        recorder: gathers the losses.
        folder: where the search files go when the last layer of the last step is done; None where
            somebody else takes them from the recorder.
        name: name of the files, without what all of them have.
    """

    def __init__(self, recorder: LossRecorder, folder: Path | None = None, name: str = "") -> None:
        self.recorder = recorder
        self._folder = folder
        self._name = name

    def finish(self, branch: str, num_steps: int | None, grid: Window) -> None:
        """Write the file of a branch once it is complete.

        Raises:
            UsageError: the number of steps is unknown.
        """
        if self._folder is None:
            return
        if num_steps is None:
            raise UsageError(
                "STA_searching must run in a pipeline whose number of steps is known, got a model "
                "alone; pass num_steps to set_forward_context"
            )
        if not self.recorder.complete(branch, num_steps):
            return
        tiles = self.recorder.tiles
        assert tiles is not None, "a complete search had a grid"
        settings = {"grid": list(grid), "num_steps": num_steps}
        found = self.recorder.losses()[branch]
        folder = branch_folder(self._folder, branch, width=grid[2], height=f"{grid[1]}-tokens")
        path = folder / f"mask_search_{self._name}.json"
        SearchFile(losses=found, tiles=tiles, settings=settings).write(path)


def session_for(folder: str, request: str | None) -> SearchSession:
    """Return the session of the running generation; all of its layers share it.

    Args:
        folder: where search files go, unless a recorder is in use that gathers the losses.
        request: identifies the generation.
    """
    recorder = current_recorder()
    if recorder is not None:
        return SearchSession(recorder)
    return _session(Path(folder).expanduser(), request or "unnamed")


@lru_cache(maxsize=8)
def _session(folder: Path, request: str) -> SearchSession:
    return SearchSession(LossRecorder(), folder, request)


def branch_parts(
    branch: str | None, out: torch.Tensor, full: torch.Tensor
) -> tuple[tuple[str, torch.Tensor, torch.Tensor], ...]:
    """Split outputs by the branch of guidance they belong to.

    Args:
        branch: "cond", "uncond", "both" (a batch of the negative half and the positive one), or
            None, which counts as "cond".
        out: [B, S, H, D].
        full: [B, S, H, D].

    Returns:
        (branch, its part of `out`, its part of `full`), for every branch.
    """
    if branch != "both":
        return ((NEGATIVE if branch == "uncond" else POSITIVE, out, full),)
    half = out.shape[0] // 2
    return ((NEGATIVE, out[:half], full[:half]), (POSITIVE, out[half:], full[half:]))
