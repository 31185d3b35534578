"""PyTorch's scaled dot product attention: `torch_sdpa`, and `torch_cudnn_sdpa` for cuDNN alone.

Inside this file tensors are [B, H, S, D], as torch wants them; views, never copies.

Which kernel runs is torch's own choice (`torch_sdpa`). Torch that puts cuDNN first on SM90 and
later is called directly, because `torch.nn.attention.sdpa_kernel` costs several times the call it
surrounds and changes flags of the whole process, other threads included. Older torch is told the
order through that context manager. `torch_cudnn_sdpa` calls cuDNN's operator itself: no flag to
set, no other kernel it could fall back to. Its kernel for 8 bits is in `cudnn_fp8.py`.
"""

import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from typing_extensions import override

from multimodal_gen.kernels.engine import CUDNN_FRONTEND, records_gradient
from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.kernels.tensors import unit_stride
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    expand_kv,
    open_hidden_rows,
    refuse_grad,
    refuse_mask,
)
from multimodal_gen.runtime.layers.attention.backends.cudnn_fp8 import attend_e4m3
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    FP8,
    HALF_DTYPES,
    MASKS,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.masks import bottom_right_causal_mask, with_causal
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_FLASH = "_scaled_dot_product_flash_attention"
_FLASH_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"

_EVERYWHERE = BASIC | MASKS | {Feature.BACKWARD}
_MEASURED = frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.CPU})


class SDPAImpl(DenseImpl):
    """Attention through `torch.nn.functional.scaled_dot_product_attention`."""

    label = "torch_sdpa"

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: "ForwardContext | None" = None,
        *,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        square = not self.causal or query.shape[1] == key.shape[1]
        dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        if attn_mask is None and square and dense:  # the usual call, in as few steps as can be
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            return self._call(q, k, v, None, self.causal).transpose(1, 2)
        return super().forward(query, key, value, attn_mask=attn_mask)

    @override
    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        mask = with_causal(mask, query.shape[1], key.shape[1]) if self.causal else mask
        mask, sees = open_hidden_rows(mask if mask.dtype is torch.bool else mask.to(query.dtype))
        q, k, v = (unit_stride(x).transpose(1, 2) for x in (query, key, value))
        out = self._call(q, k, v, mask, False)
        return torch.where(sees, out, out.new_zeros(())).transpose(1, 2)

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (unit_stride(x).transpose(1, 2) for x in (query, key, value))
        causal, scale = self.causal, self.softmax_scale
        if lse:
            # The operators do not pad head sizes as the public function does.
            padded = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
            out, stats = _attend_with_lse(*padded, causal=causal, scale=scale)
            return out[..., : v.shape[-1]].transpose(1, 2), stats
        if not causal or query.shape[1] == key.shape[1]:
            return self._call(q, k, v, None, causal).transpose(1, 2), None
        if _flash_is_bottom_right(q):
            out, _ = _run(_FLASH, q, k, v, causal=True, scale=scale)
            return out.transpose(1, 2), None
        every_key = torch.ones(1, key.shape[1], dtype=torch.bool, device=key.device)
        return self._attend_masked(query, key, value, every_key), None

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


class SDPABackend(DenseBackend):
    """PyTorch's own attention; runs everywhere."""

    backend = AttentionBackendEnum.TORCH_SDPA
    summary = "PyTorch scaled_dot_product_attention, cuDNN first on SM90 and later"
    impl = SDPAImpl
    variants = (
        Variant(
            name="torch_sdpa",
            platforms=_MEASURED,
            dtypes=HALF_DTYPES | {torch.float32, torch.float64},
            head_sizes=HeadSizes(),
            features=_EVERYWHERE | MERGEABLE,
        ),
        Variant(
            name="generic",
            platforms=frozenset(PlatformEnum) - _MEASURED,
            dtypes=HALF_DTYPES | {torch.float32},
            head_sizes=HeadSizes(),
            features=_EVERYWHERE,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnSDPAConfig(BackendConfig):
    """Parameters of `torch_cudnn_sdpa`.

    Attributes:
        kernel: "fp8" rounds q, k, v and the output to e4m3, with one scale for each tensor; "auto"
            never does.
    """

    kernel: Literal["auto", "fp8"] = option(
        "auto",
        "fp8 rounds to 8 bits (e4m3) by the package nvidia-cudnn-frontend, forward only, with a "
        "relative error of 0.060 on normal inputs, 0.215 with large channels; auto never does",
    )


class CudnnSDPAImpl(DenseImpl):
    """Attention through cuDNN's operator, or its graphs in 8 bits; what cuDNN refuses raises."""

    label = "torch_cudnn_sdpa"
    only_square = True  # cuDNN aligns causality to the top left

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rounds = self.variant == FP8
        if self._rounds:
            self.run = partial(attend_e4m3, importlib.import_module(CUDNN_FRONTEND.module))

    @override
    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self._rounds:
            refuse_mask(mask, f"{self.label} ({self.variant})")
        mask = with_causal(mask, query.shape[1], key.shape[1]) if self.causal else mask
        bias, sees = open_hidden_rows(mask)
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -math.inf)
        shape = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
        out, _ = self._attend(query, key, value, bias.to(query.dtype).expand(shape), lse=False)
        return torch.where(sees.transpose(1, 2), out, out.new_zeros(()))

    @override
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._rounds:
            refuse_grad(f"{self.label} ({self.variant})", query, key, value)
            scale, causal = self.softmax_scale, self.causal
            found: tuple[torch.Tensor, torch.Tensor | None]
            found = self.run(query, key, value, scale=scale, causal=causal, lse=lse)
            return found
        lse = lse or records_gradient(query, key, value)  # the backward reads it
        causal = self.causal and bias is None
        q, k, v = (unit_stride(x).transpose(1, 2) for x in (query, key, value))
        out, stats = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, bias, lse, 0.0, causal, False, scale=self.softmax_scale
        )[:2]
        return out.transpose(1, 2), stats.view(out.shape[:3]) if lse else None


class CudnnSDPABackend(DenseBackend):
    """cuDNN's attention through PyTorch, and nothing else."""

    backend = AttentionBackendEnum.TORCH_CUDNN_SDPA
    summary = "cuDNN attention through PyTorch; raises rather than use another kernel"
    config_cls = CudnnSDPAConfig
    impl = CudnnSDPAImpl
    variants = (
        Variant(
            name="torch_cudnn_sdpa",
            head_sizes=HeadSizes(minimum=8, maximum=256, multiple_of=8),
            features=_EVERYWHERE | MERGEABLE,
            capability=Capability(minimum=(9, 0)),
        ),
        Variant(
            name="sm80",
            head_sizes=HeadSizes(minimum=8, maximum=128, multiple_of=8),
            features=_EVERYWHERE | MERGEABLE,
            capability=Capability(minimum=(8, 0), below=(9, 0)),
        ),
        Variant(
            name=FP8,
            head_sizes=HeadSizes(minimum=16, maximum=256, multiple_of=16),
            features=BASIC | MERGEABLE,
            packages=(CUDNN_FRONTEND,),
            capability=Capability(exact=((9, 0),)),
            operand_bits=8,
        ),
    )

    @override
    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        asked = getattr(config, "kernel", "auto") == FP8
        return tuple(v for v in cls.variants if (v.name == FP8) == asked)


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
    if not flags.cudnn_sdp_enabled():
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


def _attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the operator gives that torch would run for these tensors, and its lse."""
    from torch.nn.attention import SDPBackend

    bottom_right = causal and q.shape[2] != k.shape[2]
    operator: str | None
    if q.device.type == "cpu":
        plain = not bottom_right and q.shape[-1] == v.shape[-1]
        operator = _FLASH_FOR_CPU if plain else None
    elif bottom_right:
        operator = _FLASH if _flash_is_bottom_right(q) else None
    else:
        with _order(q):
            choice = torch._fused_sdp_choice(
                q, k, v, None, 0.0, causal, scale=scale, enable_gqa=_takes_grouped_heads(q, None)
            )
        operator = {
            SDPBackend.CUDNN_ATTENTION.value: _CUDNN,
            SDPBackend.FLASH_ATTENTION.value: _FLASH,
            SDPBackend.EFFICIENT_ATTENTION.value: _EFFICIENT,
        }.get(choice)
    if operator in (_EFFICIENT, None):
        k, v = (expand_kv(x, q.shape[1], dim=1) for x in (k, v))
    if operator is None:
        return _math(q, k, v, causal=causal, scale=scale)
    return _run(operator, q, k, v, causal=causal, scale=scale)


def _run(
    operator: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one of torch's own operators gives, and its lse."""
    bias_and_lse = (None, True) if operator in (_CUDNN, _EFFICIENT) else ()
    function = getattr(torch.ops.aten, operator).default
    out, lse = function(q, k, v, *bias_and_lse, is_causal=causal, scale=scale)[:2]
    # [B, H, S, 1] of cuDNN, [B, H, S] of others, padded to a multiple of 32 by the efficient one.
    return out, lse.flatten(2)[:, :, : q.shape[2]].float()


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention by its formula, for what no fused kernel gives the lse of."""
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(precise) @ k.to(precise).mT) * scale
    if causal:
        allowed = bottom_right_causal_mask(q.shape[2], k.shape[2], q.device)
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.to(precise)
    return out.to(q.dtype), lse.float()
