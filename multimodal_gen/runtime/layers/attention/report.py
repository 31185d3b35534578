"""What ran in every attention layer, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias, cast

from multimodal_gen.runtime.distributed.timing import TimeTaken, sum_of
from multimodal_gen.runtime.layers.attention.config import StepSet, config_as_dict
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.selector import Rejected, Selection, condensed

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
        skipped: share of the kernel's steps over keys that `skip_below` left out, or None.
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
        footnotes = Footnotes()
        lines: list[str] = []
        said: list[str] = []
        for group in grouped(self):
            steps = f", steps {group.steps}"
            if group.steps == "all":
                steps = ""
            elif group.steps.startswith("first"):
                steps = f", the {group.steps} steps"
            elif group.entry.sigma is not None:
                steps += f" ({group.entry.sigma})"
            detour = "detour to " if group.detour else ""
            selection, calls = group.entry.selection, group.entry.calls
            density = f"{group.density_text}, " if group.density_text else ""
            if group.skipped is not None:
                density += f"{100 * group.skipped:.1f} % of them skipped (`skip_below`), "
            shapes = f"{_shapes_text(group.entry.shapes)}, " if group.entry.shapes else ""
            ran = group.entry.backward
            backward = f"gradients by {' and '.join(ran)}, " if ran else ""
            because = _once(footnotes.reason(selection), said)
            lines.append(
                f"{group.component}.{group.role}, layers {group.layers_text}{steps}: "
                f"{detour}{selection.label} [{group.source}], {density}{shapes}{backward}"
                f"{calls} {'call' if calls == 1 else 'calls'} each; {because}"
            )
        notes = [f"note: {note}" for note in self.notes]
        lines += [*_not_run_lines(self), *_time_line(self), *notes, *footnotes.lines()]
        return "\n".join(lines)


def _times(times: TimeTaken | None) -> dict[str, Json]:
    return {} if times is None else {"times": {**times.as_dict()}}


_WORTH_A_REFERENCE = 24  # characters of a reason

# A line has room for about as many densities.
_MOST_PARTS = 8
_MOST_SHAPES = 4


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one component that run the same way for the same reason.

    Attributes:
        component: pipeline component.
        role: what the layers attend to.
        steps: denoising steps, "all", or "other" for those that no rule names.
        entry: what runs in them, why, and how often it ran.
        detour: whether it stood in for the layers' own backend on single calls.
        members: the layers, each with its own entry.
    """

    component: str
    role: str
    steps: str
    entry: ReportEntry
    detour: bool
    members: tuple[tuple[LayerReport, ReportEntry], ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Their indices; empty when they have none."""
        return tuple(layer.layer for layer, _ in self.members if layer.layer is not None)

    @property
    def layers_text(self) -> str:
        """The layers as a selector, e.g. "0-3,38", or how many they are."""
        return ranges(self.layers) if self.layers else f"{len(self.members)} unnumbered"

    @property
    def density_text(self) -> str:
        """The least and the most dense layer's share of pairs, as percent; "" for dense methods.

        For example "density 9.0 %", "density 9.0 to 31.2 %", or where steps differ
        "density 20.0 % (steps 0-14: 30.0, 15-29: 10.0)".
        """
        means = [entry.density for _, entry in self.members if entry.density is not None]
        if not means:
            return ""
        least, most = (f"{100 * share:.1f}" for share in (min(means), max(means)))
        text = f"density {least} %" if least == most else f"density {least} to {most} %"
        parts = _by_step(pair for _, entry in self.members for pair in entry.densities)
        return f"{text} (steps {', '.join(parts)})" if len(parts) > 1 else text

    @property
    def skipped(self) -> float | None:
        """Share of the kernel's steps that `skip_below` left out, as a mean over the layers."""
        shares = [entry.skipped for _, entry in self.members if entry.skipped is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def source(self) -> str:
        """Who asked, e.g. "component (transformer.cross)"."""
        asked = self.entry.selection.asked
        return f"{asked.source} ({asked.detail})" if asked.detail else str(asked.source)

    def as_dict(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        entry = {k: v for k, v in self.entry.as_dict().items() if k != "steps"}
        return {
            "component": self.component,
            "role": self.role,
            "layers": list(self.layers),
            "count": len(self.members),
            "steps": self.steps,
            "detour": self.detour,
            **entry,
        }


class Footnotes:
    """Numbers rejected candidates, so that each long list of reasons is printed once."""

    def __init__(self) -> None:
        self._numbers: dict[Rejected, int] = {}

    def reason(self, selection: "Selection") -> str:
        """Return why a backend runs, with the numbers of what was rejected for it."""
        numbers = self._numbers
        found = (numbers.setdefault(each, len(numbers) + 1) for each in selection.rejected)
        marks = "".join(f" [{number}]" for number in found)
        if selection.fallback:
            return f"fallback, because {selection.asked.backend} cannot serve this layer{marks}"
        return selection.reason + marks

    def lines(self) -> list[str]:
        """Return the footnotes, one text per number."""
        return [
            f"[{number}] {rejected.backend} rejected: {'; '.join(condensed(rejected.reasons))}"
            for rejected, number in self._numbers.items()
        ]


def grouped(report: "AttentionReport") -> list[Group]:
    """Put the layers of a report that run alike into groups, in order of appearance."""
    found: dict[tuple[str, str, str, ReportEntry, bool], list[tuple[LayerReport, ReportEntry]]] = {}
    for layer in report.layers:
        # Without a schedule there may be several entries too: forcing adds one.
        rest = "other" if any(entry.steps for entry in layer.entries) else "all"
        parts = [(entry, rest, False) for entry in layer.entries]
        parts += [(entry, "all", True) for entry in layer.detours]
        for entry, others, detour in parts:
            alike = replace(entry, densities=(), skipped=None)
            steps = entry.steps or others
            key = (layer.component or "-", str(layer.role), steps, alike, detour)
            found.setdefault(key, []).append((layer, entry))
    return [Group(*key, tuple(members)) for key, members in found.items()]


def _by_step(densities: Iterable[tuple[int, float]]) -> list[str]:
    """Return the mean share of each step in percent; at most `_MOST_PARTS`.

    Equal steps are together: "0-14: 30.0".
    """
    shares: dict[int, list[float]] = {}
    for step, share in densities:
        shares.setdefault(step, []).append(share)
    percents = {step: round(100 * sum(s) / len(s), 1) for step, s in sorted(shares.items())}
    runs = [(list(steps), percent) for percent, steps in groupby(percents, percents.__getitem__)]
    size = max(1, -(-len(runs) // _MOST_PARTS))
    parts = []
    for first in range(0, len(runs), size):
        part = runs[first : first + size]
        steps = ranges(step for run, _ in part for step in run)
        least, most = min(p for _, p in part), max(p for _, p in part)
        parts.append(f"{steps}: {least:.1f}" + (f" to {most:.1f}" if most > least else ""))
    return parts


def _not_run_lines(report: "AttentionReport") -> list[str]:
    """Return which layers did not run in which calls, layers that lack the same together."""
    found: dict[tuple[str, str, NotRun], list[int]] = {}
    for layer in report.layers:
        if layer.not_run is not None:
            place = (layer.component or "-", str(layer.role), layer.not_run)
            found.setdefault(place, []).append(-1 if layer.layer is None else layer.layer)
    return [
        f"did not run: {component}.{role}, layers "
        f"{f'{len(layers)} unnumbered' if min(layers) < 0 else ranges(layers)}, {not_run}"
        for (component, role, not_run), layers in found.items()
    ]


def _shapes_text(shapes: Sequence[str]) -> str:
    """Return the first shapes, and how many more there are."""
    more = f" and {len(shapes) - _MOST_SHAPES} more shapes" if len(shapes) > _MOST_SHAPES else ""
    return f"at {', '.join(shapes[:_MOST_SHAPES])}{more}"


def _once(reason: str, said: list[str]) -> str:
    """Return a reason, or the line that gave it; `said` has those of earlier lines, in order."""
    said.append(reason)
    first = said.index(reason) + 1
    is_new = first == len(said) or len(reason) < _WORTH_A_REFERENCE
    return reason if is_new else f"as line {first}"


def _time_line(report: "AttentionReport") -> list[str]:
    """Return what this rank spent where, or nothing where there is one rank."""
    times, gathering = report.times, report.gathering
    if times is None:
        return []
    apart = ""
    if gathering is not None:
        apart = f", {gathering.communication_ms / 1e3:.2f} s of it around the denoiser"
    return [
        f"time on this rank: {times.attention_ms / 1e3:.2f} s in attention, "
        f"{times.communication_ms / 1e3:.2f} s in communication{apart}"
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, e.g. "0-3,38"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
