"""Where in a denoiser's forward its tokens are split over ranks, and where they are gathered.

Tensors are cut where modules outside of the transformer blocks hand them over, so that no hook is
part of a block that is compiled on its own. Text stays whole: every rank has all of it, where the
model puts it.

A model without a plan of ours may have one for context parallelism in diffusers. Only the plan is
used, none of diffusers' hooks. What can be followed is a plan that splits one kind of tokens and
gathers them once; where text goes along with them, its order would be lost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch import nn

from multimodal_gen.integrations.denoiser_context import WithText


@dataclass(frozen=True, slots=True)
class Cut:
    """Tensors of which a rank keeps its tokens; those of tuples, lists and dicts one by one.

    Tensors with one entry on the axis are left alone: it holds for all tokens.

    Attributes:
        module: dotted name of the module, "" for the model; one part may be "*" for all of a list.
        argument: the argument to cut before the module runs, or None to cut what it returns.
        only_if: attribute of the module without which nothing is cut, or None.
        index: which tensor of a tuple, or None for all of them.
        dim: axis of the tokens.
        dims: axes a tensor must have to be cut, or None for any number.
        flat: the tokens lie on `dim` and all axes after it.
        with_text: where text may be on that axis too; it stays.
        may_end_early: tensors may have fewer tokens than the call: the last ones are missing.
        is_count: it is no tensor but a number of leading tokens.
    """

    module: str
    argument: str | None = None
    _: KW_ONLY
    only_if: str | None = None
    index: int | None = None
    dim: int = 1
    dims: int | None = None
    flat: bool = False
    with_text: WithText = False
    may_end_early: bool = False
    is_count: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """How one model family is split.

    Attributes:
        tokens: number of tokens of a call (a `ModelCall`), or None when the call does not tell;
            "grid" for those of its latent grid; None where the first tensor to be cut is to tell.
        refuse: why a call cannot be split, as "name must rule, got value", or None where it can.
        behind: number of tokens behind them that all ranks have, where text is in front too.
        keys_alone: text in front of the tokens has keys alone where they attend to it.
        cuts: what is cut.
        gather: module whose output [B, S, C] or [S, C], of a tuple the first, has all tokens again;
            "-1" at the end of its name for the last of a list.
        with_text: where text may be in that output too; it stays.
        whole: how names begin of modules that attend to all tokens on every rank.
        gathered: arguments that modules get with the tokens of all ranks, such as the keys of a
            stream that all ranks have.
    """

    tokens: Callable[[Any], int | None] | Literal["grid"] | None = "grid"
    cuts: tuple[Cut, ...]
    refuse: Callable[[Any], str | None] | None = None
    behind: Callable[[Any], int] | None = None
    keys_alone: bool = False
    gather: str = "proj_out"
    with_text: WithText = False
    whole: tuple[str, ...] = ()
    gathered: tuple[Cut, ...] = ()


def must_be_none(argument: str, got: str, of: str = "a video") -> Callable[[Any], str | None]:
    """Return what refuses calls with an argument that cannot be split.

    Args:
        argument: the argument.
        got: what it is, and why it cannot be.
        of: what the tokens are those of.
    """

    def refuse(call: Any) -> str | None:
        if call.arguments.get(argument) is None:
            return None
        return f"{argument} must be None where ranks share the tokens of {of}, got {got}"

    return refuse


_TEXT = ("encoder_", "txt_")


def own_plan(model: nn.Module) -> SplitPlan | str:
    """Return the plan of a model's class, or why there is none that can be followed."""
    entries: Any = getattr(model, "_cp_plan", None)
    if not entries:
        return "has no plan for it"
    cuts: list[Cut] = []
    gathers: list[str] = []
    for module, entry in entries.items():
        if isinstance(entry, Mapping):
            cuts += _cuts(module, entry)
        elif getattr(entry, "gather_dim", None) == 1:
            gathers.append(module)
        else:
            return f"gathers {module} in a way that cannot be followed"
    arguments = {cut.argument for cut in cuts if cut.argument is not None}
    text = sorted(name for name in arguments if name.startswith(_TEXT))
    if text:
        return f"has a plan that splits text too ({', '.join(text)})"
    if len(gathers) != 1:
        return f"has a plan that gathers in {len(gathers)} places"
    return SplitPlan(tokens=None, cuts=tuple(cuts), gather=gathers[0])


def _cuts(module: str, entry: Mapping[Any, Any]) -> Iterator[Cut]:
    for name, value in entry.items():
        is_output = isinstance(name, int)
        parts = [*value] if isinstance(value, (list, tuple)) else [value]
        for i, part in enumerate(parts):
            index = name if is_output else i if len(parts) > 1 else None
            yield Cut(
                module,
                None if is_output else name,
                index=index,
                dim=part.split_dim,
                dims=part.expected_dims,
            )
