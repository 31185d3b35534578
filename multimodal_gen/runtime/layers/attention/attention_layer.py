"""What every attention layer shares: selection at construction, one way through a call, the report.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from multimodal_gen.errors import ConfigError, MultimodalGenError, UsageError, short
from multimodal_gen.kernels.launch.launcher import load_triton_early
from multimodal_gen.runtime.layers.attention.arguments import (
    check_alike,
    refuse_shapes,
)
from multimodal_gen.runtime.layers.attention.auto_table import committed_table
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.block_masks import apart
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    environment_for,
)
from multimodal_gen.runtime.layers.attention.binding import (
    Binding,
    Demand,
    ScheduleEntry,
    bind_schedule,
    entry_at,
    plannable_dtype,
)
from multimodal_gen.runtime.layers.attention.call import (
    AttentionCall,
    Guard,
    LayerGeometry,
    current_watch,
    device_type,
)
from multimodal_gen.runtime.layers.attention.custom_ops import (
    LAYERS,
    NUMBERS,
    attention_op,
    recorded_attention_op,
)
from multimodal_gen.runtime.layers.attention.kinds.front import as_text_in_front
from multimodal_gen.runtime.layers.attention.kinds.gate import attend_gated
from multimodal_gen.runtime.layers.attention.kinds.masks import attend_masked
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
    LayerSite,
)
from multimodal_gen.runtime.layers.attention.scope import (
    FORCED,
    PreferenceSchedule,
    SelectionScope,
    as_backend,
    claim_component_override,
    current_component,
    current_scope,
    decide,
    forced_backend,
    layer_of,
    with_dense_parts,
)
from multimodal_gen.runtime.layers.attention.selector import prefer_supported
from multimodal_gen.runtime.managers.forward_context import (
    ForwardContext,
    current_forward_context,
    use_forward_context,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform
from multimodal_gen.settings import expect

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask
    from multimodal_gen.runtime.layers.attention.causal_cache import LayerCache

_STRIDED = torch.strided

_MOST_CHANNELS = 1 << 20  # beyond all use, and within all integers of kernels
_MOST_SCALE = sys.float_info.max


class AttentionLayer(nn.Module):
    """An attention layer without projections; subclasses give it a `forward`.

    The backend is selected at construction, for `compute_dtype` on this process's device, so an
    impossible request fails there. Without `compute_dtype` construction refuses only what no dtype
    makes possible: a model may be cast before it runs. A call with another dtype or device, or
    after a backend was forced, selects once more, once.

    Args:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        default_attention_backend: the layer's preference, weaker than a user's request.
        is_cross_attention: keys come from another sequence.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        prefix: dotted path of the layer; its first number is what `layers:` rules go by.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
        prepare: changes every call of the layer before it is looked at; runs outside of compiled
            graphs, so what it reads is never frozen into one.

    Attributes:
        guard: serves the calls of the layer in its place; None for no guard, as in copies.

    Raises:
        UsageError: a size is not positive, or heads are not a multiple of key heads.
        UnsupportedBackendError: the requested backend cannot serve the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        default_attention_backend: AttentionBackendEnum | str | None = None,
        is_cross_attention: bool = False,
        compute_dtype: torch.dtype | None = None,
        *,
        prefix: str = "",
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
        prepare: Callable[["AttentionLayer", AttentionCall], AttentionCall] | None = None,
    ) -> None:
        super().__init__()
        if current_platform().device_type == "cuda":
            load_triton_early()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_places(site, scope, supported_attention_backends, prefix)
        expect("prepare", prepare, Callable | None, "a function of a layer and a call, or None")
        _check_sizes(num_heads, head_size, num_kv_heads)
        _check_numbers(softmax_scale, compute_dtype)
        check_flags(causal=causal, is_cross_attention=is_cross_attention)
        construction = current_component()
        if site is not None and is_cross_attention and site.role is AttentionRole.SELF:
            site = replace(site, role=AttentionRole.CROSS)
        self.site = site or LayerSite(
            name=prefix,
            component=construction.name if construction else None,
            role=AttentionRole.CROSS if is_cross_attention else AttentionRole.SELF,
            layer=layer_of(prefix),
        )
        self.prepare = prepare
        self.guard: Guard | None = None
        self.projection: nn.Linear | None = None
        self._scope = scope or current_scope()
        self.geometry = LayerGeometry(
            num_heads=num_heads,
            head_size=head_size,
            num_kv_heads=num_kv_heads,
            softmax_scale=head_size**-0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            site=self.site,
            warnings=self._scope.warnings,
        )
        self._construction_override = claim_component_override(self.site.role)
        self._supported = frozenset(as_backend(name) for name in supported_attention_backends or ())
        self._layer_default = (
            None if default_attention_backend is None else as_backend(default_attention_backend)
        )
        # By forced backend, dtype and device type.
        self._schedules: dict[tuple[Any, ...], tuple[ScheduleEntry, ...]] = {}
        self._layer_id = self._registered()
        # The step of the last call, and what served it.
        self._served: tuple[tuple[object, ...], ScheduleEntry] | None = None
        # Dtype and device type of the last call.
        self._last = (compute_dtype or torch.get_default_dtype(), current_platform().device_type)
        if compute_dtype is not None:
            self.schedule()
        else:
            planned = plannable_dtype(*self._ask((forced_backend(), *self._last)))
            self._last = (planned, self._last[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, k and v in the last call; before the first one, the planned dtype."""
        return self._last[0]

    @property
    def backend(self) -> AttentionBackendEnum:
        """The backend that serves `dtype` now, at the last entry of the layer's schedule."""
        return self.schedule()[-1].primary.selection.backend

    @property
    def attn_impl(self) -> AttentionImpl:
        """The implementation behind `backend`."""
        return self.schedule()[-1].primary.impl

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.geometry.head_size

    @property
    def takes_gate(self) -> bool:
        """Whether a step of the schedule that serves `dtype` now has a coarse branch to weigh."""
        return self.gated() is not None

    @property
    def takes_projection(self) -> bool:
        """Whether a step of that schedule has a branch that a trained projection weighs."""
        return any("projection" in entry.primary.impl.takes for entry in self.schedule())

    def require_backward(self) -> None:
        """Raise unless gradients can flow through every step of the schedule.

        Raises:
            UnsupportedBackendError: a backend that was asked for has no backward pass; says what to
                do.
            UsageError: a parameter of a sparse method is for calls without gradients.
        """
        for entry in self.schedule():
            entry.primary.with_features(Feature.BACKWARD)
            if entry.primary.method is not None:
                entry.primary.method.require_backward()

    def set_projection(self, linear: nn.Linear | None) -> None:
        """Give the layer its trained projection, which methods without one leave alone.

        `apply` does it for stock models; a model of one's own does it for layers it has built.

        Args:
            linear: maps the channels of a head to themselves, the same for all heads; None for
                zero. It does not become part of the layer's parameters.

        Raises:
            UsageError: it has another size.
        """
        _check_projection(linear, self.head_size)
        object.__setattr__(self, "projection", linear)  # which modules do not take for their own

    def trained(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weight and bias of the layer's trained projection, or None."""
        linear = self.projection
        return (None, None) if linear is None else (linear.weight, linear.bias)

    def report(self) -> LayerReport:
        """Return what the layer ran so far, and why; before the first call, what it would run."""
        ran = [schedule for schedule in self._schedules.values() if _calls(schedule)]
        parts = [entry.entries() for schedule in ran or [self.schedule()] for entry in schedule]
        return LayerReport(
            component=self.site.component,
            name=self.site.name,
            role=self.site.role,
            layer=self.site.layer,
            entries=tuple(entry for entries, _ in parts for entry in entries),
            detours=tuple(detour for _, detours in parts for detour in detours),
        )

    def bindings(self) -> Iterator[Binding]:
        """Yield all that served calls, or may."""
        for schedule in self._schedules.values():
            for entry in schedule:
                yield from entry.primary.family()

    def step_kind(self, context: ForwardContext) -> Hashable:
        """Return what serves a step, which is checked as its calls check it."""
        schedule = self.schedule()
        entry = schedule[0] if len(schedule) == 1 else entry_at(schedule, context)
        if len(schedule) == 1 and not context.current_timestep:
            entry.check_run(context)
        method = entry.primary.method
        return schedule.index(entry), None if method is None else method.step_kind(context)

    def uncapturable(self) -> str | None:
        """Return why a CUDA graph of a call would not do for others of its kind, or None."""
        methods = (entry.primary.method for entry in self.schedule())
        reasons = (method.uncapturable() for method in methods if method is not None)
        return next(filter(None, reasons), None)

    def end_request(self, request_id: str) -> None:
        """Drop what is kept for a request, as its caller may say that it ended."""
        for schedule in self._schedules.values():
            for entry in schedule:
                entry.end_request(request_id)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return attention of a call, as one opaque operator while `torch.compile` traces.

        Args:
            call: the tensors and what belongs to them.

        Returns:
            [B, Sq, H, Dv], under autocast in its dtype. Queries that see no key, and masked
            queries under a 2-D mask, are zero. What masked positions of a 2-D mask hold, even NaN,
            has no influence.

        Raises:
            UsageError: shapes do not fit, or a schedule by step runs outside a denoiser call.
            UnsupportedBackendError: no backend can honour the call.
        """
        if torch.compiler.is_compiling():
            return self._trace(call)
        if self.prepare is not None:
            call = self.prepare(self, call)
        if self.projection is not None:
            call = call._replace(projection=self.projection)
        context = current_forward_context()
        try:
            if not self._fits(call):
                refuse_shapes(call, self.geometry)
            q, k, v, mask, gate = call[:5]
            alike = q.dtype is k.dtype is v.dtype and q.device == k.device == v.device
            if not (alike and mask is None and gate is None):
                check_alike(call)
            # `call.is_extended()`, spelled out, because it is part of every call.
            if (
                call.cache is not None
                or call.block_mask is not None
                or call.sink_logits is not None
                or (context is not None and context.kv_cache is not None)
            ):
                # Where it is met, here and below: most processes never need it.
                from multimodal_gen.runtime.layers.attention.kinds.cache import check_extended

                call = check_extended(call, self.geometry, context)
        except UsageError as error:
            raise self._refused(error, exchange=call.exchange) from None
        front, _, keys_in_front = call.replicated
        serve = self._attend_with_front if front or keys_in_front else self._attend
        if self.guard is not None:
            serve = partial(self.guard, self, serve)
        watch = current_watch()
        out = serve(call) if watch is None else watch(self, call, serve)
        return F.pad(out, (0, 0, 0, 0, 0, call.zero_rows)) if call.zero_rows else out

    def _fits(self, call: AttentionCall) -> bool:
        """Whether q, k and v have the shapes of the layer, or, where they may, of some heads."""
        # Spelled out, because it is part of every call.
        q, k, v = call[:3]
        if not (
            isinstance(q, torch.Tensor)
            and isinstance(k, torch.Tensor)
            and isinstance(v, torch.Tensor)
            and q.layout is k.layout is v.layout is _STRIDED
        ):
            return False
        try:
            query, key, value = q.shape, k.shape, v.shape
        except RuntimeError:  # of nested tensors alone
            return False
        geometry = self.geometry
        return (
            len(query) == len(key) == len(value) == 4
            and query[3] == key[3] == geometry.head_size
            and query[0] == key[0] == value[0]
            and query[2] * geometry.num_kv_heads == key[2] * geometry.num_heads
            and (query[2] == geometry.num_heads or (call.some_heads and query[2] > 0))
            and key[2] == value[2]
            and key[1] == value[1]
        )

    def _attend_with_front(self, call: AttentionCall) -> torch.Tensor:
        """Attend with tokens in front that all ranks hold, of which sparse methods have to know."""
        context = current_forward_context()
        if context is None or not any(entry.primary.is_sparse for entry in self.schedule()):
            return self._attend(call)
        try:
            call, context, added = as_text_in_front(call, context)
        except UsageError as error:
            raise self._refused(error, exchange=call.exchange) from None
        with use_forward_context(context):
            return self._attend(call)[:, added:]

    def like(self, scope: SelectionScope) -> "AttentionLayer":
        """Return a layer at the same place of the model, under another scope.

        It takes calls as they are, prepared ones too, and has the same trained projection.

        Args:
            scope: what is asked for.

        Raises:
            UnsupportedBackendError: the backend asked for cannot serve the layer.
        """
        geometry = self.geometry
        layer = AttentionLayer(
            geometry.num_heads,
            geometry.head_size,
            geometry.num_kv_heads,
            geometry.softmax_scale,
            geometry.causal,
            compute_dtype=self.dtype,
            site=self.site,
            scope=scope,
        )
        layer.set_projection(self.projection)
        return layer

    def _refused(self, error: MultimodalGenError, *, exchange: bool) -> MultimodalGenError:
        """Return why a call cannot be made; layers that exchange tokens tell other ranks first.

        Args:
            error: what is wrong with it.
            exchange: whether it may exchange tokens.
        """
        return error

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Serve a call on this process; the heads may be a share of the layer's."""
        query, key, value = call[:3]
        kind = device_type(query.device)
        if kind == "cuda" and query.get_device() != torch.cuda.current_device():
            with torch.cuda.device(query.device):  # where kernels of packages are launched
                return self._attend(call)
        if kind != "meta" and torch.is_autocast_enabled(kind):
            call = call.autocast()
            with torch.autocast(kind, enabled=False):  # methods choose their precision
                return self._attend(call)
        entry = self.entry_for(query)
        bound, context = entry.primary, current_forward_context()
        if call.exact or (call.no_grid and bound.is_sparse):
            bound, call = in_place_of(bound, call)
        if call.cache is not None or call.block_mask is not None or call.sink_logits is not None:
            from multimodal_gen.runtime.layers.attention.kinds.cache import attend_extended

            return attend_extended(bound, call)
        if bound.method is not None or bound.by_shape is not None:
            bound = binding_at(bound, call, context)
        if call.gate is not None:
            return attend_gated(bound, self.gated(), call)
        for observer in () if call.no_grid else entry.observers:
            observer.observe(query, key, context, call.mask)
        if call.mask is not None:
            return attend_masked(bound, call)
        if torch.is_grad_enabled() and call.wants_gradient():
            bound = bound.with_features(Feature.BACKWARD)
        # `Binding.attend`, spelled out, because it is part of every call.
        fields = bound.fields(call) if call.first_head or call.projection is not None else {}
        out = bound.impl.forward(query, key, value, context, **fields)
        bound.calls += 1
        return out

    def schedule(self) -> tuple[ScheduleEntry, ...]:
        """Return the schedule for tensors like those of the last call."""
        key = (forced_backend(), *self._last)
        return self._schedules.get(key) or self._bind(key)

    def entry_for(self, query: torch.Tensor) -> ScheduleEntry:
        """Return what serves a call with `query` at the running step."""
        # What `forced_backend` returns, spelled out, because it is part of every call.
        forced = FORCED.in_context.get()
        in_force = FORCED.in_process if forced is None else forced[0]
        last = (query.dtype, device_type(query.device))
        key = (in_force, *last)
        schedule = self._schedules.get(key) or self._bind(key)
        if last != self._last:
            self._last = last
        if len(schedule) == 1 and schedule[0].primary.method is None:
            return schedule[0]
        context = current_forward_context()
        if len(schedule) == 1:
            if context is not None and not context.current_timestep:
                schedule[0].check_run(context)
            return schedule[0]
        if context is None:
            return entry_at(schedule, None)
        run = (context.request_id, context.latent_grid, context.num_steps, context.sigmas)
        step = (key, run, context.current_timestep)
        served = self._served
        if served is None or served[0] != step:  # the layer's first call of a step
            served = self._served = (step, entry_at(schedule, context))
        return served[1]

    def gated(self) -> Binding | None:
        """Return what has a coarse branch, of the first steps of the schedule that do, or None."""
        bound = (entry.primary for entry in self.schedule())
        return next((each for each in bound if "gate" in each.impl.takes), None)

    def _trace(self, call: AttentionCall) -> torch.Tensor:
        # Here too: the traced operator's output has the dtype of the query it is given.
        call = call.autocast()
        if call.is_extended():
            # Here, because it imports `torch._dynamo`, which is there while a graph is traced.
            from multimodal_gen.runtime.layers.attention.outside_graphs import attend_outside_graphs

            return attend_outside_graphs(self, call)
        rest = (call.replicated, call.seq_lens, call.exchange, call.some_heads)
        given = (call.query, call.key, call.value, call.mask, call.gate, *self.trained())
        wanted = [x is not None and x.requires_grad for x in given]
        if torch.is_grad_enabled() and any(wanted):
            return recorded_attention_op(*given, self._layer_id, wanted, *rest)[0]
        return attention_op(*given[:5], self._layer_id, *rest)

    def _registered(self) -> torch.Tensor:
        """Let the operators find the layer; return its number, on the CPU wherever it lives."""
        number = next(NUMBERS)
        LAYERS[number] = self
        return torch.tensor(number, dtype=torch.int64, device="cpu")

    def _bind(self, key: tuple[Any, ...]) -> tuple[ScheduleEntry, ...]:
        self._schedules[key] = bind_schedule(*self._ask(key))
        return self._schedules[key]

    def _ask(self, key: tuple[Any, ...]) -> tuple[PreferenceSchedule, Demand]:
        forced, dtype, device_type = key
        environment = environment_for(torch.device(device_type), current_environment())
        geometry = self.geometry
        request = AttentionRequest(
            environment=prefer_supported(environment, self._supported),
            head_size=geometry.head_size,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            dtype=dtype,
            role=self.site.role,
            needs=frozenset({Feature.CAUSAL} if geometry.causal else ()),
        )
        schedule = decide(
            self.site,
            self._scope,
            forced=forced,
            construction=self._construction_override,
            layer_default=self._layer_default,
        )
        parts = with_dense_parts(schedule, self.site, environment.platform, geometry.warnings)
        table, strict = self._scope.auto_table or committed_table(environment), self._scope.strict
        # A layer's own preferences go before what was measured, here or on another device.
        if self._supported or (table and table.platform != str(environment.platform)):
            table = None
        return parts, Demand(request=request, geometry=geometry, strict=strict, table=table)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a layer of its own: it binds and counts anew, under its own number.
        state = {**self.__dict__, "_schedules": {}, "_served": None, "_layer_id": None}
        return {**state, "guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._last = (self.dtype, current_platform().device_type)
        self._layer_id = self._registered()


def in_place_of(bound: Binding, call: AttentionCall) -> tuple[Binding, AttentionCall]:
    """Return what serves a call that is to be exact, or lacks a grid, and the call as it gets it.

    Without a grid there is no coarse branch that a gate could weigh.
    """
    if call.no_grid and bound.is_sparse:
        return bound.without_grid(call.no_grid), call._replace(gate=None)
    return bound.exact(call.exact), call


def binding_at(bound: Binding, call: AttentionCall, context: ForwardContext | None) -> Binding:
    """Return what serves a call: a binding, or an alternate that is faster for calls like it.

    A sparse method hands over calls of which it would keep so much that dense attention is faster,
    unless they need gradients, and those that its parameters leave dense. An automatic choice goes
    by the call's shape, if it was measured. Nothing is waited for.
    """
    method = bound.method
    # A branch that a trained projection weighs is a part of the result.
    if method is not None and (call.projection is None or "projection" not in method.takes):
        reason = method.dense_reason(call.query, call.key, call.value, context, call.first_head)
        if reason is not None:
            bound = bound.dense(reason)
    return bound if bound.by_shape is None else bound.by_shape.at(call)


def _calls(schedule: tuple[ScheduleEntry, ...]) -> int:
    parts = (part for entry in schedule for found in entry.entries() for part in found)
    return sum(part.calls for part in parts)


class LocalAttention(AttentionLayer):
    """Attention over tokens that live on one device.

    Args:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads; default `num_heads`.
        softmax_scale: factor on q k^T; default `head_size ** -0.5`.
        causal: mask out keys after the query, aligned to the last query and key.
        supported_attention_backends: hint: automatic choice prefers this set.
        default_attention_backend: the layer's preference, weaker than a user's request.
        is_cross_attention: keys come from another sequence.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        prefix: dotted path of the layer; its first number is what `layers:` rules go by.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.
        prepare: see `AttentionLayer`.

    Raises:
        UsageError: a size is not positive, or heads are not a multiple of key heads.
        UnsupportedBackendError: the requested backend cannot serve the layer.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: "torch.Tensor | AnyBlockMask | None" = None,
        *,
        cache: "LayerCache | None" = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of `q` over `k` and `v`.

        Args:
            q: [B, Sq, H, D].
            k: [B, Sk, Hkv, D].
            v: [B, Sk, Hkv, Dv].
            attn_mask: [B, Sk] key padding (masked queries come back as zeros in self-attention),
                [B, Sq, Sk], or 4-D broadcastable to [B, H, Sq, Sk]; bool and integer masks keep
                where non-zero, floating ones are added to the scores. Or FlexAttention's
                `BlockMask`, or a `BlockPlan`.
            cache: the layer's part of a `CausalCache`, whose running chunk `k` and `v` are; it is
                written, and `q` sees what the cache shows of the past too.
            sink_logits: [H] logit per head of a key that every query sees and that has no value.

        Returns:
            [B, Sq, H, Dv].
        """
        blocks = None
        if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
            attn_mask, blocks = apart(attn_mask)
        call = AttentionCall(q, k, v, attn_mask)
        if cache is not None or blocks is not None or sink_logits is not None:
            call = call._replace(cache=cache, block_mask=blocks, sink_logits=sink_logits)
        return self.attend(call)


def check_flags(**flags: object) -> None:
    """Refuse what is neither true nor false: a text such as "no" would count as true."""
    for name, flag in flags.items():
        expect(name, flag, bool, "True or False")


def _check_sizes(num_heads: int, head_size: int, num_kv_heads: int) -> None:
    """Refuse sizes no attention has."""
    sizes = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise ConfigError(f"{name} must be a whole number, got {short(size)}")
        if not 1 <= size <= _MOST_CHANNELS:
            bound = "at least 1" if size < 1 else f"at most {_MOST_CHANNELS}"
            raise ConfigError(f"{name} must be {bound}, got {short(size)}")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )


_SITE: tuple[tuple[str, Any, str], ...] = (
    ("name", str, "a dotted path such as 'blocks.3.attn'"),
    ("component", str | None, "a name or None"),
    ("role", AttentionRole, "an AttentionRole such as AttentionRole.CROSS"),
    ("layer", Integral | None, "an index or None"),
    ("num_layers", Integral | None, "a number or None"),
)


def _check_places(site: object, scope: object, supported: object, prefix: object) -> None:
    """Refuse what does not say where a layer sits, what was configured, or what it prefers."""
    expect("prefix", prefix, str, "a dotted path such as 'blocks.3.attn'")
    expect("site", site, LayerSite | None, "a LayerSite or None")
    for name, kind, words in _SITE if isinstance(site, LayerSite) else ():
        expect(f"{name} of a LayerSite", getattr(site, name), kind, words)
    remedy = "a backend is named by default_attention_backend"
    expect("scope", scope, SelectionScope | None, "a SelectionScope or None", remedy)
    if supported is not None and (
        isinstance(supported, (str, torch.Tensor)) or not isinstance(supported, Collection)
    ):
        raise ConfigError(
            f"supported_attention_backends must be a collection of backends or None, got "
            f"{short(supported)}"
        )


def _check_numbers(softmax_scale: float | None, compute_dtype: torch.dtype | None) -> None:
    """Refuse a scale that makes every output NaN, and what is no dtype."""
    if softmax_scale is not None and (
        isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real)
    ):
        raise ConfigError(f"softmax_scale must be a number, got {short(softmax_scale)}")
    # A whole number may be finite and yet too large for a float.
    if softmax_scale is not None and not abs(softmax_scale) <= _MOST_SCALE:
        raise ConfigError(f"softmax_scale must be finite, got {short(softmax_scale)}")
    expect("compute_dtype", compute_dtype, torch.dtype | None, "a dtype such as torch.bfloat16")


def _check_projection(linear: object, head_size: int) -> None:
    """Refuse what does not map the channels of a head to themselves."""
    weight = getattr(linear, "weight", None)
    shape = list(weight.shape) if isinstance(weight, torch.Tensor) else None
    if linear is not None and shape != [head_size, head_size]:
        got = f"a weight of {shape}" if shape else f"a {type(linear).__name__}"
        raise UsageError(
            f"`linear` must map {head_size} channels to {head_size}, those of a head, got {got}"
        )
