"""Reads the plan for context parallelism that a diffusers model has, as data.

Only the plan is used, none of diffusers' hooks. What can be followed is a plan that splits one kind
of tokens and gathers them once; where text goes along with them, its order would be lost.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from multimodal_gen.integrations.parallel.plan import Cut, SplitPlan

__all__ = ["own_plan"]

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
                module=module,
                argument=None if is_output else name,
                index=index,
                dim=part.split_dim,
                dims=part.expected_dims,
            )
