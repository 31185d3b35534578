"""The authors' own operator, of the package sparse_linear_attention, where a call fits it.

It wants tensors heads first, no text and no mask, and does everything itself: the selection, with
keys centred in the precision of the inputs, and the linear branch over all tokens.

Shapes: B batch, L tokens, H heads, D head size.
"""

import importlib
from typing import Any

import torch
from torch import nn

from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons, refuse_upstream

UPSTREAM = "sparse_linear_attention"


def upstream_module(head_size: int, projection: nn.Linear | None, **options: Any) -> nn.Module:
    """Return the package's module, with the given projection in place of its own.

    Args:
        head_size: D.
        projection: [D, D], or None for zero.
        **options: topk, feature_map, BLKQ, BLKK and use_bf16, as the package takes them.
    """
    module: nn.Module = importlib.import_module(UPSTREAM).SparseLinearAttention(
        head_size, **options
    )
    if projection is not None:
        module.proj_l = projection
    return module


def attend_upstream(
    call: SparseCall,
    module: nn.Module,
    *,
    num_blocks: int,
    topk_ratio: float,
    linear_branch: str,
    backend: str,
) -> torch.Tensor:
    """Return the operator's output, [B, L, H, D].

    Args:
        call: the call.
        module: what `upstream_module` returned.
        num_blocks: number of key blocks.
        topk_ratio: share of them to keep.
        linear_branch: what the linear branch shall cover.
        backend: the method, for messages.

    Raises:
        UnsupportedBackendError: the operator cannot serve the call; lists the reasons.
    """
    found = call_reasons(call)
    if linear_branch != "all":
        found.append(f"needs linear_branch=all, got {linear_branch}")
    if int(topk_ratio * num_blocks) < 1:
        found.append(f"needs a topk_ratio that keeps a block of {num_blocks}, got {topk_ratio}")
    refuse_upstream(found, kernel=UPSTREAM, backend=backend)
    heads_first = (x.transpose(1, 2).contiguous() for x in (call.query, call.key, call.value))
    out: torch.Tensor = module.to(call.query.device)(*heads_first)
    return out.transpose(1, 2)
