"""AnyFlow: separate self and cross attention, as in Wan, with the frames before the channels.

The causal form of it (`AnyFlowFARTransformer3DModel`) attends by FlexAttention's block masks to its
past; layers take those as they are, dense, and it has no adapter.
"""

from multimodal_gen.integrations.models.adapter import Grid, ModelAdapter, ModelCall


def _grid(call: ModelCall) -> Grid | None:
    latent = call.tensor("hidden_states")
    if latent is None or latent.dim() != 5:
        return None
    frames, _, height, width = latent.shape[1:]
    patch = call.config.patch_size
    return (frames // patch[0], height // patch[1], width // patch[2])


ANYFLOW = ModelAdapter(classes=("AnyFlowTransformer3DModel",), grid=_grid)
