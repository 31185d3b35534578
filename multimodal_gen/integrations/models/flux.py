"""Flux.1 and FLUX.2: joint attention with the text in front of packed image tokens.

The position ids of FLUX.2 have 4 numbers. In its single-stream blocks the feed-forward layer shares
the projections of the attention; what reaches the attention call is as in the others.
"""

from dataclasses import replace

import torch

from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan


def grid_of_ids(call: ModelCall) -> Grid | None:
    """Return the grid of the position ids of a call, which are looked at once while they live."""
    ids = call.tensor("img_ids")
    if ids is None:
        return None
    return call.once(ids, lambda: _read(ids))


def _read(ids: torch.Tensor) -> Grid | None:
    """Read the grid off ids [S, 3 or 4].

    Tokens of reference images, whose first number is not 0, come behind it: they are attended to
    by all, as text is.
    """
    positions = ids[0] if ids.dim() == 3 else ids
    if not len(positions):
        return None
    own = positions[:, 0] == 0
    in_front = (own[:-1] >= own[1:]).all()
    tops = torch.where(own[:, None], positions, 0).amax(0)
    facts = torch.cat((torch.stack((own.sum(), in_front)), tops)).long().tolist()
    count, first, _, rows, columns, *further = facts
    if not first or any(further) or (rows + 1) * (columns + 1) != count:
        return None
    return (1, rows + 1, columns + 1)


_CUTS = (
    Cut("", "hidden_states", dims=3),
    Cut("", "img_ids", dim=0, dims=2),
    Cut("", "img_ids", dims=3),
)

FLUX = ModelAdapter(
    classes=("FluxTransformer2DModel",),
    grid=grid_of_ids,
    text_span=front_text,
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=latent_tokens,
        cuts=(
            *_CUTS,
            Cut("", "controlnet_block_samples", dims=3),
            Cut("", "controlnet_single_block_samples", dims=3),
        ),
    ),
)


# Set while the keys of reference images are computed, in the first step, or added to those of a
# call, in all others.
_KEEPS_KEYS = "kv_cache_mode"


def _grid(call: ModelCall) -> Grid | None:
    return None if call.arguments.get(_KEEPS_KEYS) else grid_of_ids(call)


def _refuse(call: ModelCall) -> str | None:
    mode = call.arguments.get(_KEEPS_KEYS)
    if not mode:
        return None
    return (
        f"{_KEEPS_KEYS} must be None where ranks share the tokens of an image, got {mode!r}: keys "
        f"of reference images are kept whole"
    )


FLUX2 = replace(
    FLUX,
    classes=("Flux2Transformer2DModel",),
    grid=_grid,
    split=SplitPlan(tokens=latent_tokens, refuse=_refuse, cuts=_CUTS),
)
