"""What ran in the attention of a model, and why: layers that ran alike are one line."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from multimodal_gen.runtime.distributed.timing import TimeTaken, sum_of
from multimodal_gen.runtime.guard_bounds import GuardBounds
from multimodal_gen.runtime.layers.attention.report import (
    Json,
    LayerReport,
    NotRun,
    ReportEntry,
    ranges,
    times_as_dict,
)
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.selector import Rejected, Selection, condensed
from multimodal_gen.settings import as_plain

_WORTH_A_REFERENCE = 24  # characters of a reason

# A line has room for about as many densities.
_MOST_PARTS = 8
_MOST_SHAPES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCall:
    """A call that was checked.

    Attributes:
        component: pipeline component, or None outside a pipeline.
        name: dotted path of the attention module.
        role: what the layer attends to.
        layer: index among the layers of its role in its component, or None.
        step: the denoising step of the call.
    """

    component: str | None
    name: str
    role: AttentionRole
    layer: int | None
    step: int

    @classmethod
    def of(cls, call: "GuardedCall") -> "GuardedCall":
        """Return which call it was, and nothing else of it."""
        return GuardedCall(**{each.name: getattr(call, each.name) for each in fields(GuardedCall)})

    @property
    def where(self) -> str:
        """The layer, as text."""
        where = "unnumbered layer" if self.layer is None else f"layer {self.layer}"
        return f"{self.component or '-'}.{self.role}, {where} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardMiss(GuardedCall):
    """A call that missed its bound, whose layer runs exactly from its next call on.

    Attributes:
        error: the relative L2 error of its worst head; None where its output was not finite.
        bound: the most it may have been; None where it only had to be finite.
        dense: whether the layer runs dense now; else in 16 bits.
    """

    error: float | None
    bound: float | None
    dense: bool

    def __str__(self) -> str:
        found = "was not finite"
        if self.error is not None:
            found = f"had an error of {self.error:.3g}, above {self.bound:g},"
        runs = "dense" if self.dense else "in 16 bits"
        return f"{self.where} {found} in step {self.step}, and runs {runs} from its next call on"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """What the attention guard found.

    Attributes:
        bounds: the errors that layers may have.
        tested: how many approximate calls were tested to be finite.
        calls: how many of them were compared with exact attention.
        missed: the layers that run exactly, in the order in which they missed, those of earlier
            generations first.
        waiting: component and name of layers none of whose calls was compared, though they could
            be.
        only_finite: how many of the calls tested are never compared, by the reason.
        unchecked: how many approximate calls were not looked at, by the reason.
        senseless: the first call of each layer whose exact attention is not finite either.
    """

    bounds: GuardBounds
    tested: int
    calls: int
    missed: tuple[GuardMiss, ...]
    waiting: tuple[tuple[str | None, str], ...] = ()
    only_finite: Mapping[str, int] = field(default_factory=dict)
    unchecked: Mapping[str, int] = field(default_factory=dict)
    senseless: tuple[GuardedCall, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        """Return it as JSON data."""
        waiting = [{"component": at, "name": name} for at, name in self.waiting]
        return {**as_plain(self), "waiting": waiting}

    def lines(self) -> list[str]:
        """Return it as text: how much was checked, and a line for each layer that missed."""
        first = (
            f"guard: tested to be finite: {num(self.tested, 'approximate call')}; compared with "
            f"exact attention: {self.calls} of them; missed: {num(len(self.missed), 'layer')}"
        )
        waiting = [
            f"guard: {num(len(self.waiting), 'layer')} had no turn yet to be compared, the first "
            f"is {at or '-'} ({name})"
            for at, name in self.waiting[:1]
        ]
        return [
            first,
            *(f"guard: {each}" for each in self.missed),
            *(
                f"guard: {each.where} was given in step {each.step} what makes exact attention not "
                f"finite either, and runs as it did"
                for each in self.senseless
            ),
            *waiting,
            *(
                f"guard: {num(calls, 'call')} only had to be finite: {reason}"
                for reason, calls in self.only_finite.items()
            ),
            *(
                f"guard: not looked at: {num(calls, 'approximate call')}, because {reason}"
                for reason, calls in self.unchecked.items()
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserGraphs:
    """How the calls of one denoiser went under CUDA graphs.

    Attributes:
        component: pipeline component.
        calls: all of them.
        replays: those that were replayed.
        learning: those that ran before their graph: the first two of each kind.
        dropped: how often graphs were dropped, for others or because the model changed.
        plain: those that ran without one, by the reason.
    """

    component: str
    calls: int
    replays: int
    learning: int
    dropped: int
    plain: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return it as text."""
        start = f"CUDA graphs: {self.component}, "
        replayed = f"{start}{self.replays} of {self.calls} calls were replayed"
        if self.learning:
            replayed += f"; {self.learning} ran as the first two of their kind"
        if self.dropped:
            often = "once" if self.dropped == 1 else f"{self.dropped} times"
            replayed += f"; graphs were dropped {often}, for others or another model"
        return [
            replayed,
            *(
                f"{start}{num(calls, 'call')} ran without one: {why}"
                for why, calls in self.plain.items()
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What CUDA graphs of whole denoiser calls did.

    Attributes:
        num_graphs: how many there are now.
        num_bytes: memory of the GPU that they hold.
        denoisers: how the calls of each denoiser went.
    """

    num_graphs: int
    num_bytes: int
    denoisers: tuple[DenoiserGraphs, ...]

    def lines(self) -> list[str]:
        """Return it as text: what is held, and how the calls went."""
        held = f"CUDA graphs: {self.num_graphs}, which hold {self.num_bytes / 2**20:.0f} MiB"
        return [*(line for each in self.denoisers for line in each.lines()), held]


def num(count: int, what: str) -> str:
    """Return how many there are of something."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def counted(names: Iterable[str]) -> str:
    """Return names in order, each once, with how often it is there."""
    counts = sorted(Counter(names).items())
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAhead:
    """What came of compiling kernels ahead, in other processes.

    Attributes:
        kernels: names of those that are being compiled, or were, each as often as it is; None
            before that is known.
        seconds: how long finding and compiling them took; None before they are all there.
        failed: why they are not; None where they are, or may be yet.
    """

    kernels: tuple[str, ...] | None
    seconds: float | None
    failed: str | None

    def lines(self) -> list[str]:
        """Return it as text."""
        what = "what the pipeline needs"
        if self.kernels is not None:
            named = counted(self.kernels)
            what = num(len(self.kernels), "kernel") + (f" ({named})" if named else "")
        if self.failed is not None:
            return [f"compiled ahead: not all of {what}: {self.failed}"]
        if self.seconds is not None:
            return [f"compiled ahead: {what}, in {self.seconds:.1f} s"]
        state = "is being found" if self.kernels is None else "being compiled"
        return [f"compiled ahead: {what} {state}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """Every attention layer that was taken over.

    Attributes:
        layers: one report per layer.
        notes: sentences about what was left alone, and why.
        gathering: what splitting and gathering the tokens of denoisers took, where ranks share
            them.
        guard: what the attention guard found, where one was asked for.
        graphs: what CUDA graphs did, where they were asked for.
        ahead: what was compiled ahead, where that was asked for.
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    gathering: TimeTaken | None = None
    guard: GuardReport | None = None
    graphs: GraphReport | None = None
    ahead: CompiledAhead | None = None

    @property
    def times(self) -> TimeTaken | None:
        """What communication and attention took on this rank, where there are several."""
        return sum_of([*(layer.times for layer in self.layers), self.gathering])

    def as_dict(self) -> dict[str, Json]:
        """Return the report as JSON data."""
        return {
            "layers": [layer.as_dict() for layer in self.layers],
            "notes": list(self.notes),
            **({} if self.guard is None else {"guard": self.guard.as_dict()}),
            **({} if self.graphs is None else {"cuda_graphs": as_plain(self.graphs)}),
            **({} if self.ahead is None else {"compile_ahead": as_plain(self.ahead)}),
            **times_as_dict(self.times),
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
                density += f"{100 * group.skipped:.1f} % of their steps skipped, "
            shapes = f"{_shapes_text(group.entry.shapes)}, " if group.entry.shapes else ""
            ran = group.entry.backward
            backward = f"gradients by {' and '.join(ran)}, " if ran else ""
            because = _once(footnotes.reason(selection), said)
            lines.append(
                f"{group.component}.{group.role}, layers {group.layers_text}{steps}: "
                f"{detour}{selection.label} [{group.source}], {density}{shapes}{backward}"
                f"{num(calls, 'call')} each; {because}"
            )
        lines += _not_run_lines(self)
        for part in (self.guard, self.graphs, self.ahead):
            lines += [] if part is None else part.lines()
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*lines, *_time_line(self), *notes, *footnotes.lines()])


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
        """Share of the kernel's steps over keys that were left out, as a mean over the layers."""
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

    def reason(self, selection: Selection) -> str:
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


def grouped(report: AttentionReport) -> list[Group]:
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


def _not_run_lines(report: AttentionReport) -> list[str]:
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


def _time_line(report: AttentionReport) -> list[str]:
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
