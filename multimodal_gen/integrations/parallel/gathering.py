"""The tokens of all ranks again, as one opaque operator under `torch.compile`."""

from collections.abc import Sequence

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.agreement import agree
from multimodal_gen.runtime.distributed.collectives import gather_tokens
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.timing import Times, recording
from multimodal_gen.runtime.layers.attention.turns import next_turn
from multimodal_gen.runtime.managers.forward_context import current_forward_context

__all__ = ["gather_sequence", "time_gathering"]

_SLOT = "multimodal_gen.gathering_times"


def time_gathering(times: Times, cache: dict[object, object]) -> None:
    """Count what gathering takes in the denoiser call that has `cache`."""
    cache[_SLOT] = times


def gather_sequence(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return [B, sum S, C] of each rank's [B, S, C].

    Args:
        x: this rank's tokens.
        lengths: S of each rank that shares the sequence.
    """
    if torch.compiler.is_compiling():
        return _gather_op(x, lengths)
    return _gather(x, lengths)


def _gather(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    groups = parallel_groups()
    if groups is None or groups.sequence.size != len(lengths):
        raise UsageError(
            f"the {len(lengths)} ranks that share a sequence must stay together while a model is "
            f"attached, got {'none' if groups is None else groups.sequence.size}; call remove() on "
            f"its handle before the groups change"
        )
    facts = {
        "tokens": tuple(lengths),
        "batch size": x.shape[0],
        "channels": tuple(x.shape[2:]),
        "dtype": x.dtype,
    }
    on_cpu = x.device.type == "cpu"
    refusal = _refusal(x, lengths[groups.sequence.index], groups.rank)
    agree(groups, "gathering of tokens", facts, (), refusal, turn=next_turn(), wait=on_cpu)
    context = current_forward_context()
    times = None if context is None else context.cache.get(_SLOT)
    with recording(times):
        whole = gather_tokens(x.transpose(1, -1), lengths, groups.sequence)
    return whole.transpose(1, -1).contiguous()


def _refusal(x: torch.Tensor, length: int, rank: int) -> UsageError | None:
    """Return why the tokens of this rank cannot be gathered, or None."""
    if x.shape[1] != length:
        return UsageError(
            f"the tokens of rank {rank} must be {length} again where they are gathered, as many as "
            f"it was given, got {x.shape[1]}; a model that changes their number cannot be split"
        )
    if x.requires_grad and torch.is_grad_enabled():
        return UsageError(
            "tokens that ranks gather must not require grad; call the model under torch.no_grad()"
        )
    return None


@torch.library.custom_op("multimodal_gen::gather_sequence", mutates_args=())
def _gather_op(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return _gather(x, lengths)


@_gather_op.register_fake
def _(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(lengths), *x.shape[2:]))
