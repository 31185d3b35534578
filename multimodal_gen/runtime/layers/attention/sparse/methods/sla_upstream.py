"""The authors' own operator, of the package sparse_linear_attention, where a call fits it.

It wants tensors heads first, no text and no mask, and does everything itself: the selection, with
keys centred in the precision of the inputs, and the linear branch over all tokens.

Shapes: B batch, L tokens, H heads, D head size.
"""

import importlib
from typing import Any

import torch
from torch import nn

from multimodal_gen.runtime.layers.attention.backends.engine import refuse_upstream
from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall
from multimodal_gen.runtime.layers.attention.sparse.upstream import call_reasons

UPSTREAM = "sparse_linear_attention"


def attend_upstream(
    call: SparseCall, backend: str, *, linear_branch: str, topk: float, block: int, **options: Any
) -> torch.Tensor:
    """Return the operator's output, [B, L, H, D], with the call's projection in place of its own.

    Args:
        call: the call.
        backend: the method, for messages.
        linear_branch: what the linear branch shall cover.
        topk: share of the key blocks to keep.
        block: tokens of a key block.
        **options: feature_map, BLKQ and use_bf16, as the package takes them.

    Raises:
        UnsupportedBackendError: the operator cannot serve the call; lists the reasons.
    """
    found = call_reasons(call)
    if linear_branch != "all":
        found.append(f"needs linear_branch=all, got {linear_branch}")
    num_blocks = -(-call.layout.num_video // block)
    if int(topk * num_blocks) < 1:
        found.append(f"needs a topk_ratio that keeps a block of {num_blocks}, got {topk}")
    refuse_upstream(found, kernel=UPSTREAM, backend=backend)
    module: nn.Module = importlib.import_module(UPSTREAM).SparseLinearAttention(
        call.query.shape[3], topk=topk, BLKK=block, **options
    )
    if call.projection is not None:
        module.proj_l = call.projection
    heads_first = (x.transpose(1, 2).contiguous() for x in (call.query, call.key, call.value))
    out: torch.Tensor = module.to(call.query.device)(*heads_first)
    return out.transpose(1, 2)
