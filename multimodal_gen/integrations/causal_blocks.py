"""Blocks of frames that see no later ones, for models that make a mask of all tokens for that.

Such a mask has an entry for every pair of tokens, 2.6 GB at 51,000 of them, and is made in every
call. A plan of blocks has one per pair of blocks, and layers compute nothing that it leaves out.
While a call runs its model is told that blocks are of one frame, for which it makes no mask.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan
from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.static_cache import static_cache

_CONFIG = "_internal_dict"  # where models of diffusers keep their configuration


class CausalBlocks:
    """The causal blocks of one model, in one call after another.

    Args:
        entry: the entry of its configuration that has the frames of a block; 1 for no blocks.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._own: Any = None  # the model's configuration, while a call runs
        self._shown: Any = None

    def begin(
        self, model: nn.Module, grid: tuple[int, int, int] | None, device: torch.device
    ) -> BlockPlan | None:
        """Return the plan of a call that begins, whose model makes no mask; None for no blocks.

        Args:
            model: the model.
            grid: its latent grid; where it is unknown the model's own mask stays.
            device: where its tokens are.
        """
        own: Any = getattr(model, _CONFIG, None)
        frames = 1 if own is None else own.get(self._entry, 1)
        if grid is None or not isinstance(frames, int) or frames < 2 or grid[0] % frames:
            return None  # the model refuses frames that make no whole blocks
        self._own, self._shown = own, type(own)({**own, self._entry: 1})
        setattr(model, _CONFIG, self._shown)
        return _plan(grid[0] // frames, frames * grid[1] * grid[2], device)

    def end(self, model: nn.Module) -> None:
        """Give the model its configuration back, unless it has another by now."""
        if self._own is not None and getattr(model, _CONFIG, None) is self._shown:
            setattr(model, _CONFIG, self._own)
        self._own = self._shown = None


@static_cache(maxsize=16)
def _plan(num_blocks: int, tokens: int, device: torch.device) -> BlockPlan:
    with torch.inference_mode(False):
        return replace(chunk_causal_plan([tokens] * num_blocks, device=device), shared=True)
