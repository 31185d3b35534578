"""What ran in every attention layer, and why."""

from dataclasses import dataclass
from typing import TypeAlias, cast

from multimodal_gen.runtime.distributed.timing import TimeTaken, sum_of
from multimodal_gen.runtime.layers.attention.config import config_as_dict
from multimodal_gen.runtime.layers.attention.report_text import summary
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.selector import Selection

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEntry:
    """One backend of a layer.

    Attributes:
        steps: denoising steps it serves, e.g. "0-9"; None for every (other) step.
        selection: what runs and why.
        calls: how often it ran.
        densities: for sparse methods, (step, share of query-key pairs attended to) per step.
    """

    steps: str | None
    selection: Selection
    calls: int
    densities: tuple[tuple[int, float], ...] = ()

    @property
    def density(self) -> float | None:
        """Mean share of pairs attended to over the steps, or None for dense methods."""
        if not self.densities:
            return None
        return sum(density for _, density in self.densities) / len(self.densities)

    def as_dict(self) -> dict[str, Json]:
        """Return the entry as JSON data."""
        data: dict[str, Json] = {
            "steps": self.steps,
            **selection_as_dict(self.selection),
            "calls": self.calls,
        }
        if self.densities:
            data["density_by_step"] = {str(step): density for step, density in self.densities}
        return data


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
    """

    component: str | None
    name: str
    role: AttentionRole
    layer: int | None
    entries: tuple[ReportEntry, ...]
    detours: tuple[ReportEntry, ...] = ()
    times: TimeTaken | None = None

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
            **_times(self.times),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """Every attention layer that was taken over.

    Attributes:
        layers: one report per layer.
        notes: sentences about what was left alone, and why.
        gathering: what splitting and gathering the tokens of denoisers took, where ranks share
            them.
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    gathering: TimeTaken | None = None

    @property
    def times(self) -> TimeTaken | None:
        """What communication and attention took on this rank, where there are several."""
        return sum_of([*(layer.times for layer in self.layers), self.gathering])

    def as_dict(self) -> dict[str, Json]:
        """Return the report as JSON data."""
        return {
            "layers": [layer.as_dict() for layer in self.layers],
            "notes": list(self.notes),
            **_times(self.times),
        }

    def summary(self) -> str:
        """Return one line per group of layers that ran the same way, then notes and footnotes."""
        return "\n".join(summary(self))


def selection_as_dict(selection: Selection) -> dict[str, Json]:
    """Return a selection as JSON data; its "config" is None where no parameter was settled."""
    return {
        "backend": str(selection.backend),
        "variant": selection.variant,
        "source": str(selection.source),
        "detail": selection.asked.detail,
        "config": _config_in_use(selection),
        "asked": str(selection.asked.backend) if selection.asked.backend else None,
        "reason": selection.reason,
        "fallback": selection.fallback,
        "rejected": [
            {"backend": str(rejected.backend), "reasons": list(rejected.reasons)}
            for rejected in selection.rejected
        ],
    }


def _times(times: TimeTaken | None) -> dict[str, Json]:
    return {} if times is None else {"times": {**times.as_dict()}}


def _config_in_use(selection: Selection) -> Json:
    """Return the parameters that run; those asked for belong to the backend asked for."""
    asked = selection.asked
    if asked.config is None or selection.backend is not asked.backend:
        return None
    return cast("Json", config_as_dict(asked.config) or None)
