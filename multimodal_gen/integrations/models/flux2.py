"""FLUX.2: joint attention with the text in front of packed image tokens, whose ids have 4 numbers.

In its single-stream blocks the feed-forward layer shares the projections of the attention; what
reaches the attention call is as in the others.
"""

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations.models.adapter import (
    Grid,
    ModelAdapter,
    ModelCall,
    front_text,
    latent_tokens,
)
from multimodal_gen.integrations.models.flux import grid_of_ids
from multimodal_gen.integrations.parallel.plan import Cut, SplitPlan

# Set while the keys of reference images are computed, in the first step, or added to those of a
# call, in all others.
_KEEPS_KEYS = "kv_cache_mode"


def _grid(call: ModelCall) -> Grid | None:
    return None if call.arguments.get(_KEEPS_KEYS) else grid_of_ids(call)


def _tokens(call: ModelCall) -> int:
    mode = call.arguments.get(_KEEPS_KEYS)
    if mode:
        raise UsageError(
            f"{_KEEPS_KEYS} must be None where ranks share the tokens of an image, got {mode!r}: "
            f"keys of reference images are kept whole; run it on one GPU, or use a pipeline that "
            f"keeps none"
        )
    return latent_tokens(call)


FLUX2 = ModelAdapter(
    classes=("Flux2Transformer2DModel",),
    grid=_grid,
    text_span=front_text,
    timestep_scale=1e-3,
    split=SplitPlan(
        tokens=_tokens,
        cuts=(
            Cut(module="", argument="hidden_states", dims=3),
            Cut(module="", argument="img_ids", dim=0, dims=2),
            Cut(module="", argument="img_ids", dims=3),
        ),
    ),
)
