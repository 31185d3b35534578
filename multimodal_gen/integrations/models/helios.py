"""Helios: a chunk of a video behind tokens of its history, coarser the longer ago.

The history is attended to by all and attends to all, as text does elsewhere.
"""

from types import MappingProxyType

from multimodal_gen.integrations.models.adapter import (
    ModelAdapter,
    ModelCall,
    front,
    history_tokens,
    latents_grid,
)
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan
from multimodal_gen.runtime.managers.forward_context import TextSpan

# How many patches of the chunk one of the history covers on each axis.
_HISTORY = MappingProxyType({"short": 1, "mid": 2, "long": 4})


def _history(call: ModelCall) -> TextSpan | None:
    return front(
        sum(history_tokens(call, f"history_{name}", cut) for name, cut in _HISTORY.items())
    )


_CHUNK = "original_context_length"  # how many tokens are not of the history

HELIOS = ModelAdapter(
    classes=("HeliosTransformer3DModel",),
    grid=latents_grid,
    text_span=_history,
    split=SplitPlan(
        cuts=(
            Cut("blocks.0", "hidden_states", dims=3, with_text=True),
            Cut("blocks.*", "temb", dims=4, with_text=True),
            Cut("blocks.*", "rotary_emb", dims=3, with_text=True),
            Cut("blocks.*", _CHUNK, is_count=True),
            Cut("norm_out", "temb", dims=3, with_text=True),
            Cut("norm_out", _CHUNK, is_count=True),
        ),
    ),
)
