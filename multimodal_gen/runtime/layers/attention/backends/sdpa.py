"""PyTorch's scaled dot product attention: `torch_sdpa`, and `torch_cudnn_sdpa` for cuDNN alone.

Inside this file tensors are [B, H, S, D], as torch wants them; views, never copies.

Which kernel runs is torch's own choice (`torch_sdpa`). Torch that puts cuDNN first on SM90 and
later is called directly, because `torch.nn.attention.sdpa_kernel` costs several times the call it
surrounds and changes flags of the whole process, other threads included. Older torch is told the
order through that context manager. `torch_cudnn_sdpa` calls cuDNN's operator itself: no flag to
set, no other kernel it could fall back to.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from multimodal_gen.kernels.engine import records_gradient
from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    AlignedImpl,
    expand_kv,
    rows_that_see,
    unit_stride,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.masks import bottom_right_causal_mask, with_causal
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

Partial = tuple[torch.Tensor, torch.Tensor]

_EVERYWHERE = frozenset(
    {Feature.GQA, Feature.CAUSAL, Feature.KEY_MASK, Feature.DENSE_MASK, Feature.BACKWARD}
)
_MEASURED = frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.CPU})


class SDPAImpl(AlignedImpl):
    """Attention through `torch.nn.functional.scaled_dot_product_attention`."""

    label = "torch_sdpa"

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
            square = not self.causal or query.shape[1] == key.shape[1]
            if square and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
                q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
                return self._call(q, k, v, None, self.causal).transpose(1, 2)
            return self._attend_aligned(query, key, value, lse=False)[0]
        mask = with_causal(attn_mask, query.shape[1], key.shape[1]) if self.causal else attn_mask
        q, k, v = (x.transpose(1, 2) for x in unit_stride(query, key, value))
        return self._call_masked(q, k, v, mask).transpose(1, 2)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (x.transpose(1, 2) for x in unit_stride(query, key, value))
        if lse:
            return self._call_lse(q, k, v)
        if not self.causal or query.shape[1] == key.shape[1]:
            out = self._call(q, k, v, None, self.causal)
        elif _flash_is_bottom_right(q):
            out = _flash(q, k, v, True, self.softmax_scale)[0]
        else:
            out = self._call_masked(
                q, k, v, bottom_right_causal_mask(q.shape[2], k.shape[2], q.device)
            )
        return out.transpose(1, 2), None

    def _call_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        size = v.shape[-1]
        # The operators do not pad head sizes as the public function does.
        q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
        kernel = _kernel_with_lse(q, k, v, self.causal, self.softmax_scale)
        out, lse = kernel(q, k, v, self.causal, self.softmax_scale)
        return out[..., :size].transpose(1, 2), lse

    def _call_masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if mask.dtype is not torch.bool:
            mask = mask.to(q.dtype)
        # Kernels disagree on rows without keys (zeros or NaN, and NaN gradients). Such rows attend
        # to everything instead, and what they give is dropped.
        sees = rows_that_see(mask)
        mask = mask | ~sees if mask.dtype is torch.bool else mask.masked_fill(~sees, 0.0)
        out = self._call(q, k, v, mask, False)
        return torch.where(sees, out, out.new_zeros(()))

    def _call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        grouped = k.shape[1] != q.shape[1]
        if grouped and not _takes_grouped_heads(q, mask):
            k, v = (expand_kv(x, q.shape[1], dim=1) for x in (k, v))
            grouped = False
        with _order(q):
            return F.scaled_dot_product_attention(
                q, k, v, mask, 0.0, causal, scale=self.softmax_scale, enable_gqa=grouped
            )


class SDPABackend(AttentionBackend):
    """PyTorch's own attention; runs everywhere."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.TORCH_SDPA
    summary: ClassVar[str] = "PyTorch scaled_dot_product_attention, cuDNN first on SM90 and later"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="torch_sdpa",
            platforms=_MEASURED,
            dtypes=HALF_DTYPES | {torch.float32, torch.float64},
            head_sizes=HeadSizes(),
            features=_EVERYWHERE | {Feature.LSE, Feature.RING},
        ),
        Variant(
            name="generic",
            platforms=frozenset(PlatformEnum) - _MEASURED,
            dtypes=HALF_DTYPES | {torch.float32},
            head_sizes=HeadSizes(),
            features=_EVERYWHERE,
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `SDPAImpl`."""
        return SDPAImpl


class CudnnSDPAImpl(AlignedImpl):
    """Attention through cuDNN's operator; what cuDNN refuses raises."""

    label = "torch_cudnn_sdpa"
    only_square = True  # cuDNN aligns causality to the top left

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
        sees = rows_that_see(mask)
        if mask.dtype is torch.bool:
            bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~(mask | ~sees), -math.inf)
        else:
            bias = mask.masked_fill(~sees, 0.0).to(query.dtype)
        bias = bias.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        out, _ = self._call(query, key, value, bias, causal=False, lse=False)
        return torch.where(sees.transpose(1, 2), out, out.new_zeros(()))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._call(query, key, value, None, causal=self.causal, lse=lse)

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        causal: bool,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        lse = lse or records_gradient(query, key, value)  # the backward reads it
        q, k, v = (x.transpose(1, 2) for x in unit_stride(query, key, value))
        out, stats = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, bias, lse, 0.0, causal, False, scale=self.softmax_scale
        )[:2]
        return out.transpose(1, 2), stats.view(out.shape[:3]) if lse else None


class CudnnSDPABackend(AttentionBackend):
    """cuDNN's attention through PyTorch, and nothing else."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.TORCH_CUDNN_SDPA
    summary: ClassVar[str] = (
        "cuDNN attention through PyTorch; raises rather than use another kernel"
    )
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="torch_cudnn_sdpa",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=_EVERYWHERE | {Feature.LSE, Feature.RING},
            capability=Capability(minimum=(9, 0)),
        ),
        Variant(
            name="sm80",
            platforms=frozenset({PlatformEnum.CUDA}),
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(minimum=8, maximum=128, multiple_of=8),
            features=_EVERYWHERE | {Feature.LSE, Feature.RING},
            capability=Capability(minimum=(8, 0), below=(9, 0)),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `CudnnSDPAImpl`."""
        return CudnnSDPAImpl


def _takes_grouped_heads(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes fewer key heads; else `enable_gqa` means the slow path."""
    if q.device.type == "cpu":
        return True
    # Flash and cuDNN do, without a mask; the memory-efficient kernel never does.
    fused = mask is None and q.dtype in HALF_DTYPES and q.shape[-1] <= 256
    return fused and q.device.type == "cuda"


def _flash_is_bottom_right(query: torch.Tensor) -> bool:
    """Whether torch's flash operator takes `query` and aligns causality to the bottom right."""
    nvidia = query.device.type == "cuda" and torch.version.hip is None
    size = query.shape[-1]
    return nvidia and query.dtype in HALF_DTYPES and size <= 256 and size % 8 == 0


def _order(q: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the context that makes cuDNN the first choice where torch has another order."""
    if q.device.type != "cuda" or q.dtype not in HALF_DTYPES or torch.compiler.is_compiling():
        return nullcontext()
    make = _order_of(q.device.index or 0)
    return nullcontext() if make is None else make()


@cache
def _order_of(device_index: int) -> Callable[[], AbstractContextManager[Any]] | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    flags: Any = torch.backends.cuda
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) < (9, 0):
        return None
    if not flags.cudnn_sdp_enabled() or "set_priority" not in signature(sdpa_kernel).parameters:
        return None
    probe = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=f"cuda:{device_index}")
    if torch._fused_sdp_choice(probe, probe, probe) == int(SDPBackend.CUDNN_ATTENTION.value):
        return None
    enabled = {
        SDPBackend.CUDNN_ATTENTION: True,
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: flags.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: flags.math_sdp_enabled(),
    }
    order = [backend for backend, allowed in enabled.items() if allowed]
    return lambda: sdpa_kernel(order, set_priority=True)


def _kernel_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Partial]:
    """Return the operator torch would run for these tensors, in the form that gives the lse."""
    from torch.nn.attention import SDPBackend

    bottom_right = causal and q.shape[2] != k.shape[2]
    if q.device.type == "cpu":
        same_size = q.shape[-1] == v.shape[-1]
        return _math if bottom_right or not same_size else _flash_for_cpu
    if bottom_right:
        return _flash if _flash_is_bottom_right(q) else _math
    with _order(q):
        choice = torch._fused_sdp_choice(
            q, k, v, None, 0.0, causal, scale=scale, enable_gqa=_takes_grouped_heads(q, None)
        )
    return {
        SDPBackend.CUDNN_ATTENTION.value: _cudnn,
        SDPBackend.FLASH_ATTENTION.value: _flash,
        SDPBackend.EFFICIENT_ATTENTION.value: _efficient,
    }.get(choice, _math)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, causal, False, scale=scale
    )[:2]
    return out, lse


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out, lse.view(out.shape[:3])


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Partial:
    k, v = (expand_kv(x, q.shape[1], dim=1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        q, k, v, None, True, 0.0, causal, scale=scale
    )[:2]
    return out, lse[:, :, : q.shape[2]]  # rows are padded to a multiple of 32


def _flash_for_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse.float()


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Partial:
    """Return attention by its formula, for what no fused kernel gives the lse of."""
    k, v = (expand_kv(x, q.shape[1], dim=1) for x in (k, v))
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(precise) @ k.to(precise).mT) * scale
    if causal:
        allowed = bottom_right_causal_mask(q.shape[2], k.shape[2], q.device)
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.to(precise)
    return out.to(q.dtype), lse.float()
