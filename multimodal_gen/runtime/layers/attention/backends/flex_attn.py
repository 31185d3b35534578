"""PyTorch FlexAttention: compiled once per process on GPUs, unfused on the CPU.

Masks are score functions over the mask tensor, so nothing of size Sq x Sk is materialised on a
GPU. Causality is a block mask, so blocks after the diagonal are skipped.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    AlignedImpl,
    unit_stride,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.masks import with_causal
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_BLOCK = 128
_FORWARD = frozenset(
    {
        Feature.GQA,
        Feature.CAUSAL,
        Feature.KEY_MASK,
        Feature.DENSE_MASK,
        Feature.LSE,
        Feature.RING,
    }
)


class FlexAttentionImpl(AlignedImpl):
    """Attention through `torch.nn.attention.flex_attention.flex_attention`."""

    label = "flex_attn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compiled_for: set[object] = set()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`."""
        if attn_mask is None:
            return self._attend_aligned(query, key, value, lse=False)[0]
        mask = with_causal(attn_mask, query.shape[1], key.shape[1]) if self.causal else attn_mask
        mask = mask.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        kind = (mask.dtype, mask.stride())
        out: torch.Tensor = self._flex(query, key, value, kind, score_mod=_score_mod(mask))
        return out.transpose(1, 2)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options: dict[str, Any] = _lse_options() if lse else {}
        if self.causal:
            blocks = _causal_blocks(query.shape[1], key.shape[1], query.device)
            options = {"block_mask": blocks, **options}
        return _results(self._flex(query, key, value, **options), lse=lse)

    def forward_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: "BlockMask",
        *,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention under a block mask of its own, and the log-sum-exp if it is wanted.

        Args:
            query: [B, Sq, H, D].
            key: [B, Sk, Hkv, D].
            value: [B, Sk, Hkv, Dv].
            blocks: for these lengths and heads.
            lse: whether the log-sum-exp is wanted, natural, fp32 [B, H, Sq].
        """
        options: dict[str, Any] = {"block_mask": blocks, **(_lse_options() if lse else {})}
        return _results(self._flex(query, key, value, id(blocks.mask_mod), **options), lse=lse)

    def _flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask_kind: object = None,
        **options: Any,
    ) -> Any:
        q, k, v = (x.transpose(1, 2) for x in unit_stride(query, key, value))
        options["scale"] = self.softmax_scale
        options["enable_gqa"] = query.shape[2] != key.shape[2]
        if torch.compiler.is_compiling():
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(q, k, v, **options)
        if query.device.type == "cpu":
            if not _lse_options().keys() & options.keys():
                return _unfused()(q, k, v, **options)
            # torch 2.9 rounds the scores of half dtypes before their exponents are summed.
            out, extra = _unfused()(*(x.float() for x in (q, k, v)), **options)
            return out.to(q.dtype), extra
        grad = records_gradient(q, k, v)
        kind = (q.shape, k.shape, v.shape, q.dtype, grad, mask_kind, *options)
        with nullcontext() if kind in self._compiled_for else _no_recompilation_limit():
            out = _compiled()(q, k, v, **options)
        self._compiled_for.add(kind)
        return out


def _results(found: Any, *, lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what FlexAttention gave as [B, Sq, H, Dv], and the log-sum-exp if it was asked for."""
    if not lse:
        return found.transpose(1, 2), None
    out, extra = found
    return out.transpose(1, 2), extra if isinstance(extra, torch.Tensor) else extra.lse


class FlexAttentionBackend(AttentionBackend):
    """PyTorch FlexAttention."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FLEX_ATTN
    summary: ClassVar[str] = "PyTorch FlexAttention, compiled on first use"
    never_unasked: ClassVar[str] = "is compiled on first use"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="flex_attn",
            platforms=frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.XPU}),
            dtypes=HALF_DTYPES | {torch.float32},
            head_sizes=HeadSizes(minimum=16, maximum=256, multiple_of=8),
            features=_FORWARD | {Feature.BACKWARD},
        ),
        Variant(
            name="unfused",
            platforms=frozenset({PlatformEnum.CPU}),
            dtypes=HALF_DTYPES | {torch.float32},
            head_sizes=HeadSizes(),
            features=_FORWARD,
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `FlexAttentionImpl`."""
        return FlexAttentionImpl


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: what cannot be compiled raises instead of silently running unfused, which would
    # materialise all scores.
    return torch.compile(flex_attention, fullgraph=True)


def _no_recompilation_limit() -> AbstractContextManager[None]:
    """Lift torch's limit of compilations per function, which layers of every kind share here."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


@cache
def _unfused() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # The unfused form is what the CPU gets on purpose.
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*args, **kwargs)

    return run


@cache
def _lse_options() -> dict[str, Any]:
    """Return the keyword that asks for the log-sum-exp; torch 2.9 renamed it."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _score_mod(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the score function of a bool or additive mask [B, H, Sq, Sk]; strides may be 0."""
    if mask.dtype is torch.bool:

        def keep(
            score: torch.Tensor,
            b: torch.Tensor,
            h: torch.Tensor,
            i: torch.Tensor,
            j: torch.Tensor,
        ) -> torch.Tensor:
            return torch.where(mask[b, h, i, j], score, -math.inf)

        return keep

    def add(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return score + mask[b, h, i, j]

    return add


@static_cache(maxsize=32)
def _causal_blocks(num_queries: int, num_keys: int, device: torch.device) -> "BlockMask":
    """Return the block mask of bottom-right causality, by arithmetic instead of evaluation."""
    from torch.nn.attention.flex_attention import BlockMask

    offset = num_keys - num_queries

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i + offset >= j

    first_row = torch.arange(0, num_queries, _BLOCK, device=device)[:, None]
    last_row = (first_row + _BLOCK - 1).clamp(max=num_queries - 1)
    first_key = torch.arange(0, num_keys, _BLOCK, device=device)[None, :]
    last_key = (first_key + _BLOCK - 1).clamp(max=num_keys - 1)
    full = last_key <= first_row + offset
    partial = (first_key <= last_row + offset) & ~full
    return BlockMask.from_kv_blocks(
        *_as_lists(partial),
        *_as_lists(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=allowed,
        seq_lengths=(num_queries, num_keys),
    )


def _as_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts [1, 1, Nq] and indices [1, 1, Nq, Nk], set blocks first, of bool [Nq, Nk]."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    counts = blocks.sum(dim=-1)
    return counts.to(torch.int32)[None, None], order.to(torch.int32)[None, None]
