"""A layer's schedule: which implementation serves which denoising steps.

It is made once per layer, dtype and device, not per call: the steps and layers that a sparse
backend leaves to a dense one are told apart, selection names a backend for each part, and its
implementation is constructed.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, UnsupportedBackendError, UsageError
from multimodal_gen.kernels.engine import AUTO, SelectedKernel
from multimodal_gen.runtime.layers.attention.auto_table import AutoTable, CallShape
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionImpl,
    provides,
)
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
from multimodal_gen.runtime.layers.attention.config import (
    DensePart,
    FirstShare,
    SparseConfig,
)
from multimodal_gen.runtime.layers.attention.report import ReportEntry, SigmaSteps
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, AttentionRole, Feature
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    PreferenceSchedule,
)
from multimodal_gen.runtime.layers.attention.selector import (
    Selection,
    dense_for,
    resolve,
    trainable,
    warn_of_fallback,
)
from multimodal_gen.runtime.layers.attention.selectors import SigmaSelector, StepSet
from multimodal_gen.runtime.layers.attention.warn_once import (
    PROCESS,
    WarnOnce,
    warn_if_dense_layers,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

__all__ = [
    "BoundBackend",
    "ScheduleEntry",
    "bind_schedule",
    "entry_at",
    "plannable_dtype",
    "with_dense_parts",
]


logger = logging.getLogger(__name__)

# Process-wide, because imports are: what is wrong with installed packages that do not import.
_BROKEN: dict[str, str] = {}
_NOT_IMPORTED = "is installed but does not import"


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
        warnings: of the pipeline, told where all of its layers are dense.

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
        warn_if_dense_layers(config, asked.backend, site.num_layers, warnings)
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
        named = StepSet.of(part.indices)
        shared = named if steps is None else named & steps
        if shared is not None:
            yield shared, replace(asked, dense_reason=_reason("steps", str(shared), part))
    yield steps, asked


def _reason(axis: str, indices: str, part: DensePart) -> str:
    if isinstance(part.indices, FirstShare):
        return f"the {indices} {axis} are dense (`{part.given}`)"
    single = indices.isdigit()
    verb = f"{axis[:-1]} {indices} is" if single else f"{axis} {indices} are"
    return f"{verb} dense (`{part.given}`)"


def _holds_layer(part: DensePart, layer: int, site: LayerSite, asked: BackendPreference) -> bool:
    if site.num_layers is None and isinstance(part.indices, FirstShare):
        raise ConfigError(
            f"{asked.backend} must know how many layers a model has to keep a share of them dense, "
            f"got layer {layer} of an unknown number; pass site=LayerSite(layer=..., "
            f"num_layers=...), or give a number of layers above 1 or 0"
        )
    assert not isinstance(part.indices, SigmaSelector), "layers have none"
    return part.indices.holds(layer, site.num_layers or 0)


def _sparse_config(asked: BackendPreference, platform: PlatformEnum) -> SparseConfig | None:
    if asked.backend is None or not asked.backend.is_sparse:
        return None
    config = asked.config
    if config is None:
        cls = find_backend(asked.backend, platform)
        config = cls.config_cls()
    return config if isinstance(config, SparseConfig) else None


class BoundBackend:
    """An implementation with the selection it came from and a count of its calls.

    Attributes:
        selection: what was chosen, and why.
        features: what the variant that was chosen declares.
        impl: the implementation.
        forward: its `forward`, which takes `first_head` too where settings differ by head.
        calls: how often it served a call.
        gated: whether it has a coarse branch that a gate weighs.
        has_ring: whether it computes a ring itself.
        keeps_state: whether something is kept from call to call, about all heads of a call.
        masks_lse: whether it gives log-sum-exps under a mask.
    """

    __slots__ = (
        "calls",
        "features",
        "forward",
        "gated",
        "has_ring",
        "impl",
        "keeps_state",
        "masks_lse",
        "selection",
    )

    def __init__(
        self, selection: Selection, features: frozenset[Feature], impl: AttentionImpl
    ) -> None:
        self.selection = selection
        self.features = features
        self.impl = impl
        self.calls = 0
        self.forward: Callable[..., torch.Tensor] = impl.forward
        self.gated = provides(impl, "add_coarse")
        self.has_ring = provides(impl, "forward_ring") and Feature.RING in features
        self.keeps_state = provides(impl, "observe") or provides(impl, "end_request")
        self.masks_lse = provides(impl, "forward_lse_masked")

    def heads_from(self, first_head: int, *, continued: bool = False) -> dict[str, Any]:
        """Return the arguments that tell which of the layer's heads a call has, where it matters.

        Args:
            first_head: the first of them.
            continued: whether other heads of the same call went before.
        """
        if not self.impl.per_head:
            return {}
        return {"first_head": first_head} | ({"continued": True} if continued else {})


_KEY_MASK, _OTHER_MASK = 1, 2

# Shapes of calls that an entry remembers; prompts of any length make new ones.
_MOST_SHAPES = 1024


class ScheduleEntry:
    """The implementation of one step range, and the ones that serve what it cannot.

    Where another backend is faster for calls like one, an entry beside this one serves it: see
    `at`.

    Attributes:
        steps: denoising steps it serves, or None for all.
        primary: the implementation selection gave.
        observers: implementations of later entries that look at the calls of this one.
        varies: whether single calls may be served by an entry beside this one.
    """

    __slots__ = (
        "_asked",
        "_beside",
        "_by_shape",
        "_dense_table",
        "_geometry",
        "_named",
        "_request",
        "_run",
        "_served",
        "_shapes",
        "_strict",
        "_substitutes",
        "_table",
        "observers",
        "primary",
        "steps",
        "varies",
    )

    def __init__(
        self,
        steps: StepSet | None,
        asked: BackendPreference,
        request: AttentionRequest,
        geometry: LayerGeometry,
        *,
        strict: bool,
        table: AutoTable | None = None,
    ) -> None:
        self.steps = steps
        self.primary = _bind_first_that_imports(
            lambda known: resolve(known, asked, strict=strict), request, geometry
        )
        warn_of_fallback(self.primary.selection)
        self._asked = asked
        self._request = request
        self._geometry = geometry
        self._strict = strict
        self._substitutes: dict[tuple[frozenset[Feature], bool], BoundBackend] = {}
        self._run: tuple[object, ...] | None = None
        self._served: tuple[tuple[object, ...], bool] | None = None
        self._named: SigmaSteps | None = None
        # Only plain calls were measured.
        chooses = self.primary.selection.automatic and Feature.CAUSAL not in request.needs
        self._table = table if chooses and request.ranking is None else None
        self._dense_table = table
        self._by_shape: dict[tuple[object, ...], ScheduleEntry] = {}
        self._beside: dict[Selection | str, ScheduleEntry] = {}
        self._shapes: dict[str, None] = {}
        self.observers: tuple[AttentionImpl, ...] = ()
        self.varies = self._table is not None or provides(self.primary.impl, "dense_reason")

    @property
    def wants_key_masks(self) -> bool:
        """Whether the primary is sparse and takes masks of keys alone: others cost its gain."""
        bound = self.primary
        return bound.selection.backend.is_sparse and Feature.DENSE_MASK not in bound.features

    def serves(self, context: ForwardContext) -> bool:
        """Whether the running step is one of its steps.

        Raises:
            UsageError: that depends on what the run's steps are, which is unknown.
        """
        steps, total, sigmas = self.steps, context.num_steps, context.sigmas
        if steps is None:
            return True
        asked = (context.current_timestep, total, sigmas)
        if self._served is not None and self._served[0] == asked:  # as in the call before
            return self._served[1]
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
        found = steps.holds(context.current_timestep, total or 0, sigmas)
        self._served = asked, found
        return found

    def at(self, call: AttentionCall, context: ForwardContext | None) -> "ScheduleEntry":
        """Return what serves a call: this entry, or one beside it that is faster for calls like it.

        An automatic choice goes by the call's shape, if it was measured. A sparse method hands over
        calls of which it would keep so much that dense attention is faster, unless they need
        gradients, and those that its parameters leave dense. Nothing is waited for.

        Args:
            call: the call.
            context: the running denoiser call.
        """
        if self._table is None:
            query, key = call[:2]
            reason = self.primary.impl.dense_reason(query, key, context, call.first_head)
            return self if reason is None else self._dense(reason).at(call, context)
        if call.wants_gradient():
            return self
        # Spelled out, because it is part of every call.
        query, key, value, mask = call[:4]
        kind = 0 if mask is None else _kind_of(mask)
        shape = (query.shape, key.shape, value.shape[3], kind)
        return self._by_shape.get(shape) or self._at_shape(call, shape)

    def _at_shape(self, call: AttentionCall, key: tuple[object, ...]) -> "ScheduleEntry":
        """Look a shape up that is new, or was forgotten."""
        assert self._table is not None, "callers know"
        batch, queries, heads, head_size = call.query.shape
        shape = CallShape(
            batch=batch,
            queries=queries,
            keys=call.key.shape[1],
            heads=heads,
            kv_heads=call.key.shape[2],
            head_size=head_size,
            masked=call.mask is not None,
        )
        measurable = key[-1] != _OTHER_MASK and call.value.shape[3] == head_size
        found = self
        if measurable and min(queries, shape.keys, batch) > 0:
            found = self._fastest(self._table, shape)
        found._shapes[str(shape)] = None
        if len(self._by_shape) >= _MOST_SHAPES:
            self._by_shape.clear()
        self._by_shape[key] = found
        return found

    def _fastest(self, table: AutoTable, shape: CallShape) -> "ScheduleEntry":
        ranking = table.ranking(shape, self._request.dtype)
        if ranking is None:
            return self
        request = replace(self._request, ranking=ranking)
        entry = ScheduleEntry(self.steps, self._asked, request, self._geometry, strict=self._strict)
        if entry.primary.selection == self.primary.selection:
            return self  # nothing of the ranking can serve the layer
        entry.observers = self.observers
        return self._beside.setdefault(entry.primary.selection, entry)

    def _dense(self, reason: str) -> "ScheduleEntry":
        """Return the entry for calls that a sparse method hands over, as for its dense steps."""
        entry = self._beside.get(reason)
        if entry is None:
            entry = ScheduleEntry(
                self.steps,
                replace(self._asked, dense_reason=reason),
                self._request,
                self._geometry,
                strict=self._strict,
                table=self._dense_table,
            )
            entry.observers = self.observers
            self._beside[reason] = entry
        return entry

    def check_run(self, context: ForwardContext) -> None:
        """Let the implementation refuse a run it does not fit, once, before any of its steps."""
        run = (context.request_id, context.latent_grid, context.num_steps, context.sigmas)
        if run != self._run:
            self.primary.impl.check_run(context)
            self._run = run
            if self.steps is not None and self.steps.sigma and context.sigmas:
                self._named = SigmaSteps.of(self.steps, context.sigmas)

    def end_request(self, request_id: str) -> None:
        """Let the implementations drop what they keep for a request."""
        for bound in (self.primary, *self._substitutes.values()):
            bound.impl.end_request(request_id)

    def with_features(self, *features: Feature, causal_in_mask: bool = False) -> BoundBackend:
        """Return the implementation for calls that need `features`.

        Args:
            *features: what the call needs beyond the layer's request.
            causal_in_mask: the caller folded causality into its mask.

        Raises:
            UnsupportedBackendError: the call needs gradients and the backend that was asked for
                has no backward, or no backend has the features.
        """
        needs = frozenset(features)
        if not causal_in_mask and needs <= self.primary.features:
            return self.primary
        key = (needs, causal_in_mask)
        if key not in self._substitutes:
            self._substitutes[key] = self._substitute(needs, causal_in_mask=causal_in_mask)
        return self._substitutes[key]

    def entries(self) -> tuple[tuple[ReportEntry, ...], tuple[ReportEntry, ...]]:
        """Return what ran: the implementations of its calls, and the detours that were taken.

        Before the first call, what would run.
        """
        own, detours = self._own_entries()
        found, others = [own], list(detours)
        for entry in self._beside.values():
            beside, elsewhere = entry.entries()
            others += elsewhere
            if entry._asked is self._asked:
                found += beside
            else:  # what a sparse method handed over
                others += (part for part in beside if part.calls)
        ran = [part for part in found if part.calls]
        if ran or others:
            return tuple(ran or found[:1]), tuple(others)
        return (self._before_the_first_call(own),), ()

    def _own_entries(self) -> tuple[ReportEntry, list[ReportEntry]]:
        named = self.steps if self._named is None else self._named.steps
        steps = None if named is None else str(named)
        selection, calls = self.primary.selection, 0
        densities: dict[int, float] = {}
        backward: set[str] = set()
        detours = []

        def detour(selection: Selection, count: int, gradients: Iterable[str]) -> None:
            ran = tuple(sorted(gradients))
            detours.append(ReportEntry(steps=steps, selection=selection, calls=count, backward=ran))

        for bound in (self.primary, *self._substitutes.values()):
            ran = bound.impl.kernel or SelectedKernel(AUTO)
            for (kernel, reason), count in ran.detours().items():
                other = replace(bound.selection, variant=kernel, reason=reason)
                detour(other, count, ran.gradients(kernel))
            own = bound.calls - sum(ran.detours().values())
            if bound.selection is selection:
                calls += own
                densities.update(bound.impl.densities())
                backward |= ran.gradients()
            elif own:
                detour(bound.selection, own, ran.gradients())
        entry = ReportEntry(
            steps=steps,
            selection=selection,
            calls=calls,
            densities=tuple(sorted(densities.items())),
            backward=tuple(sorted(backward)),
            sigma=self._named,
            skipped=self.primary.impl.share_skipped(),
            shapes=tuple(self._shapes),
        )
        return entry, detours

    def _before_the_first_call(self, entry: ReportEntry) -> ReportEntry:
        if self._table is None:
            return entry
        reason = f"{entry.selection.reason}; at measured shapes the fastest of {self._table.name}"
        return replace(entry, selection=replace(entry.selection, reason=reason))

    def off_grid(self, reason: str) -> "ScheduleEntry":
        """Return what serves calls without a latent grid, which the sparse primary cannot.

        Args:
            reason: why, for the report and one warning.

        Raises:
            UnsupportedBackendError: fallbacks are refused.
        """
        geometry, label = self._geometry, self.primary.selection.label
        why = f"{label} works on a latent grid, and {reason}"
        if why not in self._beside:
            if self._strict:
                raise UnsupportedBackendError(
                    f"attention backend {label} must get tokens of a latent grid under "
                    f"--strict-attention: {reason} in {_where(geometry)}; name a dense backend "
                    f"for it"
                )
            entry = self._dense(why)
            entry.observers = ()  # which would look for the grid
            geometry.warnings.warn(
                f"{why} in {_where(geometry)}: such calls run dense, on "
                f"{entry.primary.selection.label}"
            )
        return self._beside[why]

    def _substitute(self, needs: frozenset[Feature], *, causal_in_mask: bool) -> BoundBackend:
        request, geometry = self._request, self._geometry
        if causal_in_mask:
            request = replace(request, needs=request.needs - {Feature.CAUSAL})
            geometry = replace(geometry, causal=False)
        selection = self.primary.selection
        missing = needs - self.primary.features
        if not missing:
            return _construct(selection, request, geometry)
        if Feature.BACKWARD in missing and _was_named(selection):
            return _construct(trainable(selection, request, *needs), request, geometry)
        lacks = f"has no {' and no '.join(sorted(str(f) for f in missing))} unless it is named"
        if not missing & _declared(selection, request):
            lacks = lacks.removesuffix(" unless it is named")
        reason = f"{selection.label} {lacks}"
        loses_sparsity = _was_named(selection) and selection.backend.is_sparse
        if loses_sparsity and self._strict:
            raise UnsupportedBackendError(
                f"attention backend {selection.label} must not get such calls under "
                f"--strict-attention: it {lacks}, and {_where(geometry)} makes one; leave out the "
                f"mask, pass one of keys alone, or name a dense backend for it"
            )
        bound = _bind_first_that_imports(
            lambda known: dense_for(known, self._asked, *needs, reason=reason), request, geometry
        )
        if loses_sparsity:
            geometry.warnings.warn(
                f"{reason}, which calls of {_where(geometry)} need: they run dense, on "
                f"{bound.selection.label}"
            )
        else:
            logger.info("%s; such calls run on another dense backend", reason)
        return bound


def _where(geometry: LayerGeometry) -> str:
    """Return whose calls are meant: layers of one component say the same."""
    site = geometry.site
    return f"{site.role} attention of {site.component}" if site.component else "a layer"


def bind_schedule(
    schedule: PreferenceSchedule,
    request: AttentionRequest,
    geometry: LayerGeometry,
    *,
    strict: bool,
    table: AutoTable | None = None,
) -> tuple[ScheduleEntry, ...]:
    """Select and construct the implementations of a schedule.

    Args:
        schedule: who asks for what.
        request: what the layer needs.
        geometry: what the layer is.
        strict: refuse the documented fallbacks too.
        table: what automatic choices go by, shape by shape; None for the platform's list alone.

    Raises:
        UnsupportedBackendError: see `resolve`.
    """
    entries = tuple(
        ScheduleEntry(steps, asked, request, geometry, strict=strict, table=table)
        for steps, asked in schedule
    )
    for i, entry in enumerate(entries):
        later = (other.primary.impl for other in entries[i + 1 :])
        entry.observers = tuple(impl for impl in later if provides(impl, "observe"))
    return entries


def entry_at(entries: tuple[ScheduleEntry, ...], context: ForwardContext | None) -> ScheduleEntry:
    """Return the entry that serves the running step.

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


def _kind_of(mask: torch.Tensor) -> int:
    """Return whether a mask is of keys alone, as `normalise_mask` tells, without looking at it."""
    narrow = mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1
    of_keys = (mask.dim() == 2 or narrow) and not mask.dtype.is_floating_point
    return _KEY_MASK if of_keys else _OTHER_MASK


def _construct(
    selection: Selection, request: AttentionRequest, geometry: LayerGeometry
) -> BoundBackend:
    cls = find_backend(selection.backend, request.environment.platform)
    variant = next(v for v in cls.variants if v.name == selection.variant)
    same_backend = selection.asked.backend is selection.backend
    features = variant.features
    if not _was_named(selection) and cls.reasons_against_auto(request.with_needs(Feature.BACKWARD)):
        features -= {Feature.BACKWARD}  # others train faster
    impl = cls.get_impl_cls()(
        geometry.num_heads,
        geometry.head_size,
        geometry.softmax_scale,
        geometry.causal,
        geometry.num_kv_heads,
        config=selection.asked.config if same_backend else None,
        variant=selection.variant,
        site=geometry.site,
        projection=geometry.projection,
        warnings=geometry.warnings,
    )
    return BoundBackend(selection, features, impl)


def _declared(selection: Selection, request: AttentionRequest) -> frozenset[Feature]:
    cls = find_backend(selection.backend, request.environment.platform)
    return next(v.features for v in cls.variants if v.name == selection.variant)


def _bind_first_that_imports(
    choose: Callable[[AttentionRequest], Selection],
    request: AttentionRequest,
    geometry: LayerGeometry,
) -> BoundBackend:
    """Bind what `choose` selects, without the packages that turn out not to import.

    Raises:
        UnsupportedBackendError: a user named the backend and only broken packages provide it.
    """
    while True:
        environment = replace(request.environment, broken=frozenset(_BROKEN.items()))
        selection = choose(replace(request, environment=environment))
        rejected = [r for r in selection.rejected if r.backend is selection.asked.backend]
        broken = [reason for r in rejected for reason in r.reasons if _NOT_IMPORTED in reason]
        if selection.fallback and broken:
            raise UnsupportedBackendError(f"{rejected[0].backend}: {'; '.join(broken)}")
        try:
            return _construct(selection, request, geometry)
        except (ImportError, OSError) as error:
            if not _note_broken(selection, request, error):
                raise


def _note_broken(selection: Selection, request: AttentionRequest, error: Exception) -> bool:
    """Remember which packages of a selection do not import; whether that says anything new."""
    cls = find_backend(selection.backend, request.environment.platform)
    variant = next(v for v in cls.variants if v.name == selection.variant)
    modules = {probe.module for probe in variant.packages} - _BROKEN.keys()
    for module in modules:
        _BROKEN[module] = f"{_NOT_IMPORTED}: {error}; reinstall it for this torch"
        logger.warning("%s %s", module, _BROKEN[module])
    return bool(modules)


def plannable_dtype(
    schedule: PreferenceSchedule, request: AttentionRequest, *, strict: bool
) -> torch.dtype:
    """Return the dtype to plan with for a layer that is yet to learn its own.

    That is the request's where every backend asked for takes it; else one they all take; else one
    for which their fallbacks do.

    Raises:
        UnsupportedBackendError: the schedule cannot be served in any dtype.
    """
    served: list[torch.dtype] = []
    refused: list[UnsupportedBackendError] = []
    for dtype in _dtypes_of(schedule, request):
        typed = replace(request, dtype=dtype)
        try:
            selections = [resolve(typed, asked, strict=strict) for _, asked in schedule]
        except UnsupportedBackendError as error:
            refused.append(error)
            continue
        if not any(selection.fallback for selection in selections):
            return dtype
        served.append(dtype)
    if served:
        return served[0]
    # The backend's own dtypes come first: its refusal then gives the reasons a cast cannot mend.
    raise refused[0]


def _dtypes_of(schedule: PreferenceSchedule, request: AttentionRequest) -> list[torch.dtype]:
    names = [asked.backend for _, asked in schedule if asked.backend is not None]
    if len(names) < len(schedule):
        names += [AttentionBackendEnum(name) for name in request.environment.priority]
    declared = {
        dtype
        for name in names
        for variant in find_backend(name, request.environment.platform).variants
        for dtype in variant.dtypes
    }
    return sorted(declared, key=lambda dtype: (dtype is not request.dtype, str(dtype))) or [
        request.dtype
    ]


def _was_named(selection: Selection) -> bool:
    return selection.source.explicit and selection.asked.backend is selection.backend
