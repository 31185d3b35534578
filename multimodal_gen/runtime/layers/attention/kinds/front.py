"""Calls with tokens in front that all ranks hold, such as text, which are not the video's.

Sparse methods learn of them by the text span. They work on as many queries as keys, so keys in
front that have no queries get some, whose rows are dropped again.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.managers.forward_context import ForwardContext, TextSpan


def as_text_in_front(
    call: AttentionCall, context: ForwardContext
) -> tuple[AttentionCall, ForwardContext, int]:
    """Return a call and its context as sparse methods take them, and how many queries it got.

    Args:
        call: a call with replicated tokens in front.
        context: the running denoiser call.

    Raises:
        UsageError: the context tells of text in front that is shorter.
    """
    front, _, keys_in_front = call.replicated
    length, span = front + keys_in_front, context.text_span
    if span is None or span.start:
        context = replace(context, text_span=TextSpan(start=0, length=length))
    elif span.length < length:
        raise UsageError(
            f"text_span must hold the {length} tokens in front that all ranks hold, got one of "
            f"{span.length}; leave text_span out"
        )
    if keys_in_front:
        call = _with_queries(call, context)
    return call, context, keys_in_front


def _with_queries(call: AttentionCall, context: ForwardContext) -> AttentionCall:
    """Return a call with queries, zeros, for the keys in front that have none."""
    (_, behind, count), mask = call.replicated, call.mask
    if mask is not None and mask.dim() == 2:  # over as many queries it would mask those too
        mask = mask[:, None, None, :]
    elif mask is not None and mask.dim() > 2 and mask.shape[-2] == call.query.shape[1] > 1:
        rows = (*[mask.narrow(-2, 0, 1)] * count, mask)  # the first, for queries that nothing reads
        mask = context.cache.get(mask, ("rows", count), lambda: torch.cat(rows, dim=-2))
    query = F.pad(call.query, (0, 0, 0, 0, count, 0))
    return call._replace(query=query, mask=mask, mask_meta=None, replicated=(count, behind, 0))
