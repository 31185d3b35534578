"""Chooses the backend of a layer and says why.

`resolve` is pure: the same request and the same ask give the same `Selection`. Who asks is decided
before it, in `scope.py`; what a backend can do is declared in `backends/`.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from numbers import Integral
from types import MappingProxyType
from typing import NamedTuple

import torch

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, UnsupportedBackendError
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.backends.declaration import Variant
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Environment,
    Feature,
    LayerSite,
)
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    Source,
    as_backend,
    claim_component_override,
    component_attn_backend_context_manager,
    current_component,
    current_scope,
    decide,
    forced_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum
from multimodal_gen.settings import expect

__all__ = [
    "FALLBACKS",
    "FALLBACKS_FIRST",
    "AttentionRequirements",
    "ComponentAttentionBackendNotAppliedError",
    "Rejected",
    "Selection",
    "after_self_checks",
    "component_attn_backend_context_manager",
    "condensed",
    "declared",
    "fallback_warning",
    "get_attn_backend",
    "global_force_attn_backend",
    "global_force_attn_backend_context_manager",
    "prefer_supported",
    "resolve",
    "trainable",
    "warn_of_fallback",
]

# The documented fallbacks of explicit requests. `Platform.dense_fallback` goes before them, but
# for the platforms below, where it only adds to them.
FALLBACKS: MappingProxyType[AttentionBackendEnum, AttentionBackendEnum] = MappingProxyType(
    {
        AttentionBackendEnum.SAGE_ATTN: AttentionBackendEnum.FA,
        AttentionBackendEnum.SAGE_ATTN_3: AttentionBackendEnum.TORCH_SDPA,
        AttentionBackendEnum.FA: AttentionBackendEnum.TORCH_SDPA,
    }
)
FALLBACKS_FIRST = frozenset({PlatformEnum.MUSA})

# "fa3: needs ...": how a backend of several variants says which one a reason is about.
_OF_VARIANT = re.compile(r"(\w+): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequirements:
    """What a layer needs of its backend beyond plain attention.

    Attributes:
        packed_varlen: calls with packed variable-length sequences.
    """

    packed_varlen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that was not chosen.

    Attributes:
        backend: the candidate.
        reasons: requirement and actual, one per reason.
    """

    backend: AttentionBackendEnum
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What runs, and why.

    Attributes:
        backend: the backend that runs.
        variant: the kernel library behind it, e.g. "fa3".
        asked: who asked for what.
        reason: one sentence: why this backend.
        rejected: candidates that came before it, each with its reasons.
        fallback: whether an explicit request was replaced by a documented fallback.
        automatic: whether the choice was left to us, so that calls of another shape may run
            another backend.
    """

    backend: AttentionBackendEnum
    variant: str
    asked: BackendPreference
    reason: str
    rejected: tuple[Rejected, ...] = ()
    fallback: bool = False
    automatic: bool = False

    @property
    def source(self) -> Source:
        """Who asked."""
        return self.asked.source

    @property
    def label(self) -> str:
        """The backend with its variant, e.g. "fa (fa3)"."""
        name = str(self.backend)
        return name if self.variant in ("", name) else f"{name} ({self.variant})"

    @property
    def named(self) -> bool:
        """Whether a user asked for the very backend that runs."""
        return self.source.explicit and self.asked.backend is self.backend

    @property
    def config(self) -> BackendConfig | None:
        """The parameters that run: those asked for belong to the backend asked for."""
        return self.asked.config if self.asked.backend is self.backend else None


def resolve(
    request: AttentionRequest, asked: BackendPreference, *, strict: bool = False
) -> Selection:
    """Choose the backend for `request` as `asked`; pure.

    Args:
        request: what the layer needs and where it runs.
        asked: who asks for which backend.
        strict: refuse documented fallbacks too.

    Returns:
        The selection, with every rejected candidate and its reasons.

    Raises:
        UnsupportedBackendError: an explicit request cannot be served and has no fallback, or no
            automatic candidate can serve the request.
    """
    return _resolve(_Ask(request, asked, strict))


class _Ask(NamedTuple):
    """What `resolve` is asked."""

    request: AttentionRequest
    asked: BackendPreference
    strict: bool = False


@lru_cache(maxsize=4096)
def _resolve(ask: _Ask) -> Selection:
    request, asked, _ = ask
    if asked.backend is None or asked.dense_reason:
        chosen = _automatic(ask)
        return _because(chosen, asked.dense_reason) if asked.dense_reason else chosen
    or_else = _fall_back if asked.source.explicit else _automatic
    environment = request.environment
    if environment.always not in (None, asked.backend):
        reason = f"{environment.platform} always runs {environment.always}"
        return or_else(ask, (Rejected(backend=asked.backend, reasons=(reason,)),))
    cls, reasons = _look(asked.backend, request, asked.config)
    if not reasons:
        by = f" by {asked.detail}" if asked.detail else ""
        return _chosen(cls, ask, f"asked for ({asked.source}{by})", config=asked.config)
    rejected = (Rejected(backend=asked.backend, reasons=reasons),)
    excuse = _excuse(asked.backend, ask)
    if excuse is not None:
        return _because(_automatic(ask, rejected), excuse)
    return or_else(ask, rejected)


def _excuse(backend: AttentionBackendEnum, ask: _Ask) -> str | None:
    """Return why an unsupported request does not concern this layer, or None when it does."""
    request, asked, strict = ask
    if backend.is_sparse and request.role is not AttentionRole.SELF:
        return f"{backend} is sparse and this is {request.role} attention"
    pipeline_wide = asked.source is Source.SETTINGS and not asked.narrow
    if pipeline_wide and request.role is AttentionRole.ENCODER and not strict:
        return f"{backend} was asked for the whole pipeline and cannot serve this encoder"
    return None


def _fall_back(ask: _Ask, rejected: tuple[Rejected, ...]) -> Selection:
    # Who names a kernel wants no other backend: none has that kernel.
    named = {getattr(ask.asked.config, name, "auto") for name in ("kernel", "kmeans_kernel")}
    while not ask.strict and named == {"auto"}:
        target = _fallback_of(rejected[-1].backend, ask.request.environment)
        if target is None or target in {r.backend for r in rejected}:
            break
        cls, reasons = _look(target, ask.request)
        if not reasons:
            first = rejected[0]
            why = f"{first.backend} cannot serve this layer: {'; '.join(first.reasons)}"
            return _chosen(cls, ask, why, rejected, fallback=True)
        rejected = (*rejected, Rejected(backend=target, reasons=reasons))
    raise _refused(ask, rejected)


def _fallback_of(
    backend: AttentionBackendEnum, environment: Environment
) -> AttentionBackendEnum | None:
    own = environment.always or environment.dense_fallback
    documented = FALLBACKS.get(backend)
    if environment.always is None and environment.platform in FALLBACKS_FIRST:
        return documented or own
    return own or documented


def _automatic(ask: _Ask, rejected: tuple[Rejected, ...] = ()) -> Selection:
    request = ask.request
    measured = _fastest(ask, rejected)
    if measured is not None:
        return measured
    for backend in request.environment.priority:
        if backend in {r.backend for r in rejected}:
            continue
        cls, reasons = _look(backend, request)
        reasons = reasons or cls.reasons_against_auto(request)
        if not reasons:
            platform = request.environment.platform
            why = f"first of {platform}'s automatic choices that serves this layer"
            return replace(_chosen(cls, ask, why, rejected), automatic=True)
        rejected = (*rejected, Rejected(backend=backend, reasons=reasons))
    tried = "; ".join(str(r) for r in rejected)
    raise UnsupportedBackendError(
        f"no attention backend can serve {_describe(request)}; tried {tried}"
    )


def _fastest(ask: _Ask, rejected: tuple[Rejected, ...]) -> Selection | None:
    """Return what was the fastest for calls of this shape, or None where nothing was compared.

    Only what can serve the request counts, by the very kernel library that was measured.
    """
    request = ask.request
    if request.ranking is None or request.environment.always:
        return None
    excluded = {r.backend for r in rejected}
    found = []
    for timing in request.ranking.timings:
        backend = AttentionBackendEnum(timing.backend)
        if backend.is_sparse or backend in excluded:
            continue
        cls, reasons = _look(backend, request)
        variant = None if reasons or cls.never_unasked else cls.choose_variant(request)
        if variant is not None and variant.name == timing.variant:
            found.append((cls, timing))
    if len(found) < 2:
        return None
    (cls, best), (_, second) = found[:2]
    why = (
        f"fastest of {len(found)} at {request.ranking.source}: {best.ms:.4g} ms, "
        f"{second.backend} {second.ms / best.ms:.2f} times that"
    )
    return replace(_chosen(cls, ask, why, rejected), automatic=True)


def trainable(selection: Selection, request: AttentionRequest, *needs: Feature) -> Selection:
    """Return the backend that was asked for, on a kernel that has a backward pass.

    Args:
        selection: what runs without gradients.
        request: the layer's request.
        *needs: features the call needs on top of the request's.

    Raises:
        UnsupportedBackendError: no kernel that may be taken has one; says what to do.
    """
    cls = find_backend(selection.backend, request.environment.platform)
    fuller, config = request.with_needs(*needs), selection.asked.config
    if cls.choose_variant(fuller, config) is not None:
        why = f"{selection.label} has no backward"
        return _chosen(cls, _Ask(fuller, selection.asked), why, config=config)
    remedy = f"train with {cls.trained_by}" if cls.trained_by else "choose another backend"
    if cls.choose_variant(fuller) is not None:
        name = "compute_mode" if "compute_mode" in _narrowing(config) else "kernel"
        remedy = f"leave out `{name}`"
    raise UnsupportedBackendError(
        f"attention backend {selection.label} must not get inputs that require grad: it has no "
        f"backward; call it under torch.no_grad() or {remedy}"
    )


def _look(
    backend: AttentionBackendEnum, request: AttentionRequest, config: BackendConfig | None = None
) -> tuple[type[AttentionBackend], tuple[str, ...]]:
    cls = find_backend(backend, request.environment.platform)
    return cls, cls.unsupported_reasons(request, config)


def _chosen(
    cls: type[AttentionBackend],
    ask: _Ask,
    reason: str,
    rejected: tuple[Rejected, ...] = (),
    *,
    fallback: bool = False,
    config: BackendConfig | None = None,
) -> Selection:
    variant: Variant | None = cls.choose_variant(ask.request, config)
    assert variant is not None, "a backend without reasons has a variant"
    checks = (str(check) for _, check in ask.request.environment.checked)
    return Selection(
        backend=cls.get_enum(),
        variant=variant.name,
        asked=ask.asked,
        reason="; ".join([reason, *checks]),
        rejected=rejected,
        fallback=fallback,
    )


def after_self_checks(
    choose: Callable[[AttentionRequest], Selection], request: AttentionRequest
) -> Selection:
    """Return what `choose` selects, once the kernels it takes have passed their self-checks.

    What a check says becomes part of the environment, and `choose` is asked again, until it takes
    what was checked or needs no check. Not pure: checks run, once per process and device.

    Args:
        choose: selects by a request alone.
        request: what the layer needs.

    Raises:
        UnsupportedBackendError: nothing is left that `choose` may take.
        UsageError: a CUDA graph is being captured, which a check would break.
        torch.OutOfMemoryError: a check found no memory.
    """
    while True:
        selection = choose(request)
        if request.environment.platform is not PlatformEnum.CUDA:
            return selection  # nothing is checked elsewhere
        cls, variant = declared(selection, request)
        checked = variant.after_self_checks(request, tail=_pools_tail(cls, selection.config))
        if checked == request:
            return selection
        request = checked


def declared(
    selection: Selection, request: AttentionRequest
) -> tuple[type[AttentionBackend], Variant]:
    """Return the declarations of what was chosen: the backend's, and its kernel library's."""
    cls = find_backend(selection.backend, request.environment.platform)
    return cls, next(each for each in cls.variants if each.name == selection.variant)


def _pools_tail(cls: type[AttentionBackend], config: BackendConfig | None) -> bool:
    """Whether a backend counts what it drops by its means, as its default is or as was asked."""
    defaults = {field.name: field.default for field in fields(cls.config_cls)}
    return bool(getattr(config, "tail", defaults.get("tail")) == "pooled")


def _because(selection: Selection, reason: str) -> Selection:
    return replace(selection, reason=f"{reason}; {selection.reason}")


def _refused(ask: _Ask, rejected: tuple[Rejected, ...]) -> UnsupportedBackendError:
    tried = ". ".join(map(str, rejected))
    given = _narrowing(ask.asked.config)
    named = " with " * bool(given) + " and ".join(f"{name}={x}" for name, x in given.items())
    remedy = f", leave {' and '.join(given)} out" if given else ""
    return UnsupportedBackendError(
        f"attention backend {rejected[0].backend} ({ask.asked.who}){named} cannot serve "
        f"{_describe(ask.request)}. {tried}. Choose another backend (`sglang attention list` "
        f"shows what runs here){remedy}, or leave the choice to auto"
    )


def _narrowing(config: BackendConfig | None) -> dict[str, str]:
    """Return the parameters by which kernels were left out, with what was given."""
    given = {name: getattr(config, name, None) for name in ("kernel", "compute_mode")}
    return {name: x for name, x in given.items() if x not in (None, "auto", "bf16")}


def _describe(request: AttentionRequest) -> str:
    heads = f"{request.num_heads} heads"
    if request.num_kv_heads != request.num_heads:
        heads += f" ({request.num_kv_heads} key heads)"
    dtype = str(request.dtype).removeprefix("torch.")
    return (
        f"{request.role} attention with {heads} of size {request.head_size} in {dtype} "
        f"on {request.environment.platform}"
    )


def warn_of_fallback(selection: Selection) -> None:
    """Log one warning per distinct fallback in the life of the process."""
    if selection.fallback:
        PROCESS.warn(fallback_warning(selection))


def fallback_warning(selection: Selection) -> str:
    """Return what was asked for, what runs instead, why, and the remedies, in one line."""
    asked, *between = selection.rejected
    nor = f", and neither can {' or '.join(str(r.backend) for r in between)}" if between else ""
    given = " and ".join(_narrowing(selection.asked.config))
    leave = f"leave {given} out or " if given else ""
    return (
        f"attention backend {asked.backend} ({selection.asked.who}) cannot serve this layer{nor}, "
        f"so {selection.label} runs instead: {'; '.join(condensed(asked.reasons))}. To run it "
        f"without this warning {leave}ask for {selection.backend}; to refuse it set "
        f"--strict-attention, or strict=True in apply()"
    )


def condensed(reasons: Sequence[str]) -> list[str]:
    """Return reasons with variants that share one put together: "fa3, fa4: needs ..."."""
    variants: dict[str, list[str]] = {}
    for reason in reasons:
        match = _OF_VARIANT.fullmatch(reason)
        name, text = match.groups() if match else ("", reason)
        variants.setdefault(text, []).extend([name] if name else [])
    return [f"{', '.join(names)}: {text}" if names else text for text, names in variants.items()]


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
    selected_attention_backend: AttentionBackendEnum | str | None = None,
    attention_requirements: AttentionRequirements | None = None,
    default_attention_backend: AttentionBackendEnum | str | None = None,
    is_cross_attention: bool = False,
) -> type[AttentionBackend]:
    """Return the backend class for a layer constructed here and now.

    Args:
        head_size: channels per head.
        dtype: dtype of q, k and v.
        supported_attention_backends: hint: automatic choice prefers this set.
        selected_attention_backend: request stronger than every other, or None.
        attention_requirements: what the layer needs beyond plain attention.
        default_attention_backend: the layer's own preference, weaker than a user's.
        is_cross_attention: whether keys come from another sequence.

    Raises:
        UnsupportedBackendError: see `resolve`.
        ConfigError: an argument is of another type.
    """
    expect("head_size", head_size, Integral, "a whole number")
    expect("dtype", dtype, torch.dtype, "a dtype such as torch.bfloat16")
    expect("is_cross_attention", is_cross_attention, bool, "True or False")
    needs, hint = attention_requirements, supported_attention_backends
    expect("attention_requirements", needs, AttentionRequirements | None, "AttentionRequirements")
    expect("supported_attention_backends", hint, Collection | None, "a collection of backends")
    packed = needs is not None and needs.packed_varlen
    role = AttentionRole.CROSS if is_cross_attention else AttentionRole.SELF
    request = AttentionRequest(
        environment=prefer_supported(current_environment(), hint),
        head_size=head_size,
        num_heads=1,
        num_kv_heads=1,
        dtype=dtype,
        role=role,
        needs=frozenset({Feature.VARLEN} if packed else ()),
    )
    if selected_attention_backend is not None:
        asked = BackendPreference(
            source=Source.ARGUMENT, backend=as_backend(selected_attention_backend)
        )
    else:
        construction = current_component()
        asked = decide(
            LayerSite(role=role, component=construction.name if construction else None),
            current_scope(),
            forced=forced_backend(),
            construction=claim_component_override(role),
            layer_default=None
            if default_attention_backend is None
            else as_backend(default_attention_backend),
        )[-1][1]
    strict = current_scope().strict
    selection = after_self_checks(lambda known: resolve(known, asked, strict=strict), request)
    warn_of_fallback(selection)
    return find_backend(selection.backend, request.environment.platform)


def prefer_supported(
    environment: Environment, supported: Collection[AttentionBackendEnum | str] | None
) -> Environment:
    """Return `environment` with the dense backends in `supported` before all others.

    Those the platform prefers come first, in its order; then the members it does not list.
    A layer's supported set is a hint for the automatic choice, not an allow-list: an explicit
    request outside it is honoured, and so is a call none of its members can serve.
    """
    members = [as_backend(backend) for backend in supported or ()]
    dense = sorted((backend for backend in members if not backend.is_sparse), key=str)
    preferred = [backend for backend in environment.priority if backend in dense]
    priority = dict.fromkeys((*preferred, *dense, *environment.priority))
    return replace(environment, priority=tuple(priority))
