"""Searches the windows of Sliding Tile Attention over prompts; the pipeline is loaded once.

Every prompt leaves one file per branch of guidance, that of the positive one last: where it is,
the prompt is done, and an interrupted search goes on behind it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.files import require_writable
from multimodal_gen.runtime.generator.library_errors import out_of_memory_explained
from multimodal_gen.runtime.generator.load import pick_device, pick_dtype
from multimodal_gen.runtime.generator.run import Attach, observe
from multimodal_gen.runtime.generator.skeleton import model_identity
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.search import (
    POSITIVE,
    LossRecorder,
    SearchFile,
    branch_folder,
    record_into,
    search_name,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import DEFAULT_TILE, Window
from multimodal_gen.runtime.server_args import CALL_SETTINGS, ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One prompt that was searched.

    Attributes:
        file: its search file, of the positive branch where there are two.
        found: what it holds.
        seconds: how long it took.
    """

    file: Path
    found: SearchFile
    seconds: float


class WindowSearch:
    """A search over prompts.

    Attributes:
        prompts: what is searched, each once.
        done: those of `prompts` whose files are there already.
        num_steps: denoising steps of those searches, or None where none is done.

    Args:
        args: what to load and how to run it; the backend and its configuration among it. Its
            `prompt` is not used.
        prompts: what to generate, each once.
        folder: where the search files go.
        windows: what to try; by default what suits the grid.

    Raises:
        UsageError: the folder holds a search of a prompt with other settings or another model, or
            cannot be written to.
        ConfigError: a search file in the folder cannot be read.
    """

    def __init__(
        self,
        args: ServerArgs,
        prompts: Sequence[str],
        folder: Path,
        windows: Sequence[Window] = (),
    ) -> None:
        self.prompts = tuple(dict.fromkeys(prompts))
        self._args = args
        self._folder = folder
        self._windows = tuple(windows)
        self._tile_size = _tile_size(args)
        require_writable(folder, "--output")
        self.num_steps: int | None = None
        self.done = tuple(prompt for prompt in self.prompts if self._is_done(prompt))

    @property
    def pending(self) -> tuple[str, ...]:
        """The prompts that are still to be searched."""
        return tuple(prompt for prompt in self.prompts if prompt not in self.done)

    def run(self, attach: Attach) -> Iterator[Searched]:
        """Search the pending prompts, and yield each once its files are written.

        Args:
            attach: attaches the searching backend to the loaded pipeline.

        Raises:
            UsageError: an option does not fit the pipeline or the device, no layer could be
                searched, or the device runs out of memory.
        """
        prompts = self.pending
        runs = observe(
            self._args, prompts, attach, lambda: LossRecorder(self._windows), record_into
        )
        with out_of_memory_explained(), closing(runs):
            for prompt, (recorder, seconds, size) in zip(prompts, runs, strict=True):
                file, found = self._write(prompt, recorder, size)
                yield Searched(file=file, found=found, seconds=seconds)

    def _write(
        self, prompt: str, recorder: LossRecorder, size: tuple[int | str, int | str]
    ) -> tuple[Path, SearchFile]:
        """Write the file of every branch; return the last one, and what it holds."""
        found, (width, height) = recorder.losses(), size
        for branch in sorted(found, key=lambda branch: branch == POSITIVE):
            settings = {"prompt": prompt, **self._settings}
            search = replace(found[branch], settings=settings, tile_size=self._tile_size)
            folder = branch_folder(self._folder, branch, width=width, height=height)
            file = folder / search_name(prompt)
            search.write(file)
        return file, search

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What a search depends on, as JSON data: the model, how is generated, what is tried."""
        args = self._args
        dtype = pick_dtype(args.dtype, pick_device(args.device))
        return {
            **model_identity(args.model_path),
            "dtype": str(dtype).removeprefix("torch."),
            **{name: getattr(args, name) for name in (*CALL_SETTINGS, "seed")},
            "tile_size": list(self._tile_size),
            "windows": [list(window) for window in self._windows],
        }

    def _is_done(self, prompt: str) -> bool:
        folder = branch_folder(self._folder, POSITIVE, width="*", height="*")
        for path in self._folder.glob(f"{folder.name}/{search_name(prompt)}"):
            try:
                file = SearchFile.read(path)
            except ConfigError as error:
                raise ConfigError(f"{error}; delete it to search again") from None
            wanted = {"prompt": prompt, **self._settings}
            name = next((name for name in wanted if file.settings.get(name) != wanted[name]), None)
            if name is not None:
                raise UsageError(
                    f"--output must not hold a search with other settings, got {str(path)!r} with "
                    f"{name} {file.settings.get(name)!r}, this search has {wanted[name]!r}; name "
                    f"another folder"
                )
            self.num_steps = file.l2.shape[1]
            return True
        return False


def _tile_size(args: ServerArgs) -> Window:
    config = args.attention_backend_config
    size = config.get("tile_size") if isinstance(config, Mapping) else None
    return (size[0], size[1], size[2]) if isinstance(size, (list, tuple)) else DEFAULT_TILE
