"""From what is asked for to implementations: of the steps of a schedule, and in their place.

A schedule is made once per layer, dtype and device, not per call. An alternate serves calls that an
implementation cannot serve, or would serve more slowly: those that need more features, that have no
latent grid, that a sparse method hands over, or that have a measured shape. It is made when the
first such call comes, and kept.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.kernels.engine import AUTO as KERNEL_AUTO
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.auto_table import AutoTable, CallShape
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import SAGE
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
from multimodal_gen.runtime.layers.attention.config import StepSet
from multimodal_gen.runtime.layers.attention.masks import masks_keys
from multimodal_gen.runtime.layers.attention.report import ReportEntry, SigmaSteps
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.layers.attention.scope import (
    AUTO,
    BackendPreference,
    PreferenceSchedule,
)
from multimodal_gen.runtime.layers.attention.selector import (
    Selection,
    after_self_checks,
    declared,
    resolve,
    trainable,
    warn_of_fallback,
)
from multimodal_gen.runtime.managers.forward_context import ForwardContext, current_forward_context

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.method import SparseMethodImpl

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Process-wide, because imports are: what is wrong with installed packages that do not import.
_BROKEN: dict[str, str] = {}
_NOT_IMPORTED = "is installed but does not import"

# Shapes of calls that are remembered; prompts of any length make new ones.
_MOST_SHAPES = 1024


# What one run differs from another by: request, latent grid, number of steps, and noise levels.
_Run: TypeAlias = tuple[
    str | None, tuple[int, int, int] | None, int | None, tuple[float, ...] | None
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a binding is made for.

    Attributes:
        request: what the layer needs.
        geometry: what the layer is.
        strict: refuse the documented fallbacks too.
        table: what automatic choices go by, shape by shape; None for the platform's list alone.
        asked: who asks for which backend.
    """

    request: AttentionRequest
    geometry: LayerGeometry
    strict: bool
    table: AutoTable | None = None
    asked: BackendPreference = AUTO

    def dense(self, reason: str, *needs: Feature) -> "Demand":
        """Return it for calls that run dense because of `reason`, and may need more features."""
        asked = replace(self.asked, dense_reason=reason)
        return replace(self, asked=asked, request=self.request.with_needs(*needs))

    @property
    def where(self) -> str:
        """Whose calls are meant: layers of one component say the same."""
        site = self.geometry.site
        return f"{site.role} attention of {site.component}" if site.component else "a layer"


@dataclass(slots=True, eq=False)
class Binding:
    """An implementation with the selection it came from, its alternates, and what it served.

    Attributes:
        demand: what it was made for.
        selection: what was chosen, and why.
        features: what the variant that was chosen declares.
        impl: the implementation.
        own: whether it runs what the layer asked for; the report lists others apart.
        head_groups: in how many groups of heads its backend was measured to be faster.
        calls: how often it served a call.
        rerouted: how often something that is not bound, such as a kernel, served one in its place.
        alternates: what serves single calls in its place, by why it does.
        shapes: those of its calls, where they decided.
        method: the implementation, where it is a sparse method.
        by_shape: what chooses among them by the shape of a call; None where that was not measured.
    """

    demand: Demand
    selection: Selection
    features: frozenset[Feature]
    impl: AttentionImpl
    own: bool = True
    head_groups: int = 1
    calls: int = 0
    rerouted: Counter[Selection] = field(default_factory=Counter)
    alternates: "dict[Hashable, Binding]" = field(default_factory=dict)
    shapes: dict[str, None] = field(default_factory=dict)
    method: "SparseMethodImpl | None" = field(init=False)
    by_shape: "_ByShape | None" = field(init=False)

    def __post_init__(self) -> None:
        impl = self.impl
        self.method = cast("SparseMethodImpl", impl) if impl.is_sparse else None
        request, table = self.demand.request, self.demand.table
        # Of automatic choices plain calls were measured.
        plain = Feature.CAUSAL not in request.needs and request.ranking is None
        chosen = self.selection.automatic and plain
        self.by_shape = _ByShape(self, table) if table is not None and chosen else None

    @property
    def is_sparse(self) -> bool:
        """Whether its backend is a sparse method."""
        return self.selection.backend.is_sparse

    def fields(self, call: AttentionCall) -> dict[str, Any]:
        """Return the fields of a call that `forward` takes by name."""
        return {name: getattr(call, name) for name in self.impl.takes}

    def count(self, out: _T) -> _T:
        """Count a call that was served, and return what it gave."""
        self.calls += 1
        return out

    def reroute(self, by: Selection) -> None:
        """Count a call of which something else serves a part, which is not counted otherwise.

        Raises:
            UnsupportedBackendError: fallbacks are refused.
        """
        if self.demand.strict:
            raise UnsupportedBackendError(
                f"{by.reason}; leave --strict-attention out to have such calls served by {by.label}"
            )
        self.rerouted[by] += 1

    def own_calls(self) -> int:
        """Return how many calls its kernel itself took."""
        kernel = self.impl.kernel
        return self.calls - (0 if kernel is None else sum(kernel.fallbacks().values()))

    def tally(self) -> "Counter[Hashable]":
        """Return how often it and what stood in for it served calls, for `count_again`."""
        kernel = self.impl.kernel
        fallbacks = {} if kernel is None else kernel.fallbacks()
        found: Counter[Hashable] = Counter({None: self.calls})
        found.update(self.rerouted)
        found.update(fallbacks)
        return found

    def count_again(self, tally: "Counter[Hashable]", sign: int = 1) -> None:
        """Add what calls added to its tally, or with -1 take it back: of calls in a CUDA graph."""
        kernel = self.impl.kernel
        for what, calls in tally.items():
            if what is None:
                self.calls += sign * calls
            elif isinstance(what, Selection):
                self.rerouted[what] += sign * calls
            elif kernel is not None:
                kernel.count_again({cast("tuple[str, str]", what): sign * calls})

    def family(self) -> "Iterator[Binding]":
        """Yield it and its alternates, and theirs."""
        yield self
        for alternate in self.alternates.values():
            yield from alternate.family()

    def attend(self, call: AttentionCall, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return attention of a call, [B, Sq, H, Dv].

        Args:
            call: the call, of which the mask is not looked at.
            mask: see `AttentionImpl.forward`.
        """
        context, fields = current_forward_context(), self.fields(call)
        return self.count(self.impl.forward(*call[:3], context, attn_mask=mask, **fields))

    def dense(self, reason: str) -> "Binding":
        """Return what serves calls that a sparse method hands over, as its dense steps are."""
        return self._alternate(reason, lambda: bind(self.demand.dense(reason), own=False))

    @property
    def operand_bits(self) -> int:
        """To how many bits its backend rounds operands; 16 where it does not."""
        cls, variant = declared(self.selection, self.demand.request)
        return min(cls.operand_bits, variant.operand_bits)

    @property
    def rounds(self) -> bool:
        """Whether its backend rounds operands to less than 16 bits; of dense ones alone."""
        return self.operand_bits < 16 and not self.is_sparse

    def exact(self, reason: str) -> "Binding":
        """Return what serves calls that it may only approximate: itself where it does not."""
        return self.dense(reason) if self.is_sparse or self.rounds else self

    def without_grid(self, reason: str) -> "Binding":
        """Return what serves calls without a latent grid, which a sparse method cannot.

        Args:
            reason: why, for the report and one warning.

        Raises:
            UnsupportedBackendError: fallbacks are refused.
        """
        demand, label = self.demand, self.selection.label
        why = f"{label} works on a latent grid, and {reason}"
        warning = f"{why}; in {demand.where}, such calls"
        refusal = (
            f"attention backend {label} must get tokens of a latent grid under "
            f"--strict-attention: {reason} in {demand.where}; name a dense backend for it"
        )
        return self._alternate(
            why, lambda: _instead(demand.dense(why), warning=warning, refusal=refusal)
        )

    def with_features(self, *features: Feature, causal_in_mask: bool = False) -> "Binding":
        """Return what serves calls that need `features`.

        Args:
            *features: what the call needs beyond the layer's request.
            causal_in_mask: the caller folded causality into its mask.

        Raises:
            UnsupportedBackendError: the call needs gradients and the backend that was asked for
                has no backward, or no backend has the features.
        """
        needs = frozenset(features)
        if not causal_in_mask and needs <= self.features:
            return self
        return self._alternate(
            (needs, causal_in_mask), lambda: self._that_has(needs, causal_in_mask=causal_in_mask)
        )

    def _that_has(self, needs: frozenset[Feature], *, causal_in_mask: bool) -> "Binding":
        demand, selection = replace(self.demand, table=None), self.selection
        if causal_in_mask:
            request = replace(demand.request, needs=demand.request.needs - {Feature.CAUSAL})
            geometry = replace(demand.geometry, causal=False)
            demand = replace(demand, request=request, geometry=geometry)
        missing = needs - self.features
        if not missing:
            return _construct(selection, demand, own=self.own)
        if Feature.BACKWARD in missing and selection.named:
            trained = after_self_checks(
                lambda known: trainable(selection, known, *needs), demand.request
            )
            return _construct(trained, demand, own=False)
        if_named = missing & declared(selection, demand.request)[1].features
        lacks = f"has no {' and no '.join(sorted(str(f) for f in missing))}"
        lacks += " unless it is named" if if_named else ""
        reason, where = f"{selection.label} {lacks}", demand.where
        demand = demand.dense(reason, *needs)
        if not (selection.named and self.is_sparse):
            logger.info("%s; such calls run on another dense backend", reason)
            return bind(demand, own=False)
        return _instead(
            demand,
            warning=f"{reason}, which calls of {where} need: they",
            refusal=f"attention backend {selection.label} must not get such calls under "
            f"--strict-attention: it {lacks}, and {where} makes one; leave out the mask, pass one "
            f"of keys alone, or name a dense backend for it",
        )

    def _alternate(self, why: Hashable, make: "Callable[[], Binding]") -> "Binding":
        """Return an alternate, made when it is first asked for."""
        return self.alternates.get(why) or self.alternates.setdefault(why, make())


def _instead(demand: Demand, *, warning: str, refusal: str) -> Binding:
    """Bind what serves calls of a sparse method that lose its gain: refused, or warned of once.

    Args:
        demand: what serves them is to be made for.
        warning: the calls, as the subject of a sentence.
        refusal: the error where fallbacks are refused.

    Raises:
        UnsupportedBackendError: they are.
    """
    if demand.strict:
        raise UnsupportedBackendError(refusal)
    bound = bind(demand, own=False)
    demand.geometry.warnings.warn(f"{warning} run dense, on {bound.selection.label}")
    return bound


class _ByShape:
    """Which alternate of a binding is the fastest for calls of a shape, if it was measured."""

    def __init__(self, binding: Binding, table: AutoTable) -> None:
        self._binding = binding
        self.table = table
        self._fastest = lru_cache(_MOST_SHAPES)(self._look_up)

    def at(self, call: AttentionCall) -> Binding:
        """Return what serves a call."""
        if call.wants_gradient():
            return self._binding
        # Spelled out, because it is part of every call.
        query, key, value, mask = call[:4]
        plain = mask is None or (masks_keys(mask) and not mask.dtype.is_floating_point)
        return self._fastest(query.shape, key.shape, value.shape[3], mask is not None, plain)

    def _look_up(
        self, query: torch.Size, key: torch.Size, value_size: int, masked: bool, plain: bool
    ) -> Binding:
        batch, queries, heads, head_size = query
        shape = CallShape(
            batch=batch,
            queries=queries,
            keys=key[1],
            heads=heads,
            kv_heads=key[2],
            head_size=head_size,
            masked=masked,
        )
        found, demand, ranking = self._binding, self._binding.demand, None
        if plain and value_size == head_size and min(queries, shape.keys, batch) > 0:
            ranking = self.table.ranking(shape, demand.request.dtype)
        if ranking is not None:
            request = replace(demand.request, ranking=ranking)
            fastest = bind(replace(demand, request=request), own=found.own)
            # Nothing of the ranking may be able to serve the layer.
            if fastest.selection != found.selection:
                found = found.alternates.setdefault(fastest.selection, fastest)
        found.shapes[str(shape)] = None
        return found


def bind(demand: Demand, *, own: bool = True) -> Binding:
    """Select and construct, without the packages that turn out not to import.

    Args:
        demand: what the binding is for.
        own: whether it is to run what the layer asked for.

    Raises:
        UnsupportedBackendError: see `resolve`; or a user named the backend, and only broken
            packages provide it.
    """
    while True:
        environment = replace(demand.request.environment, broken=frozenset(_BROKEN.items()))
        request = replace(demand.request, environment=environment)
        choose = partial(resolve, asked=demand.asked, strict=demand.strict)
        selection = after_self_checks(choose, request)
        rejected = [r for r in selection.rejected if r.backend is selection.asked.backend]
        broken = [reason for r in rejected for reason in r.reasons if _NOT_IMPORTED in reason]
        if selection.fallback and broken:
            raise UnsupportedBackendError(f"{rejected[0].backend}: {'; '.join(broken)}")
        try:
            binding = _construct(selection, demand, own=own)
        except (ImportError, OSError) as error:
            if not _note_broken(selection, demand.request, error):
                raise
            continue
        warn_of_fallback(selection)
        return binding


def _construct(selection: Selection, demand: Demand, *, own: bool) -> Binding:
    cls, variant = declared(selection, demand.request)
    geometry, features = demand.geometry, variant.features
    training = replace(demand.request, needs=demand.request.needs | {Feature.BACKWARD})
    if not selection.named and cls.reasons_against_auto(training):
        features -= {Feature.BACKWARD}  # others train faster
    impl = cls.get_impl_cls()(
        geometry.num_heads,
        geometry.head_size,
        geometry.softmax_scale,
        geometry.causal,
        geometry.num_kv_heads,
        config=selection.config,
        variant=selection.variant,
        site=geometry.site,
        warnings=geometry.warnings,
    )
    return Binding(demand, selection, features, impl, own=own, head_groups=cls.head_groups)


def _note_broken(selection: Selection, request: AttentionRequest, error: Exception) -> bool:
    """Remember which packages of a selection do not import; whether that says anything new."""
    _, variant = declared(selection, request)
    modules = {probe.module for probe in variant.packages} - _BROKEN.keys()
    for module in modules:
        _BROKEN[module] = f"{_NOT_IMPORTED}: {error}; reinstall it for this torch"
        logger.warning("%s %s", module, _BROKEN[module])
    return bool(modules)


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
        """Return what ran: the implementations of its calls, and what served some in their place.

        Before the first call, what would run.
        """
        steps, sigmas = self.steps, None if self._run is None else self._run[3]
        if steps is None or steps.sigma is None or not sigmas:
            return _entries(self.primary, None if steps is None else str(steps))
        named = SigmaSteps.of(steps, sigmas)
        return _entries(self.primary, named.steps, named)


def bind_schedule(schedule: PreferenceSchedule, demand: Demand) -> tuple[ScheduleEntry, ...]:
    """Select and construct the implementations of a schedule.

    Args:
        schedule: who asks for what.
        demand: what the layer demands of all of them.

    Raises:
        UnsupportedBackendError: see `resolve`.
    """
    bound = [bind(replace(demand, asked=asked)) for _, asked in schedule]
    methods = [each.method for each in bound]
    refusal = next(filter(None, map(_ulysses_refusal, bound)), None)
    return tuple(
        ScheduleEntry(
            steps,
            bound[i],
            observers=tuple(m for m in methods[i + 1 :] if m is not None and m.observes),
            ulysses_refusal=refusal,
        )
        for i, (steps, _) in enumerate(schedule)
    )


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


def _entries(
    binding: Binding, steps: str | None, sigma: SigmaSteps | None = None
) -> tuple[tuple[ReportEntry, ...], tuple[ReportEntry, ...]]:
    """Return what ran in some steps, and what served calls in its place."""
    own: defaultdict[Selection, list[Binding]] = defaultdict(list)
    instead: Counter[Selection] = Counter()
    backward: defaultdict[Selection, set[str]] = defaultdict(set)
    for bound in binding.family():
        kernel = bound.impl.kernel or SelectedKernel(KERNEL_AUTO)
        backward[bound.selection] |= kernel.gradients()
        ending = SAGE if bound.selection.variant.endswith(SAGE) else ""
        for (name, reason), calls in kernel.fallbacks().items():
            other = replace(bound.selection, variant=f"{name}{ending}", reason=reason)
            instead[other] += calls
            backward[other] |= kernel.gradients(name)
        if bound.own:
            own[bound.selection].append(bound)
        else:
            instead[bound.selection] += bound.own_calls()
        instead.update(bound.rerouted)

    def entry(selection: Selection, calls: int, **facts: Any) -> ReportEntry:
        gradients = tuple(sorted(backward[selection]))
        return ReportEntry(
            steps=steps, selection=selection, calls=calls, backward=gradients, **facts
        )

    others = tuple(entry(selection, calls) for selection, calls in instead.items() if calls)
    found = [
        entry(selection, sum(each.own_calls() for each in same), sigma=sigma, **_facts(same))
        for selection, same in own.items()
    ]
    ran = tuple(each for each in found if each.calls)
    if ran or others or binding.by_shape is None:
        return ran or tuple(found[:1]), others
    table = binding.by_shape.table.name
    reason = f"{binding.selection.reason}; at measured shapes the fastest of {table}"
    return (replace(found[0], selection=replace(binding.selection, reason=reason)),), ()


def _facts(same: Sequence[Binding]) -> dict[str, Any]:
    """Return what is known of the calls of bindings of one selection."""
    facts = [bound.impl.facts() for bound in same]
    densities = {step: share for each in facts for step, share in each.densities.items()}
    return {
        "densities": tuple(sorted(densities.items())),
        "skipped": next((each.skipped for each in facts if each.skipped is not None), None),
        "shapes": tuple(shape for bound in same for shape in bound.shapes),
    }


def plannable_dtype(schedule: PreferenceSchedule, demand: Demand) -> torch.dtype:
    """Return the dtype to plan with for a layer that is yet to learn its own.

    That is the request's where every backend asked for takes it; else one they all take; else one
    for which their fallbacks do.

    Raises:
        UnsupportedBackendError: the schedule cannot be served in any dtype.
    """
    served: list[torch.dtype] = []
    refused: list[UnsupportedBackendError] = []
    for dtype in _dtypes_of(schedule, demand.request):
        typed = replace(demand.request, dtype=dtype)
        try:
            selections = [
                after_self_checks(partial(resolve, asked=asked, strict=demand.strict), typed)
                for _, asked in schedule
            ]
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
        names += request.environment.priority
    declared = {
        dtype
        for name in names
        for variant in find_backend(name, request.environment.platform).variants
        for dtype in variant.dtypes
    }
    return sorted(declared, key=lambda dtype: (dtype is not request.dtype, str(dtype))) or [
        request.dtype
    ]
