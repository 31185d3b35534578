"""The linear branch of one call, and the projection that its result goes through.

Shapes: B batch, S tokens, H heads, D head size, N blocks; q/k suffix = query/key side.
"""

from dataclasses import dataclass

import torch
from torch import nn

from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.linear_attention.api import (
    KeyState,
    Projection,
    add_linear,
    add_unselected,
    key_means,
    key_state,
)
from multimodal_gen.runtime.layers.attention.notices import Notices

__all__ = ["LinearBranch", "notice_no_projection", "projection_of"]


def notice_no_projection(
    notices: Notices, backend: str, component: str | None, topk_ratio: float, kept: int
) -> None:
    """Say once per component of a pipeline what the missing projection means.

    Args:
        notices: of the pipeline.
        backend: the method.
        component: the component; None outside a pipeline.
        topk_ratio: share of the key blocks to keep.
        kept: how many they are.
    """
    blocks = "key block" if kept == 1 else f"{100 * topk_ratio:g} % of the key blocks"
    notices.say(
        f"{backend} of {component or 'a layer'} has no trained proj_l: its linear branch is zero, "
        f"so every query attends to the best {blocks} alone and the rest is lost; without a "
        f"checkpoint that was fine-tuned for Sparse-Linear Attention expect visibly worse results"
    )


def projection_of(linear: nn.Linear, device: torch.device) -> Projection:
    """Return the weights of a projection, on `device`."""
    bias = None if linear.bias is None else linear.bias.to(device)
    return Projection(weight=linear.weight.to(device), bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearBranch:
    """The keys of one call as the linear branch sees them.

    Attributes:
        means: means of the key blocks, fp32 or fp64 [B, Hkv, Nk, D].
        feature_map: softmax, elu or relu.
        state: the state over all tokens; None where that is not what the branch needs.
        projection: what its result goes through; None where the branch is zero.
    """

    means: torch.Tensor
    feature_map: str
    state: KeyState | None
    projection: Projection | None

    @classmethod
    def of(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: Blocks,
        projection: Projection | None,
        *,
        feature_map: str,
        unselected: bool,
    ) -> "LinearBranch":
        """Look at keys and values, once: the means are needed in any case.

        Args:
            key: [B, Sk, Hkv, D].
            value: as `key`.
            keys: how they are cut.
            projection: what the result goes through; None for zero.
            feature_map: softmax, elu or relu.
            unselected: whether only tokens of blocks that are not selected count.
        """
        state = None
        if projection is None or unselected:
            means = key_means(key, keys)
        else:
            means, state = key_state(key, value, keys, feature_map=feature_map)
        return cls(
            means=means,
            feature_map=feature_map,
            state=state,
            projection=projection,
        )

    def add(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: BlockPlan,
        rows: slice,
    ) -> torch.Tensor:
        """Return `out` plus the branch, for the queries in `rows`; may change `out`.

        Args:
            out: [B, Sq, H, D], the sparse branch.
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: as `key`.
            plan: the selected blocks.
            rows: the queries of the plan.
        """
        if self.projection is None:
            return out
        if self.state is not None:
            return add_linear(
                out, query, self.state, self.projection, rows=rows, feature_map=self.feature_map
            )
        return add_unselected(
            out, query, key, value, plan, self.projection, feature_map=self.feature_map
        )
