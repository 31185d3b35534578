"""What `torch.compile` leaves out of its graphs.

To import this module takes a second, because it imports `torch._dynamo`: only traced calls do.
"""

from typing import TYPE_CHECKING

import torch

from multimodal_gen.runtime.layers.attention.call import AttentionCall

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.custom_ops import RegisteredLayer


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="calls of attention layers with a cache, a mask of blocks or sink_logits run outside "
    "of compiled graphs; compile without fullgraph"
)
def attend_outside_graphs(layer: "RegisteredLayer", call: AttentionCall) -> torch.Tensor:
    """Attend where caches change, of which the operator knows nothing."""
    return layer.attend(call)
