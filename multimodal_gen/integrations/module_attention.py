"""An attention module of a stock model, and the layers that do its attention.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.integrations.denoiser_context import (
    DenoiserContext,
    TokenShare,
    conditional_half,
    current_denoiser_context,
    current_padding,
)
from multimodal_gen.integrations.hooks import StandIn
from multimodal_gen.integrations.padding import KeyPadding
from multimodal_gen.runtime.described_tokens import DescribedTokens
from multimodal_gen.runtime.distributed.timing import sum_of
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.block_masks import AnyBlockMask, apart
from multimodal_gen.runtime.layers.attention.call import AttentionCall, Guard
from multimodal_gen.runtime.layers.attention.config import StepSet
from multimodal_gen.runtime.layers.attention.layer import USPAttention
from multimodal_gen.runtime.layers.attention.report import LayerReport, ReportEntry
from multimodal_gen.runtime.layers.attention.request import AttentionRole, LayerSite
from multimodal_gen.runtime.layers.attention.scope import SelectionScope


class AttentionParams(NamedTuple):
    """What a call must match to run on a layer built beforehand; a key `torch.compile` can trace.

    Attributes:
        num_heads: query heads.
        head_size: channels per head.
        num_kv_heads: key and value heads.
        scale: factor on q k^T; None for `head_size ** -0.5`.
        causal: bottom-right aligned causality.
        of_text: whether text alone attends, to text alone, in a module for more than that.
    """

    num_heads: int
    head_size: int
    num_kv_heads: int
    scale: float | None = None
    causal: bool = False
    of_text: bool = False


def prepare_call(
    layer: AttentionLayer, call: AttentionCall, *, masks_padding: bool
) -> AttentionCall:
    """Return a call of a stock model with what the denoiser call knows of its padding and ranks.

    Keys that are known to be padding are cut off. Tokens are exchanged where the denoiser call
    splits them over ranks; what all ranks have whole, such as text in cross-attention, is attended
    to on each. A gate without a coarse branch has no effect, as in the stock model.

    Args:
        layer: the layer that is called.
        call: as the model makes it.
        masks_padding: every mask of a call says which keys are padding and nothing else, so that
            what is known of the padding may stand in for it.

    Raises:
        UsageError: tokens are split, and the layer attends to others.
    """
    if call.gate is not None and not layer.takes_gate:
        call = call._replace(gate=None)
    context = current_denoiser_context()
    if context is not None:
        context.ran.add(layer.site.name)
        if context.cfg_branch == "both" and context.batch == 2 * call.query.shape[0]:
            context = conditional_half(context)
        call = _on_grid(call, context)
        if context.lists is not None and layer.site.role is AttentionRole.SELF:
            call = call._replace(block_mask=context.lists)
    split = None if context is None else context.split
    share = None if split is None else split.share
    if (
        share is None
        or (split is not None and layer.site.name.startswith(split.whole))
        or not _attends_to(share, layer, call)
    ):
        return _without_padding(layer, call._replace(exchange=False), masks_padding)
    keys = share.front + share.total + share.back
    padding = _padding(layer, call, keys, masks_padding)
    dropped = 0
    if padding is not None and padding.valid is not None:
        # All that is masked is the end of the text: without it there is nothing to mask.
        dropped = keys - padding.valid
        query, key, value = (x[:, : x.shape[1] - dropped] for x in call[:3])
        call = call._replace(query=query, key=key, value=value, mask=None, zero_rows=dropped)
    elif padding is not None and call.mask is not None:
        call = call._replace(whole_mask=_mask_of(padding, like=call.mask))
    front, back, keys_in_front = share.replicated
    text = (front, back - dropped, keys_in_front)
    return call._replace(replicated=text, seq_lens=share.lengths)


def _on_grid(call: AttentionCall, context: DenoiserContext) -> AttentionCall:
    """Return a call that says so if its tokens are not those of the denoiser call's latent grid."""
    grid, span = context.latent_grid, context.text_span
    if grid is None:
        return call._replace(no_grid=context.no_grid)
    if context.described is not None:
        return _as_described(call, context, context.described)
    if context.split is not None and context.split.share is not None:
        return call  # which has the tokens of this rank
    front = span.stop if span is not None and not span.start else 0
    least = grid[0] * grid[1] * grid[2] + front
    if front and call.query.shape[1] + front == call.key.shape[1] >= least:
        # The text in front has keys alone.
        return call._replace(replicated=(0, 0, front))
    if call.query.shape[1] == call.key.shape[1] == least - front:
        return call  # over the grid's tokens alone
    if min(call.query.shape[1], call.key.shape[1]) < least:
        # As those of an IP-adapter: a few keys of its own.
        return call._replace(no_grid="some calls attend to fewer tokens than it has")
    return call


def _as_described(
    call: AttentionCall, context: DenoiserContext, described: DescribedTokens
) -> AttentionCall:
    """Return a call that says so if its rows are not those that the user told of."""
    share = None if context.split is None else context.split.share
    rows = (call.query.shape[1], call.key.shape[1])
    if share is not None and rows == share.joint_lengths:
        rows = (share.front + share.total + share.back,) * 2
    if rows == (described.rows, described.rows):
        return call
    found = f"{rows[0]} tokens" if rows[0] == rows[1] else f"{rows[0]} queries, {rows[1]} keys"
    video, hint = described.video_rows, ""
    if rows == (video, video):
        hint = ", those of the grid alone: these calls see no text, leave text_rows out"
    elif described.text is None and rows[0] == rows[1] > video:
        more = rows[0] - video
        hint = f"; if {more} are text, give text_rows=0-{more} or {video}-{rows[0]}"
    return call._replace(
        no_grid=f"{described} makes {described.rows} tokens, some calls have {found}{hint}"
    )


def _attends_to(share: TokenShare, layer: AttentionLayer, call: AttentionCall) -> bool:
    """Whether a call attends to the tokens that ranks share."""
    if layer.site.role is not AttentionRole.SELF:
        return False
    rows = (call.query.shape[1], call.key.shape[1])
    if rows == share.joint_lengths:
        return True
    if share.exact or (share.keys_alone and rows[1] > share.front):
        raise UsageError(
            f"{layer.site.name} must attend to the {share.length} tokens of this rank, got "
            f"{rows[0]} queries and {rows[1]} keys; the plan of its model does not tell "
            f"what the others are, run it on one GPU"
        )
    return False


def _without_padding(
    layer: AttentionLayer, call: AttentionCall, masks_padding: bool
) -> AttentionCall:
    padding = _padding(layer, call, call.key.shape[1], masks_padding)
    if padding is None or call.mask is None:
        return call
    call = call._replace(mask=_mask_of(padding, like=call.mask), mask_meta=None)
    if padding.valid is not None and padding.valid < call.key.shape[1]:
        # Rows of padded queries get an output that nothing reads: their keys stay cut off.
        key, value = call.key[:, : padding.valid], call.value[:, : padding.valid]
        call = call._replace(key=key, value=value)
    return call


def _padding(
    layer: AttentionLayer, call: AttentionCall, num_keys: int, masks_padding: bool
) -> KeyPadding | None:
    """Return what is known of the padding of so many keys, if the mask tells nothing else."""
    mask, key = call.mask, call.key
    if mask is None or not masks_padding:
        return None
    if mask.dim() != 2 and (mask.dim() != 4 or mask.shape[2] != 1):
        return None  # neither the [B, Sk] of a `PairMask` nor one row for all queries
    return current_padding(layer.site.role, (key.shape[0], num_keys), key.device)


class ModuleAttention(StandIn):
    """The layers of one attention module: the one built for it, and one per unusual call.

    Stock processors hand this object to the attention call as their `_attention_backend`.

    Args:
        site: where the module sits.
        params: what its calls usually look like.
        compute_dtype: dtype of its q, k and v.
        scope: what the user configured.
        also: what other calls may look like, as far as that is known.
        masks_padding: see `prepare_call`.

    Attributes:
        usual: what its calls usually look like, with their scale.
        own_backend: the backend of diffusers that the module had, for calls that are left to it.

    Raises:
        UnsupportedBackendError: the requested backend cannot serve the module.
    """

    def __init__(
        self,
        site: LayerSite,
        params: AttentionParams,
        compute_dtype: torch.dtype,
        scope: SelectionScope,
        also: tuple[AttentionParams, ...] = (),
        *,
        masks_padding: bool = False,
    ) -> None:
        self.site = site
        self.usual = params._replace(scale=_scale(params.head_size, params.scale))
        self._compute_dtype = compute_dtype
        self._scope = scope
        self.masks_padding = masks_padding
        self.own_backend: object = None
        self._projection: nn.Linear | None = None
        self._place: tuple[nn.Module, str] | None = None
        self._guard: Guard | None = None
        self.layer = self._build(params)
        self.others: dict[AttentionParams, USPAttention] = {}
        for other in also:
            # Such a call may never come; one that does gets the error.
            with suppress(UnsupportedBackendError):
                scale = _scale(other.head_size, other.scale)
                self.others[other._replace(scale=scale)] = self._build(other)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: "torch.Tensor | AnyBlockMask | None" = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        gate: torch.Tensor | Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return attention of `query` over `key` and `value`.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            attn_mask: as `LocalAttention.forward` takes it; masks of blocks, too.
            causal: top-left aligned causality, as PyTorch's attention defines it.
            scale: factor on q k^T; None for `head_size ** -0.5`.
            gate: [B, Sq, H, D] weight of the coarse branch, or None; of a layer without one, what
                computes it.

        Returns:
            [B, Sq, H, Dv].
        """
        if self._place is not None:
            self._take_what_is_at(*self._place)
        attn_mask, blocks = apart(attn_mask)
        if causal and query.shape[1] != key.shape[1]:
            allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=key.device)
            attn_mask = _intersect(allowed.tril()[None, None], attn_mask)
            causal = False
        if _skips_scores(query, value):
            return _as_queries(value, query.shape[2])
        num_heads, head_size = query.shape[2:]
        scale, of_text = _scale(head_size, scale), self._is_of_text(query, key)
        asked = AttentionParams(num_heads, head_size, key.shape[2], scale, causal, of_text)
        layer = self.layer if asked == self.usual else self._other(asked)
        if gate is None or isinstance(gate, torch.Tensor):
            call = AttentionCall(query, key, value, attn_mask, gate)
            return layer.attend(call if blocks is None else call._replace(block_mask=blocks))
        return layer.attend(AttentionCall(query, key, value, attn_mask, spare_gate=gate))

    def steps(self) -> Iterator[StepSet]:
        """Yield the denoising steps that the schedule of usual calls tells apart."""
        yield from (entry.steps for entry in self.layer.schedule() if entry.steps is not None)

    @property
    def takes_gate(self) -> bool:
        """Whether a step of the schedule has a coarse branch that a gate weighs."""
        return self.layer.takes_gate

    @property
    def takes_projection(self) -> bool:
        """Whether a step of the schedule has a branch that a trained projection weighs."""
        return self.layer.takes_projection

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def warn(self, message: str) -> None:
        """Say something once per pipeline, in its report too."""
        self._scope.warnings.warn(message)

    def end_request(self, request_id: str) -> None:
        """Drop what is kept for a generation that is over."""
        for layer in self.built():
            layer.end_request(request_id)

    def guard_by(self, guard: Guard | None) -> None:
        """Let `guard` serve the calls of all layers of the module; None for no guard."""
        for layer in self.built():
            layer.guard = guard
        self._guard = guard

    def project(
        self, projection: nn.Linear | None, place: tuple[nn.Module, str] | None = None
    ) -> None:
        """Set the projection of that branch, [D, D]; None for zero.

        Args:
            projection: maps the channels of a head to themselves.
            place: module and name that it is a child under, where training may put another one.
        """
        for layer in self.built():
            if layer.head_size == self.usual.head_size:
                layer.set_projection(projection)
        self._projection, self._place = projection, place

    def _take_what_is_at(self, module: nn.Module, name: str) -> None:
        """Use the projection that stands there now: PEFT puts a copy of what it trains."""
        found = getattr(module, name, self._projection)
        if found is self._projection:
            return
        if torch.compiler.is_compiling():
            raise UsageError(
                f"{name} of {self.site.name} must be what it was before torch.compile, got another "
                f"module; run one step before compiling"
            )
        if not (isinstance(found, nn.Linear) or hasattr(found, "modules_to_save")):
            raise UsageError(
                f"{name} of {self.site.name} must be trained as a whole, got a "
                f"{type(found).__name__} of {type(found).__module__}; name it in `modules_to_save` "
                f"of a LoRA's configuration instead of `target_modules`"
            )
        self.project(found, (module, name))

    def built(self) -> tuple[AttentionLayer, ...]:
        """Return the layer of usual calls, and those of others."""
        return (self.layer, *self.others.values())

    def report(self) -> LayerReport:
        """Return what ran, over all layers of the module."""
        ran = [layer for layer in self.built() if layer.report().calls]
        reports = [layer.report() for layer in ran or [self.layer]]
        return replace(
            reports[0],
            entries=_merged(entry for report in reports for entry in report.entries),
            detours=_merged(detour for report in reports for detour in report.detours),
            times=sum_of(report.times for report in reports),
        )

    def _is_of_text(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether a call that a sparse layer gets is over the text in front of the video."""
        context = None if torch.compiler.is_compiling() else current_denoiser_context()
        span = None if context is None else context.text_span
        if span is None or span.start or self.site.role is not AttentionRole.SELF:
            return False
        if not query.shape[1] <= key.shape[1] <= span.length:
            return False
        return any(e.primary.selection.backend.is_sparse for e in self.layer.schedule())

    def _other(self, params: AttentionParams) -> USPAttention:
        if params not in self.others and torch.compiler.is_compiling():
            params = params._replace(of_text=True)  # which is not asked while a graph is traced
        if params not in self.others:
            if torch.compiler.is_compiling():
                raise UsageError(
                    f"the attention calls of {self.site.name} must look as they did before "
                    f"torch.compile, got {tuple(params)}; run one step before compiling"
                )
            self.others[params] = self._build(params)
        return self.others[params]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _build(self, params: AttentionParams) -> USPAttention:
        # What text is to text is the business of no sparse method.
        role = AttentionRole.ENCODER if params.of_text else self.site.role
        layer = USPAttention(
            params.num_heads,
            params.head_size,
            params.num_kv_heads,
            params.scale,
            params.causal,
            is_cross_attention=role is AttentionRole.CROSS,
            compute_dtype=self._compute_dtype,
            site=replace(self.site, role=role),
            scope=self._scope,
            prepare=partial(prepare_call, masks_padding=self.masks_padding),
        )
        if layer.head_size == self.usual.head_size:
            layer.set_projection(self._projection)
        layer.guard = self._guard
        return layer

    def in_copies(self) -> None:
        """Return nothing: a copy of a model is not attached to anything."""


def _skips_scores(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether diffusers' hook asks for the values in place of attention, where they fit.

    It does so by a function mode that looks for PyTorch's attention function, which kernels of this
    package do not call.
    """
    if torch.compiler.is_compiling():
        return False
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    named = any(type(mode).__name__ == "AttentionScoreSkipFunctionMode" for mode in modes)
    return named and query.shape[1] == value.shape[1]


def _as_queries(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return values with as many heads as queries have."""
    groups = num_heads // value.shape[2]
    return value if groups == 1 else value.repeat_interleave(groups, dim=2)


def _mask_of(padding: KeyPadding, like: torch.Tensor) -> torch.Tensor | None:
    if padding.valid is not None:
        return None
    return padding.mask() if like.dim() == 2 else padding.key_mask()


def _scale(head_size: int, scale: float | None) -> float:
    return float(head_size**-0.5) if scale is None else scale


def _intersect(allowed: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return allowed
    if mask.dtype is torch.bool:
        return mask & allowed
    return torch.where(allowed, mask, torch.finfo(mask.dtype).min)


def _merged(entries: Iterable[ReportEntry]) -> tuple[ReportEntry, ...]:
    """Return the entries, adding up the calls of those that say the same."""
    calls: dict[ReportEntry, int] = {}
    for entry in entries:
        key = replace(entry, calls=0)
        calls[key] = calls.get(key, 0) + entry.calls
    return tuple(replace(entry, calls=count) for entry, count in calls.items())
