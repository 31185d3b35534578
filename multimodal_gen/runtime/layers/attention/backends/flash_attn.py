"""FlashAttention 2, 3 and 4 behind one name; the variant is the best one for the GPU.

All of them take [B, S, H, D], align causality to the bottom right, give zeros to rows that see no
key, and return the log-sum-exp as natural logarithm in fp32 [B, H, S].
"""

import importlib
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.engine import FLASH_ATTN_4
from multimodal_gen.kernels.requirements import Capability, HeadSizes, PackageProbe
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import refuse_grad, refuse_mask
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    HALF_DTYPES,
    Variant,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

if TYPE_CHECKING:
    from multimodal_gen.runtime.managers.forward_context import ForwardContext

_FORWARD = frozenset({Feature.GQA, Feature.CAUSAL, Feature.VARLEN, Feature.LSE, Feature.RING})
_UP_TO_256 = HeadSizes(minimum=8, maximum=256, multiple_of=8)
_CUDA = frozenset({PlatformEnum.CUDA})

# Dense calls have the same interface in every version.
_FLASH_ATTN_4 = replace(FLASH_ATTN_4, minimum=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashLibrary:
    """How one FlashAttention package is called.

    Attributes:
        module: module that holds `flash_attn_func` and `flash_attn_varlen_func`.
        lse: keyword that asks for the log-sum-exp.
        backward: whether gradients flow through it.
    """

    module: str
    lse: str = "return_attn_probs"
    backward: bool = True


_LIBRARIES: MappingProxyType[str, FlashLibrary] = MappingProxyType(
    {
        "fa3": FlashLibrary(module="flash_attn_interface"),
        "fa3_fwd": FlashLibrary(module="fa3_fwd_interface", backward=False),
        "fa4": FlashLibrary(module="flash_attn.cute", lse="return_lse"),
        "fa4_fwd": FlashLibrary(module="flash_attn.cute", lse="return_lse", backward=False),
        "fa4_sm100": FlashLibrary(module="flash_attn.cute", lse="return_lse"),
        "fa2": FlashLibrary(module="flash_attn"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnConfig(BackendConfig):
    """Parameters of `fa`.

    Attributes:
        version: FlashAttention version to use; "auto" takes the best one present.
    """

    version: Literal["auto", "2", "3", "4"] = option(
        "auto", "FlashAttention version; auto takes the best one for the GPU"
    )


class FlashAttentionImpl(AttentionImpl):
    """Attention through one of the FlashAttention packages, named by `variant`."""

    libraries: ClassVar[MappingProxyType[str, FlashLibrary]] = _LIBRARIES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variant not in self.libraries:
            raise UsageError(
                f"variant must be one of {', '.join(self.libraries)}, got {self.variant!r}; "
                f"take it from `resolve`"
            )
        self._library = self.libraries[self.variant]
        module = importlib.import_module(self._library.module)
        self._dense = module.flash_attn_func
        self._varlen = module.flash_attn_varlen_func

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
        refuse_mask(attn_mask, "fa")
        self._check_grad(query, key, value)
        out = self._dense(query, key, value, softmax_scale=self.softmax_scale, causal=self.causal)
        return _first(out)

    def forward_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionImpl.forward_lse`."""
        refuse_mask(keep, "fa")
        self._check_grad(query, key, value)
        out, lse = self._dense(
            query,
            key,
            value,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            **{self._library.lse: True},
        )[:2]
        if self.causal and query.shape[1] > key.shape[1]:
            lse = torch.where(lse == torch.inf, -torch.inf, lse)  # FA2's value for such rows
        return out, lse

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        """See `AttentionImpl.forward_varlen`."""
        self._check_grad(query, key, value)
        out = self._varlen(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
        )
        return _first(out)

    def _check_grad(self, *tensors: torch.Tensor) -> None:
        if not self._library.backward:
            refuse_grad(f"fa ({self.variant})", *tensors)


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention 2, 3 or 4."""

    backend: ClassVar[AttentionBackendEnum] = AttentionBackendEnum.FA
    summary: ClassVar[str] = "FlashAttention 2, 3 or 4, the best one for the GPU"
    config_cls: ClassVar[type[BackendConfig]] = FlashAttnConfig
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant(
            name="fa3",
            platforms=_CUDA,
            dtypes=HALF_DTYPES,
            head_sizes=_UP_TO_256,
            features=_FORWARD | {Feature.BACKWARD},
            packages=(
                PackageProbe(
                    module="flash_attn_interface",
                    distribution="flash_attn_3",
                    install="build hopper/ of github.com/Dao-AILab/flash-attention",
                ),
            ),
            capability=Capability(exact=((9, 0),)),
        ),
        Variant(
            name="fa3_fwd",
            platforms=_CUDA,
            dtypes=frozenset({torch.bfloat16}),
            head_sizes=_UP_TO_256,
            features=_FORWARD,
            packages=(
                PackageProbe(
                    module="fa3_fwd_interface",
                    distribution="fa3-fwd",
                    install="pip install fa3-fwd",
                ),
            ),
            capability=Capability(exact=((9, 0),)),
        ),
        # At other head sizes FlashAttention 4 returns wrong gradients without a word (8, 40 and 80,
        # version 4.0.0b36, SM90).
        Variant(
            name="fa4",
            platforms=_CUDA,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 96, 128, 192, 256)),
            features=_FORWARD | {Feature.BACKWARD},
            packages=(_FLASH_ATTN_4,),
            capability=Capability(exact=((9, 0),)),
        ),
        Variant(
            name="fa4_fwd",
            platforms=_CUDA,
            dtypes=HALF_DTYPES,
            head_sizes=_UP_TO_256,
            features=_FORWARD,
            packages=(_FLASH_ATTN_4,),
            capability=Capability(exact=((9, 0),)),
        ),
        Variant(
            name="fa4_sm100",
            platforms=_CUDA,
            dtypes=HALF_DTYPES,
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            features=_FORWARD | {Feature.BACKWARD},
            packages=(_FLASH_ATTN_4,),
            capability=Capability(minimum=(10, 0), below=(12, 0)),
        ),
        Variant(
            name="fa2",
            platforms=frozenset({PlatformEnum.CUDA, PlatformEnum.ROCM}),
            dtypes=HALF_DTYPES,
            head_sizes=_UP_TO_256,
            features=_FORWARD | {Feature.BACKWARD},
            packages=(
                PackageProbe(
                    module="flash_attn.flash_attn_interface",
                    distribution="flash-attn",
                    install="pip install flash-attn --no-build-isolation",
                    minimum="2.6",
                    below="3",
                ),
            ),
            capability=Capability(minimum=(8, 0)),
        ),
    )

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return `FlashAttentionImpl`."""
        return FlashAttentionImpl

    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        """Return the variants of the version asked for."""
        if not isinstance(config, FlashAttnConfig) or config.version == "auto":
            return cls.variants
        return tuple(v for v in cls.variants if v.name.startswith(f"fa{config.version}"))

    @classmethod
    def reasons_against_auto(cls, request: AttentionRequest) -> tuple[str, ...]:
        """FlashAttention 2 does not use what SM90 and later have; cuDNN, through SDPA, does."""
        capability = request.environment.capability
        variant = cls.choose_variant(request)
        if variant is None or variant.name != "fa2" or Feature.VARLEN in request.needs:
            return ()
        if request.environment.platform is not PlatformEnum.CUDA or capability is None:
            return ()
        if capability < (9, 0):
            return ()
        return (
            f"only FlashAttention 2 is usable here, and torch_sdpa is faster from compute "
            f"capability 9.0 on, this GPU has {capability.as_version_str()}",
        )


def _first(result: Any) -> torch.Tensor:
    # FlashAttention 4 returns (out, lse or None) always, 3 has done so in some builds.
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out
