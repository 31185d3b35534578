"""From a selection to an implementation, and to the alternates that serve calls in its place.

An alternate serves calls that an implementation cannot serve, or would serve more slowly: those
that need more features, that have no latent grid, that a sparse method hands over, or that have a
measured shape. It is made when the first such call comes, and kept.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.engine import AUTO as KERNEL_AUTO
from multimodal_gen.kernels.engine import SelectedKernel
from multimodal_gen.runtime.layers.attention.auto_table import AutoTable, CallShape
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.call import AttentionCall, LayerGeometry
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
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.sparse.method import SparseMethodImpl

__all__ = ["Binding", "Demand", "bind", "plannable_dtype", "report_entries"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Process-wide, because imports are: what is wrong with installed packages that do not import.
_BROKEN: dict[str, str] = {}
_NOT_IMPORTED = "is installed but does not import"

# Shapes of calls that are remembered; prompts of any length make new ones.
_MOST_SHAPES = 1024


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

    def without_causality(self) -> "Demand":
        """Return it for calls whose masks have causality folded in."""
        request = replace(self.request, needs=self.request.needs - {Feature.CAUSAL})
        return replace(self, request=request, geometry=replace(self.geometry, causal=False))

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
        forward: its `forward`.
        method: the implementation, where it is a sparse method.
        by_shape: what chooses among them by the shape of a call; None where that was not measured.
        varies: whether alternates may be faster for single calls, or what the method itself wants.
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
    forward: Callable[..., torch.Tensor] = field(init=False)
    method: "SparseMethodImpl | None" = field(init=False)
    by_shape: "_ByShape | None" = field(init=False)
    varies: bool = field(init=False)

    def __post_init__(self) -> None:
        impl = self.impl
        self.forward = impl.forward
        self.method = cast("SparseMethodImpl", impl) if impl.is_sparse else None
        self.by_shape = _ByShape.of(self)
        self.varies = self.by_shape is not None or self.method is not None

    @property
    def is_sparse(self) -> bool:
        """Whether its backend is a sparse method."""
        return self.selection.backend.is_sparse

    def fields(self, call: AttentionCall) -> dict[str, Any]:
        """Return the fields of a call that `forward` takes by name."""
        return {name: getattr(call, name) for name in self.impl.takes}

    def count(self, out: _T, by: Selection | None = None) -> _T:
        """Count a call that was served, and return what it gave.

        Args:
            out: what it gave.
            by: what served it, where that was something else.
        """
        if by is None:
            self.calls += 1
        else:
            self.rerouted[by] += 1
        return out

    def reroute(self, by: Selection) -> None:
        """Count a call of which something else serves a part.

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
        return self.count(self.forward(*call[:3], context, attn_mask=mask, **fields))

    def dense(self, reason: str) -> "Binding":
        """Return what serves calls that a sparse method hands over, as its dense steps are."""
        return self._alternate(reason, lambda: bind(self.demand.dense(reason), own=False))

    def without_grid(self, reason: str) -> "Binding":
        """Return what serves calls without a latent grid, which a sparse method cannot.

        Args:
            reason: why, for the report and one warning.

        Raises:
            UnsupportedBackendError: fallbacks are refused.
        """
        demand, label = self.demand, self.selection.label
        why = f"{label} works on a latent grid, and {reason}"
        warning = f"{why} in {demand.where}: such calls"
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
            demand = demand.without_causality()
        missing = needs - self.features
        if not missing:
            return _construct(selection, demand, own=self.own)
        if Feature.BACKWARD in missing and selection.named:
            trained = after_self_checks(
                lambda known: trainable(selection, known, *needs), demand.request
            )
            return _construct(trained, demand, own=False)
        lacks = f"has no {' and no '.join(sorted(str(f) for f in missing))} unless it is named"
        if not missing & declared(selection, demand.request)[1].features:
            lacks = lacks.removesuffix(" unless it is named")
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

    __slots__ = ("_binding", "_found", "table")

    def __init__(self, binding: Binding, table: AutoTable) -> None:
        self._binding = binding
        self._found: dict[tuple[object, ...], Binding] = {}
        self.table = table

    @classmethod
    def of(cls, binding: Binding) -> "_ByShape | None":
        """Return it for automatic choices, whose plain calls were measured."""
        request, table = binding.demand.request, binding.demand.table
        measured = Feature.CAUSAL not in request.needs and request.ranking is None
        chosen = binding.selection.automatic
        return cls(binding, table) if table is not None and chosen and measured else None

    def at(self, call: AttentionCall) -> Binding:
        """Return what serves a call."""
        if call.wants_gradient():
            return self._binding
        # Spelled out, because it is part of every call.
        query, key, value, mask = call[:4]
        kind = None if mask is None else _masks_keys(mask)
        shape = (query.shape, key.shape, value.shape[3], kind)
        return self._found.get(shape) or self._look_up(call, shape)

    def _look_up(self, call: AttentionCall, key: tuple[object, ...]) -> Binding:
        """Look a shape up that is new, or was forgotten."""
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
        measured = key[-1] is not False and call.value.shape[3] == head_size
        found = self._binding
        if measured and min(queries, shape.keys, batch) > 0:
            found = self._fastest(shape)
        found.shapes[str(shape)] = None
        if len(self._found) >= _MOST_SHAPES:
            self._found.clear()
        self._found[key] = found
        return found

    def _fastest(self, shape: CallShape) -> Binding:
        binding, demand = self._binding, self._binding.demand
        ranking = self.table.ranking(shape, demand.request.dtype)
        if ranking is None:
            return binding
        request = replace(demand.request, ranking=ranking)
        found = bind(replace(demand, request=request), own=binding.own)
        if found.selection == binding.selection:
            return binding  # nothing of the ranking can serve the layer
        return binding.alternates.setdefault(found.selection, found)


def _masks_keys(mask: torch.Tensor) -> bool:
    """Return whether a mask is of keys alone, as `normalise_mask` tells, without looking at it."""
    narrow = mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1
    return (mask.dim() == 2 or narrow) and not mask.dtype.is_floating_point


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
    training = demand.request.with_needs(Feature.BACKWARD)
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


def report_entries(
    binding: Binding, steps: str | None, sigma: SigmaSteps | None = None
) -> tuple[tuple[ReportEntry, ...], tuple[ReportEntry, ...]]:
    """Return what ran: the implementations of its calls, and what served some in their place.

    Before the first call, what would run.

    Args:
        binding: what serves the steps.
        steps: their indices, or None for all.
        sigma: how they were named, where by their noise levels.
    """
    own: defaultdict[Selection, list[Binding]] = defaultdict(list)
    instead: Counter[Selection] = Counter()
    backward: defaultdict[Selection, frozenset[str]] = defaultdict(frozenset)
    for bound in binding.family():
        kernel = bound.impl.kernel or SelectedKernel(KERNEL_AUTO)
        for (name, reason), calls in kernel.fallbacks().items():
            other = replace(bound.selection, variant=name, reason=reason)
            instead[other] += calls
            backward[other] |= kernel.gradients(name)
        if bound.own:
            own[bound.selection].append(bound)
        else:
            instead[bound.selection] += bound.own_calls()
            backward[bound.selection] |= kernel.gradients()
        instead.update(bound.rerouted)
    others = tuple(
        ReportEntry(
            steps=steps,
            selection=selection,
            calls=calls,
            backward=tuple(sorted(backward[selection])),
        )
        for selection, calls in instead.items()
        if calls
    )
    found = [_own_entry(selection, same, steps, sigma) for selection, same in own.items()]
    ran = [entry for entry in found if entry.calls]
    if ran or others:
        return tuple(ran or found[:1]), others
    return (_before_the_first_call(binding, found[0]),), ()


def _own_entry(
    selection: Selection, same: Sequence[Binding], steps: str | None, sigma: SigmaSteps | None
) -> ReportEntry:
    """Return the entry of bindings of one selection."""
    facts = [bound.impl.facts() for bound in same]
    densities = {step: share for each in facts for step, share in each.densities.items()}
    shares = [each.skipped for each in facts if each.skipped is not None]
    gradients = {g for bound in same if bound.impl.kernel for g in bound.impl.kernel.gradients()}
    return ReportEntry(
        steps=steps,
        selection=selection,
        calls=sum(bound.own_calls() for bound in same),
        densities=tuple(sorted(densities.items())),
        backward=tuple(sorted(gradients)),
        sigma=sigma,
        skipped=shares[0] if shares else None,
        shapes=tuple(shape for bound in same for shape in bound.shapes),
    )


def _before_the_first_call(binding: Binding, entry: ReportEntry) -> ReportEntry:
    if binding.by_shape is None:
        return entry
    table = binding.by_shape.table.name
    reason = f"{entry.selection.reason}; at measured shapes the fastest of {table}"
    return replace(entry, selection=replace(entry.selection, reason=reason))


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
