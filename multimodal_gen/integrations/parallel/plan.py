"""Where in a denoiser's forward its tokens are split over ranks, and where they are gathered.

Tensors are cut where modules outside of the transformer blocks hand them over, so that no hook is
part of a block that is compiled on its own. Text stays whole: every rank has all of it, where the
model puts it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Cut", "SplitPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Tensors of which a rank keeps its tokens; tuples and lists of tensors are cut one by one.

    Tensors with one entry on the axis are left alone: it holds for all tokens.

    Attributes:
        module: dotted name of the module, "" for the model; one part may be "*" for all of a list.
        only_if: attribute of the module without which nothing is cut, or None.
        argument: the argument to cut before the module runs, or None to cut what it returns.
        index: which tensor of a tuple, or None for all of them.
        dim: axis of the tokens.
        dims: axes a tensor must have to be cut, or None for any number.
        flat: the tokens lie on `dim` and all axes after it.
        behind_text: text comes first on that axis.
        may_end_early: tensors may have fewer tokens than the call: the last ones are missing.
        is_count: it is no tensor but a number of leading tokens.
    """

    module: str
    only_if: str | None = None
    argument: str | None = None
    index: int | None = None
    dim: int = 1
    dims: int | None = None
    flat: bool = False
    behind_text: bool = False
    may_end_early: bool = False
    is_count: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """How one model family is split.

    Attributes:
        tokens: number of tokens of a call (a `ModelCall`), or None when the call does not tell; no
            function where the first tensor to be cut is to tell.
        cuts: what is cut.
        gather: module whose output [B, S, C] has all tokens again.
    """

    tokens: Callable[[Any], int | None] | None
    cuts: tuple[Cut, ...]
    gather: str = "proj_out"
