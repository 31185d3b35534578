"""What ran in every attention layer, and why."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, cast

from multimodal_gen.runtime.distributed.timing import TimeTaken
from multimodal_gen.runtime.layers.attention.config import StepSet, config_as_dict
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.selector import Selection

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True)
class SigmaSteps:
    """The denoising steps of a run that were named by their noise levels.

    Attributes:
        asked: the noise levels, e.g. ">0.9".
        steps: indices, e.g. "0-9", or "none".
        levels: the highest and the lowest sigma of these steps, or where there are none, of all.
    """

    asked: str
    steps: str
    levels: tuple[float, float]

    @classmethod
    def of(cls, named: StepSet, sigmas: tuple[float, ...]) -> "SigmaSteps":
        """Return which steps of a run `named` names, by the sigma of every step."""
        steps = [i for i in range(len(sigmas)) if named.holds(i, len(sigmas), sigmas)]
        levels = [sigmas[i] for i in steps] or sigmas
        return cls(str(named.sigma), ranges(steps) or "none", (max(levels), min(levels)))

    def __str__(self) -> str:
        high, low = (f"{level:.4g}" for level in self.levels)
        whose = "the run's are " if self.steps == "none" else ""
        return f"sigma {self.asked}: {whose}{high} to {low}"

    def as_dict(self) -> dict[str, Json]:
        """Return it as JSON data."""
        return {"asked": self.asked, "highest": self.levels[0], "lowest": self.levels[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """One backend of a layer.

    Attributes:
        steps: denoising steps it serves, e.g. "0-9"; None for every (other) step.
        skipped: share of the kernel's steps over keys that were left out, or None.
        sigma: how they were named, where by their noise levels and those of the run are known.
        selection: what runs and why.
        calls: how often it ran.
        densities: for sparse methods, (step, share of query-key pairs attended to) per step.
        shapes: the shapes of its calls where they decided, such as "1x4096x24x128".
        backward: kernels of this package that computed gradients.
    """

    steps: str | None
    selection: Selection
    calls: int
    densities: tuple[tuple[int, float], ...] = ()
    shapes: tuple[str, ...] = ()
    sigma: SigmaSteps | None = None
    skipped: float | None = None
    backward: tuple[str, ...] = ()

    @property
    def density(self) -> float | None:
        """Mean share of pairs attended to over the steps, or None for dense methods."""
        if not self.densities:
            return None
        return sum(density for _, density in self.densities) / len(self.densities)

    def as_dict(self) -> dict[str, Json]:
        """Return the entry as JSON data; "config" is None where no parameter was settled."""
        selection = self.selection
        asked, config = selection.asked, selection.config
        rejected: list[Json] = [
            {"backend": str(each.backend), "reasons": list(each.reasons)}
            for each in selection.rejected
        ]
        more: dict[str, Json] = {
            "skipped": self.skipped,
            "sigma": None if self.sigma is None else self.sigma.as_dict(),
            "density_by_step": {str(step): density for step, density in self.densities},
            "shapes": list(self.shapes),
            "backward": list(self.backward),
        }
        return {
            "steps": self.steps,
            "backend": str(selection.backend),
            "variant": selection.variant,
            "source": str(selection.source),
            "detail": asked.detail,
            "config": cast("Json", config and (config_as_dict(config) or None)),
            "asked": asked.backend and str(asked.backend),
            "reason": selection.reason,
            "fallback": selection.fallback,
            "rejected": rejected,
            "calls": self.calls,
            **{name: value for name, value in more.items() if value not in (None, {}, [])},
        }


@dataclass(frozen=True, slots=True)
class NotRun:
    """Calls of a model in which a layer did not run, as a cache or a hook stood in for it.

    Attributes:
        by_step: (denoising step, calls without the layer).
        total: all calls of the model.
    """

    by_step: tuple[tuple[int, int], ...]
    total: int

    @property
    def calls(self) -> int:
        """How many they are."""
        return sum(calls for _, calls in self.by_step)

    def __str__(self) -> str:
        steps = ranges(step for step, _ in self.by_step)
        return (
            f"in {self.calls} of {self.total} calls of the model, in step"
            f"{'' if steps.isdigit() else 's'} {steps}"
        )

    def as_dict(self) -> dict[str, Json]:
        """Return it as JSON data."""
        by_step: dict[str, Json] = {str(step): calls for step, calls in self.by_step}
        return {"calls": self.calls, "of": self.total, "by_step": by_step}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One attention layer.

    Attributes:
        component: pipeline component, or None outside a pipeline.
        name: dotted path of the attention module.
        role: what the layer attends to.
        layer: index among the layers of its role in its component, or None.
        entries: its backends, in the order in which their steps are tried.
        detours: calls another backend had to serve, e.g. because of a mask.
        times: what they took on this rank, where there are several.
        not_run: calls of its model in which it did not run, or None.
    """

    component: str | None
    name: str
    role: AttentionRole
    layer: int | None
    entries: tuple[ReportEntry, ...]
    detours: tuple[ReportEntry, ...] = ()
    times: TimeTaken | None = None
    not_run: NotRun | None = None

    @property
    def calls(self) -> int:
        """Number of calls the layer served."""
        return sum(entry.calls for entry in (*self.entries, *self.detours))

    def as_dict(self) -> dict[str, Json]:
        """Return the layer as JSON data."""
        return {
            "component": self.component,
            "name": self.name,
            "role": str(self.role),
            "layer": self.layer,
            "entries": [entry.as_dict() for entry in self.entries],
            "detours": [entry.as_dict() for entry in self.detours],
            **({} if self.not_run is None else {"not_run": self.not_run.as_dict()}),
            **times_as_dict(self.times),
        }


def times_as_dict(times: TimeTaken | None) -> dict[str, Json]:
    """Return what took time as a field of JSON data, or none."""
    return {} if times is None else {"times": {**times.as_dict()}}


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, e.g. "0-3,38"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
