"""PyTorch FlexAttention: compiled once per process on GPUs, unfused on the CPU.

Masks are score functions over the mask tensor, so nothing of size Sq x Sk is materialised on a
GPU. Causality is a block mask, so blocks after the diagonal are skipped.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.kernels.requirements import HeadSizes
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.kernels.tensors import unit_stride
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    CUDA_ONLY,
    HALF_DTYPES,
    MASKS,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.masks import with_causal
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

_BLOCK = 128
_FORWARD = BASIC | MASKS | MERGEABLE


class FlexAttentionImpl(DenseImpl):
    """Attention through `torch.nn.attention.flex_attention.flex_attention`."""

    label = "flex_attn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compiled_for: set[object] = set()

    @override
    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        mask = with_causal(mask, query.shape[1], key.shape[1]) if self.causal else mask
        mask = mask.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        kind = (mask.dtype, mask.stride())
        options = {"score_mod": _score_mod(mask)}
        return self._flex(query, key, value, options, kind, lse=False)[0]

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options: dict[str, Any] = {}
        if self.causal:
            options["block_mask"] = _causal_blocks(query.shape[1], key.shape[1], query.device)
        return self._flex(query, key, value, options, lse=lse)

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
        return self._flex(query, key, value, {"block_mask": blocks}, id(blocks.mask_mod), lse=lse)

    def _flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
        mask_kind: object = None,
        *,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        q, k, v = (unit_stride(x).transpose(1, 2) for x in (query, key, value))
        options["scale"] = self.softmax_scale
        options["enable_gqa"] = query.shape[2] != key.shape[2]
        if lse:
            options["return_aux"] = _lse_request()
        if torch.compiler.is_compiling():
            from torch.nn.attention.flex_attention import flex_attention

            found = flex_attention(q, k, v, **options)
        elif query.device.type == "cpu":
            # torch 2.9 rounds the scores of half dtypes before their exponents are summed.
            found = _unfused(*(x.float() if lse else x for x in (q, k, v)), **options)
        else:
            grad = records_gradient(q, k, v)
            kind = (q.shape, k.shape, v.shape, q.dtype, grad, mask_kind, *options)
            with nullcontext() if kind in self._compiled_for else _no_recompilation_limit():
                found = _compiled()(q, k, v, **options)
            self._compiled_for.add(kind)
        if not lse:
            return found.transpose(1, 2), None
        out, extra = found
        return out.to(q.dtype).transpose(1, 2), extra.lse


class FlexAttentionBackend(DenseBackend):
    """PyTorch FlexAttention."""

    backend = AttentionBackendEnum.FLEX_ATTN
    summary = "PyTorch FlexAttention, compiled on first use"
    never_unasked = "is compiled on first use"
    impl = FlexAttentionImpl
    variants = (
        Variant(
            name="flex_attn",
            platforms=CUDA_ONLY | {PlatformEnum.ROCM, PlatformEnum.XPU},
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
def _lse_request() -> "AuxRequest":
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _unfused(*args: Any, **kwargs: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        # The unfused form is what the CPU gets on purpose.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kwargs)


def _score_mod(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the score function of a bool or additive mask [B, H, Sq, Sk]; strides may be 0."""

    def masked(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if mask.dtype is torch.bool:
            return torch.where(mask[b, h, i, j], score, -math.inf)
        return score + mask[b, h, i, j]

    return masked


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
