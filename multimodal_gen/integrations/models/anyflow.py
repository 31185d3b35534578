"""AnyFlow: separate self and cross attention, as in Wan, with the frames before the channels.

The causal form of it (`AnyFlowFARTransformer3DModel`) attends by FlexAttention's block masks to its
past; layers take those as they are, dense, and it has no adapter.
"""

from multimodal_gen.integrations.models.adapter import ModelAdapter, grid_along
from multimodal_gen.integrations.models.split_plan import Cut, SplitPlan

_grid = grid_along(1, 3, 4)


ANYFLOW = ModelAdapter(
    classes=("AnyFlowTransformer3DModel",),
    grid=_grid,
    split=SplitPlan(
        cuts=(
            Cut("rope", dim=2, dims=4),
            Cut("patch_embedding", dim=2, dims=5, flat=True),
            # The two times of a frame, for each of its tokens.
            Cut("condition_embedder", index=0, dims=3),
            Cut("condition_embedder", index=1, dims=3),
        ),
    ),
)
