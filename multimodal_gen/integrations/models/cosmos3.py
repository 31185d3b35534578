"""Cosmos 3: a prompt that attends to itself causally, and a video that attends to both.

Each attention module makes two calls: one over the prompt, and one with the video's queries over
the keys of the prompt and the video. Sound and actions come behind the video, attended to by all.
"""

import math

import torch

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall, front
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.managers.forward_context import TextSpan


def _grid(call: ModelCall) -> Grid | None:
    shapes = call.arguments.get("vision_token_shapes")
    if not shapes or len(shapes) > 1:
        return None  # several videos, which lie on no one grid
    frames, height, width = shapes[0]
    return (int(frames), int(height), int(width))


def _prompt(call: ModelCall) -> TextSpan | None:
    return front(int(call.arguments.get("und_len") or 0))


def _timestep(call: ModelCall) -> torch.Tensor | None:
    timesteps = call.tensor("vision_timesteps")
    return timesteps if timesteps is not None and timesteps.numel() else None


def _tokens(call: ModelCall) -> int:
    """Return the number of the video's tokens; where those lie on no grid, of all but the text."""
    grid = _grid(call)
    return _made(call) if grid is None else math.prod(grid)


def _behind(call: ModelCall) -> int:
    return _made(call) - _tokens(call)


def _made(call: ModelCall) -> int:
    """Return the number of tokens of all that is made: videos, sound and actions."""
    return int(call.arguments["sequence_length"]) - int(call.arguments["und_len"])


_LAYERS = "layers.*"

COSMOS3 = ModelAdapter(
    classes=("Cosmos3OmniTransformer",),
    grid=_grid,
    text_span=_prompt,
    timestep=_timestep,
    split=SplitPlan(
        tokens=_tokens,
        cuts=(
            Cut("layers.0", "gen_seq", dim=0, dims=2, with_text="behind"),
            # Behind the two that rotate the prompt.
            Cut(_LAYERS, "rotary_emb", index=2, dim=0, dims=2, with_text="behind"),
            Cut(_LAYERS, "rotary_emb", index=3, dim=0, dims=2, with_text="behind"),
        ),
        behind=_behind,
        keys_alone=True,
        gather="norm_moe_gen",
        with_text="behind",
    ),
)
