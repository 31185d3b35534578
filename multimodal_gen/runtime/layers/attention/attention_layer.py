"""What every attention layer shares: selection at construction, one way through a call, the report.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionImpl
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    environment_for,
)
from multimodal_gen.runtime.layers.attention.call import (
    are_tensors,
    autocast,
    autocasts,
    check_numbers,
    check_sizes,
    fits,
    misfit,
    no_tensor,
    wants_gradient,
)
from multimodal_gen.runtime.layers.attention.custom_ops import (
    attention_op,
    outside_graphs,
    register_layer,
)
from multimodal_gen.runtime.layers.attention.gating import attend_gated, gated_route
from multimodal_gen.runtime.layers.attention.masks import (
    DenseMask,
    KeyMask,
    VarlenMaskMeta,
    build_varlen_mask_meta,
    normalise_mask,
    with_causal,
    zero_masked_rows,
)
from multimodal_gen.runtime.layers.attention.report import LayerReport
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Feature,
)
from multimodal_gen.runtime.layers.attention.schedule import (
    Bound,
    LayerGeometry,
    Route,
    bind,
    plannable_dtype,
    route_at,
    with_dense_parts,
)
from multimodal_gen.runtime.layers.attention.scope import (
    AskedSchedule,
    LayerSite,
    SelectionScope,
    as_backend,
    claim_component_override,
    current_component,
    current_scope,
    decide,
    forced_backend,
    layer_of,
)
from multimodal_gen.runtime.layers.attention.selector import prefer_supported
from multimodal_gen.runtime.managers.forward_context import current_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform


def attend_packed(
    bound: Bound,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    mask: KeyMask,
    meta: VarlenMaskMeta | None,
) -> torch.Tensor:
    """Return attention of padded [B, S, H, D] inputs on a kernel for packed sequences."""
    meta = meta or _shared_meta(attn_mask, mask)
    batch, num_queries = query.shape[:2]
    if mask.covers_queries:
        packed_query, cu_seqlens_q = meta.pack(query), meta.cu_seqlens
    else:
        packed_query = query.flatten(0, 1)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        cu_seqlens_q = starts * num_queries
    bound.calls += 1
    out = bound.impl.forward_varlen(
        packed_query,
        meta.pack(key),
        meta.pack(value),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=meta.cu_seqlens,
        max_seqlen_q=num_queries,
        max_seqlen_k=meta.max_seqlen,
    )
    if mask.covers_queries:
        return meta.unpack(out)
    return out.reshape(batch, num_queries, *out.shape[1:])


def _shared_meta(attn_mask: torch.Tensor, mask: KeyMask) -> VarlenMaskMeta:
    """Return the packing, built once per denoiser call for all layers that share a mask."""
    context = current_forward_context()
    if context is None:
        return build_varlen_mask_meta(mask.keep)
    # One mask may be broadcast over calls of different batch sizes.
    use = ("packing", mask.keep.shape[0])
    return context.cache.get(attn_mask, use, lambda: build_varlen_mask_meta(mask.keep))


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
        role: what the layer attends to.
        compute_dtype: dtype of q, k and v; default: whichever the first call has.
        prefix: dotted path of the layer; its first number is what `layers:` rules go by.
        site: where the layer sits; default: the component under construction.
        scope: what the user configured; default: the scope in use.

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
        *,
        supported_attention_backends: Collection[AttentionBackendEnum | str] | None = None,
        default_attention_backend: AttentionBackendEnum | str | None = None,
        role: AttentionRole = AttentionRole.SELF,
        compute_dtype: torch.dtype | None = None,
        prefix: str = "",
        site: LayerSite | None = None,
        scope: SelectionScope | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(num_heads, head_size, num_kv_heads)
        check_numbers(softmax_scale, compute_dtype)
        construction = current_component()
        component = construction.name if construction else None
        self.site = site or LayerSite(
            name=prefix, component=component, role=role, layer=layer_of(prefix)
        )
        self._scope = scope or current_scope()
        self.geometry = LayerGeometry(
            num_heads=num_heads,
            head_size=head_size,
            num_kv_heads=num_kv_heads,
            softmax_scale=head_size**-0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            site=self.site,
            notices=self._scope.notices,
        )
        self._construction_override = claim_component_override(self.site.role)
        self._supported = frozenset(as_backend(name) for name in supported_attention_backends or ())
        self._layer_default = (
            None if default_attention_backend is None else as_backend(default_attention_backend)
        )
        self._routes: dict[tuple[Any, ...], tuple[Route, ...]] = {}
        self._layer_id = register_layer(self)
        # Dtype and device type of the last call; a list, which a call can change cheaply.
        self._last = [(compute_dtype or torch.get_default_dtype(), current_platform().device_type)]
        if compute_dtype is not None:
            self.planned_routes()
        else:
            self._last = [(self._plan_dtype(), self._last[0][1])]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, k and v in the last call; before the first one, the planned dtype."""
        return self._last[0][0]

    @property
    def backend(self) -> AttentionBackendEnum:
        """The backend that serves `dtype` now, at the last entry of the layer's schedule."""
        return self.planned_routes()[-1].primary.selection.backend

    @property
    def attn_impl(self) -> AttentionImpl:
        """The implementation behind `backend`."""
        return self.planned_routes()[-1].primary.impl

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.geometry.head_size

    def report(self) -> LayerReport:
        """Return what the layer ran so far, and why; before the first call, what it would run."""
        ran = [routes for routes in self._routes.values() if _calls(routes)]
        parts = [route.entries() for routes in ran or [self.planned_routes()] for route in routes]
        return LayerReport(
            component=self.site.component,
            name=self.site.name,
            role=self.site.role,
            layer=self.site.layer,
            entries=tuple(primary for primary, _ in parts),
            detours=tuple(detour for _, detours in parts for detour in detours),
        )

    def end_request(self, request_id: str) -> None:
        """Drop what is kept for a request, as its caller may say that it ended."""
        for routes in self._routes.values():
            for route in routes:
                route.end_request(request_id)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, as one opaque operator while `torch.compile` traces; see `attend_now`."""
        if not torch.compiler.is_compiling():
            return self.attend_now(query, key, value, attn_mask, gate)
        # Here too: the traced operator's output has the dtype of the query it is given.
        if autocasts(query.device.type):
            query, key, value = autocast(query, key, value)
        if wants_gradient(query, key, value, attn_mask if gate is None else gate):
            return _attend_outside_the_graph(self, query, key, value, attn_mask, gate)
        return attention_op(query, key, value, attn_mask, self._layer_id, gate)

    def attend_now(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, with `gate` [B, Sq, H, D] as weight of a coarse branch where it is given."""
        if gate is None:
            return self.attend(query, key, value, attn_mask)
        if not fits(query.shape, key.shape, value.shape, self.geometry):
            raise misfit(query, key, value, self.geometry)
        return self.attend_fitting(query, key, value, attn_mask, gate=gate)

    @property
    def takes_gate(self) -> bool:
        """Whether the schedule that serves `dtype` now has a coarse branch to weigh."""
        return gated_route(self.planned_routes()) is not None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        mask_meta: VarlenMaskMeta | None = None,
    ) -> torch.Tensor:
        """Return attention of `query` over `key` and `value` on the selected backend.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            attn_mask: see `normalise_mask`.
            mask_meta: packing of a 2-D `attn_mask`, when the caller has it already.

        Returns:
            [B, Sq, H, Dv], under autocast in its dtype. Queries that see no key, and masked
            queries under a 2-D mask, are zero.
            What masked positions of a 2-D mask hold, even NaN, has no influence.

        Raises:
            UsageError: shapes do not fit, or a schedule by step runs outside a denoiser call.
            UnsupportedBackendError: no backend can honour the call.
        """
        if not are_tensors(query, key, value, attn_mask):
            raise no_tensor(query=query, key=key, value=value, attn_mask=attn_mask)
        if not fits(query.shape, key.shape, value.shape, self.geometry):
            raise misfit(query, key, value, self.geometry)
        return self.attend_fitting(query, key, value, attn_mask, mask_meta)

    def attend_fitting(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        mask_meta: VarlenMaskMeta | None = None,
        *,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to inputs known to fit each other, though maybe not the layer: a rank's heads."""
        if autocasts(query.device.type):
            query, key, value = autocast(query, key, value)
            with torch.autocast(query.device.type, enabled=False):  # methods choose their precision
                return self.attend_fitting(query, key, value, attn_mask, mask_meta, gate=gate)
        if gate is not None:
            routes = self.route(query), gated_route(self.planned_routes())
            return attend_gated(*routes, query, key, value, gate, attn_mask)
        route = self.route(query)
        route.observe(query, key, attn_mask)
        if attn_mask is not None:
            return self._attend_masked(route, query, key, value, attn_mask, mask_meta)
        bound = route.primary
        if wants_gradient(query, key, value):
            bound = route.honouring(Feature.BACKWARD)
        bound.calls += 1
        return bound.impl.forward(query, key, value, current_forward_context())

    def hold_heads_from(self, first: int) -> None:
        """Tell implementations which head of the layer is the first that calls bring."""
        for route in self.planned_routes():
            route.primary.impl.first_head = first

    def planned_routes(self) -> tuple[Route, ...]:
        """Return the schedule for tensors like those of the last call."""
        key = (forced_backend(), *self._last[0])
        return self._routes.get(key) or self._bind(key)

    def route(self, query: torch.Tensor) -> Route:
        """Return what serves a call with `query` at the running step."""
        last = self._last[0] = (query.dtype, query.device.type)
        key = (forced_backend(), *last)
        routes = self._routes.get(key) or self._bind(key)
        if len(routes) == 1:
            return routes[0]
        return route_at(routes, current_forward_context())

    def _plan_dtype(self) -> torch.dtype:
        key = (forced_backend(), *self._last[0])
        return plannable_dtype(*self._ask(key), strict=self._scope.strict)

    def _bind(self, key: tuple[Any, ...]) -> tuple[Route, ...]:
        schedule, request = self._ask(key)
        self._routes[key] = bind(schedule, request, self.geometry, strict=self._scope.strict)
        return self._routes[key]

    def _ask(self, key: tuple[Any, ...]) -> tuple[AskedSchedule, AttentionRequest]:
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
        parts = with_dense_parts(schedule, self.site, environment.platform, geometry.notices)
        return parts, request

    def _attend_masked(
        self,
        route: Route,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor,
        mask_meta: VarlenMaskMeta | None,
    ) -> torch.Tensor:
        gradient = wants_gradient(query, key, value, attn_mask)
        training = (Feature.BACKWARD,) if gradient else ()
        self_attention = self.site.role is not AttentionRole.CROSS
        mask = normalise_mask(attn_mask, query, key, self_attention=self_attention)
        if isinstance(mask, DenseMask):
            needs = (Feature.DENSE_MASK, *training)
            return self._attend_dense(route, query, key, value, mask.mask, needs)
        packs = not self.geometry.causal or mask.covers_queries
        if packs and route.primary.features.issuperset((Feature.VARLEN, *training)):
            return attend_packed(route.primary, query, key, value, attn_mask, mask, mask_meta)
        # A mask alone does not keep NaN in padding out: a weight of zero times NaN is NaN.
        key, value = zero_masked_rows(key, mask.keep), zero_masked_rows(value, mask.keep)
        if gradient and mask.covers_queries:
            # The gradients of K and V sum over all queries: zero times NaN would reach every row.
            query = zero_masked_rows(query, mask.keep)
        needs = (Feature.KEY_MASK, *training)
        out = self._attend_dense(route, query, key, value, mask.broadcastable(), needs)
        return zero_masked_rows(out, mask.keep) if mask.covers_queries else out

    def _attend_dense(
        self,
        route: Route,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        needs: tuple[Feature, ...],
    ) -> torch.Tensor:
        causal = self.geometry.causal
        if causal:
            mask = with_causal(mask, query.shape[1])
            needs = (Feature.DENSE_MASK, *needs[1:])
        bound = route.honouring(*needs, causal_in_mask=causal)
        bound.calls += 1
        context = current_forward_context()
        return bound.impl.forward(query, key, value, context, attn_mask=mask)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a layer of its own: it binds and counts anew, under its own number.
        return {**self.__dict__, "_routes": {}, "_layer_id": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._last = [(self.dtype, current_platform().device_type)]
        self._layer_id = register_layer(self)


@outside_graphs
def _attend_outside_the_graph(layer: AttentionLayer, *inputs: Any) -> torch.Tensor:
    """Attend where gradients are needed: autograd cannot look into the opaque operator."""
    return layer.attend_now(*inputs)


def _calls(routes: tuple[Route, ...]) -> int:
    parts = [route.entries() for route in routes]
    return sum(primary.calls + sum(d.calls for d in detours) for primary, detours in parts)
