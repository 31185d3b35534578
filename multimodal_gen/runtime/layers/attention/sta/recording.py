"""Writes what a search found, where it runs without somebody who gathers it."""

from collections import OrderedDict
from pathlib import Path

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.sta.losses import (
    NEGATIVE,
    POSITIVE,
    LossRecorder,
    current_recorder,
)
from multimodal_gen.runtime.layers.attention.sta.search import (
    SearchFile,
    branch_folder,
    search_name,
)
from multimodal_gen.runtime.layers.attention.sta.windows import Window
from multimodal_gen.runtime.managers.generation import Generation, current_generation

__all__ = ["SearchSession", "branch_parts", "session_for"]


class SearchSession:
    """The search over one generation.

    Args:
        recorder: gathers the losses.
        folder: where the search files go when the last layer of the last step is done; None where
            somebody else takes them from the recorder.
        request: identifies the generation; names the files where the prompt is unknown.
        generation: what is generated, or None where nobody said so. Its prompt names the files:
            those of a prompt that is generated again replace the older ones.
    """

    def __init__(
        self,
        recorder: LossRecorder,
        folder: Path | None = None,
        request: str = "",
        generation: Generation | None = None,
    ) -> None:
        self.recorder = recorder
        self._folder = folder
        self._request = request
        self._generation = generation

    def finish(self, branch: str, num_steps: int | None, grid: Window, tile: Window) -> None:
        """Write the file of a branch once it is complete.

        Args:
            branch: the branch that just recorded losses.
            num_steps: denoising steps, or None when unknown.
            grid: tokens along each axis.
            tile: tokens per tile along each axis.

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
        made = self._generation
        if made is None:
            folder = branch_folder(self._folder, branch, width=grid[2], height=f"{grid[1]}-tokens")
            path = folder / f"mask_search_{self._request}.json"
        else:
            settings["prompt"] = made.prompt
            folder = branch_folder(self._folder, branch, width=made.width, height=made.height)
            path = folder / search_name(made.prompt)
        SearchFile(losses=found, tiles=tiles, settings=settings, tile_size=tile).write(path)
        if self.recorder.ended(branch, num_steps):
            self.recorder.discard(branch)
        if self.recorder.is_empty:
            _SESSIONS.pop((self._folder, self._request), None)


# Per process on purpose: the layers of a model share nothing but their configuration. A session
# leaves when its search is complete; of those that never are, only the latest stay.
_SESSIONS: OrderedDict[tuple[Path, str], SearchSession] = OrderedDict()
_MOST_SESSIONS = 4


def session_for(folder: str, request: str | None) -> SearchSession:
    """Return the session of the running generation; all of its layers share it.

    Args:
        folder: where search files go, unless a recorder is in use that gathers the losses.
        request: identifies the generation.
    """
    recorder = current_recorder()
    if recorder is not None:
        return SearchSession(recorder)
    key = (Path(folder).expanduser(), request or "unnamed")
    if key not in _SESSIONS:
        _SESSIONS[key] = SearchSession(LossRecorder(), *key, current_generation())
        while len(_SESSIONS) > _MOST_SESSIONS:
            _SESSIONS.popitem(last=False)
    return _SESSIONS[key]


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
