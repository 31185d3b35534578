"""A layer's schedule: which implementation serves which denoising steps.

It is made once per layer, dtype and device, not per call: the steps and layers that a sparse
backend leaves to a dense one are set apart, and each part is bound to an implementation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.binding import Binding, Demand, bind, report_entries
from multimodal_gen.runtime.layers.attention.config import (
    DensePart,
    SparseConfig,
    StepSet,
)
from multimodal_gen.runtime.layers.attention.report import ReportEntry, SigmaSteps
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    PreferenceSchedule,
)
from multimodal_gen.runtime.layers.attention.warn_once import (
    PROCESS,
    WarnOnce,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.method import SparseMethodImpl

__all__ = ["ScheduleEntry", "bind_schedule", "entry_at", "with_dense_parts"]

# What one run differs from another by: request, latent grid, number of steps, and noise levels.
_Run: TypeAlias = tuple[
    str | None, tuple[int, int, int] | None, int | None, tuple[float, ...] | None
]


def with_dense_parts(
    schedule: PreferenceSchedule,
    site: LayerSite,
    platform: PlatformEnum,
    warnings: WarnOnce = PROCESS,
) -> PreferenceSchedule:
    """Add to a schedule the parts that sparse backends leave to a dense one.

    Args:
        schedule: who asks for what; the first entry whose steps hold is the one that runs.
        site: where the layer sits.
        platform: where it runs.
        warnings: of the pipeline, which gets one where all of its layers are dense.

    Raises:
        ConfigError: a sparse backend was asked for without parameters it must have, or with a share
            of layers whose number is unknown.
    """
    if site.role is not AttentionRole.SELF:
        return schedule
    found: list[tuple[StepSet | None, BackendPreference]] = []
    for steps, asked in schedule:
        config = _sparse_config(asked, platform)
        if config is None:
            found.append((steps, asked))
            continue
        assert asked.backend is not None, "a configuration is a backend's"
        never = config.never_sparse("layers", site.num_layers)
        if never is not None:
            warnings.warn(f"{asked.backend} {never}")
        found += _parts(steps, asked, site, config)
    return tuple(found)


def _parts(
    steps: StepSet | None, asked: BackendPreference, site: LayerSite, config: SparseConfig
) -> Iterator[tuple[StepSet | None, BackendPreference]]:
    for part in config.dense_parts("layers"):
        if site.layer is not None and _holds_layer(part, site.layer, site, asked):
            yield steps, replace(asked, dense_reason=_reason("layers", str(part.indices), part))
            return
    for part in config.dense_parts("steps"):
        shared = part.indices if steps is None else part.indices & steps
        if shared is not None:
            yield shared, replace(asked, dense_reason=_reason("steps", str(shared), part))
    yield steps, asked


def _reason(axis: str, indices: str, part: DensePart) -> str:
    if part.indices.first is not None:
        return f"the {indices} {axis} are dense (`{part.given}`)"
    single = indices.isdigit()
    verb = f"{axis[:-1]} {indices} is" if single else f"{axis} {indices} are"
    return f"{verb} dense (`{part.given}`)"


def _holds_layer(part: DensePart, layer: int, site: LayerSite, asked: BackendPreference) -> bool:
    if site.num_layers is None and part.indices.first is not None:
        raise ConfigError(
            f"{asked.backend} must know how many layers a model has to keep a share of them dense, "
            f"got layer {layer} of an unknown number; pass site=LayerSite(layer=..., "
            f"num_layers=...), or give a number of layers above 1 or 0"
        )
    return part.indices.holds(layer, site.num_layers or 0)


def _sparse_config(asked: BackendPreference, platform: PlatformEnum) -> SparseConfig | None:
    if asked.backend is None or not asked.backend.is_sparse:
        return None
    config = asked.config
    if config is None:
        cls = find_backend(asked.backend, platform)
        config = cls.config_cls()
    return config if isinstance(config, SparseConfig) else None


@dataclass(slots=True, eq=False)
class ScheduleEntry:
    """What serves a range of denoising steps.

    Attributes:
        steps: the steps, or None for all.
        primary: the implementation that selection gave.
        observers: implementations of later entries that look at the calls of this one.
        ulysses_refusal: why some entry of the schedule needs all heads in one process, or None.
    """

    steps: StepSet | None
    primary: Binding
    observers: "tuple[SparseMethodImpl, ...]" = ()
    ulysses_refusal: str | None = None
    _run: _Run | None = None  # the last that was checked

    def serves(self, context: ForwardContext) -> bool:
        """Whether the running step is one of its steps.

        Raises:
            UsageError: that depends on what the run's steps are, which is unknown.
        """
        steps, total, sigmas = self.steps, context.num_steps, context.sigmas
        if steps is None:
            return True
        if steps.first is not None and total is None:
            raise UsageError(
                f"steps {steps} must be those of a run whose number of steps is known, got "
                f"none; pass num_steps to set_forward_context, or give a number of steps above 1"
            )
        if steps.sigma is not None and sigmas is None:
            raise UsageError(
                f"steps {steps} must be those of a run whose sigmas are known, got none; pass "
                f"sigmas to set_forward_context, or name steps by their indices"
            )
        return steps.holds(context.current_timestep, total or 0, sigmas)

    def check_run(self, context: ForwardContext) -> None:
        """Let the implementation refuse a run it does not fit, once, before any of its steps."""
        run = (context.request_id, context.latent_grid, context.num_steps, context.sigmas)
        if run != self._run:
            if self.primary.method is not None:
                self.primary.method.check_run(context)
            self._run = run

    def end_request(self, request_id: str) -> None:
        """Let the implementations drop what they keep for a request."""
        for bound in self.primary.family():
            if bound.method is not None:
                bound.method.end_request(request_id)

    def entries(self) -> tuple[tuple[ReportEntry, ...], tuple[ReportEntry, ...]]:
        """Return what ran, and what served calls in its place; see `report_entries`."""
        steps, sigmas = self.steps, None if self._run is None else self._run[3]
        if steps is None:
            return report_entries(self.primary, None)
        if steps.sigma is None or not sigmas:
            return report_entries(self.primary, str(steps))
        named = SigmaSteps.of(steps, sigmas)
        return report_entries(self.primary, named.steps, named)


def bind_schedule(schedule: PreferenceSchedule, demand: Demand) -> tuple[ScheduleEntry, ...]:
    """Select and construct the implementations of a schedule.

    Args:
        schedule: who asks for what.
        demand: what the layer demands of all of them.

    Raises:
        UnsupportedBackendError: see `resolve`.
    """
    bound = [bind(replace(demand, asked=asked)) for _, asked in schedule]
    refusal = next(filter(None, map(_ulysses_refusal, bound)), None)
    return tuple(
        ScheduleEntry(steps, bound[i], _that_observe(bound[i + 1 :]), refusal)
        for i, (steps, _) in enumerate(schedule)
    )


def _that_observe(later: Sequence[Binding]) -> "tuple[SparseMethodImpl, ...]":
    methods = (bound.method for bound in later)
    return tuple(method for method in methods if method is not None and method.observes)


def _ulysses_refusal(bound: Binding) -> str | None:
    """Return why a binding cannot serve a share of the heads, with the remedy, or None."""
    reason = bound.impl.limits.ulysses
    return reason and (
        f"attention backend {bound.selection.label} must have all heads in one process: "
        f"{reason}; use --sp-degree 1, or choose another backend"
    )


def entry_at(entries: tuple[ScheduleEntry, ...], context: ForwardContext | None) -> ScheduleEntry:
    """Return the entry that serves the running step; in the last one, others drop what they keep.

    Raises:
        UsageError: no denoiser call is running.
        ConfigError: an implementation does not fit the run, even if for a later step.
        UnsupportedBackendError: the same, for a kernel that was asked for.
    """
    if context is None:
        raise UsageError(
            "a schedule by denoising step must run inside a denoiser call, got none; wrap "
            "the call in `with set_forward_context(step):`"
        )
    for entry in entries:
        entry.check_run(context)
    found = next(entry for entry in entries if entry.serves(context))
    if context.request_id is not None and context.is_last_step:
        for entry in entries:
            if entry is not found:
                entry.end_request(context.request_id)
    return found
