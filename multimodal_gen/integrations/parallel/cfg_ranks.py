"""The ranks that compute one guidance branch each, and what they know of a pipeline's guidance."""

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.agreement import Turn, agree
from multimodal_gen.runtime.distributed.groups import Agreements, ParallelGroups
from multimodal_gen.runtime.distributed.timing import Times
from multimodal_gen.runtime.managers.guidance import unguided

__all__ = ["CfgRanks", "is_guided", "refuse_unguided"]


class CfgRanks:
    """This rank and the one that computes the other guidance branch.

    Args:
        groups: the groups of this process.

    Attributes:
        times: what exchanging takes.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.times = Times()
        self._group = groups.cfg
        # They agree among themselves, as the ranks of a sequence do.
        self._agreeing = replace(groups, control=groups.cfg_control, agreements=Agreements())

    @property
    def branch(self) -> int:
        """The branch of this rank: 0 for what is called first, or comes first in a batch."""
        return self._group.index

    def share(
        self, own: torch.Tensor, call: str, facts: dict[str, object], turn: Turn
    ) -> tuple[torch.Tensor, ...]:
        """Return what both ranks have, in order, once they are at the same call.

        Raises:
            UsageError: the ranks do not agree.
            RankError: a rank does not get there.
        """
        own = own.contiguous()
        facts = {"shape": tuple(own.shape), "dtype": own.dtype, **facts}
        agree(self._agreeing, call, facts, (), turn=turn)
        received = [torch.empty_like(own) for _ in self._group.ranks]
        with self.times.exchanging(own.device):
            dist.all_gather(received, own, group=self._group.handle)
        return tuple(received)


def is_guided(pipeline: Any) -> bool | None:
    """Whether the running step of a pipeline has two branches; None where it does not tell."""
    conditions = getattr(getattr(pipeline, "guider", None), "num_conditions", None)
    if isinstance(conditions, int):
        return conditions > 1
    guided = getattr(pipeline, "do_classifier_free_guidance", None)
    return None if guided is None else bool(guided)


def refuse_unguided(pipeline: Any, component: str) -> UsageError:
    """Return the error for a generation that has one branch only."""
    name = component if pipeline is None else type(pipeline).__name__
    advice = "pass a guidance scale above 1 and, where the pipeline needs it, a negative prompt"
    if "true_cfg_scale" in inspect.signature(type(pipeline).__call__).parameters:
        # Their guidance scale is an input of the denoiser, which has one branch whatever it is.
        advice = "pass a true_cfg_scale above 1 and a negative prompt"
    return unguided(name, "a generation without", advice)
