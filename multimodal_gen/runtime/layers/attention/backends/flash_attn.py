"""FlashAttention 2, 3 and 4 behind one name; the variant is the best one for the GPU.

All of them take [B, S, H, D], align causality to the bottom right, and return the log-sum-exp as
natural logarithm in fp32 [B, H, S]. Version 3 has kernels for operands in e4m3, too (Shah et al.,
2407.08608), which run for those who ask for them; their output is bf16.
"""

import importlib
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from typing_extensions import Unpack, override

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.engine import FLASH_ATTN_4, records_gradient
from multimodal_gen.kernels.requirements import Capability, HeadSizes
from multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    DenseBackend,
    DenseImpl,
)
from multimodal_gen.runtime.layers.attention.backends.common import (
    Segments,
    attend_to_nothing,
    refuse_grad,
    to_e4m3,
)
from multimodal_gen.runtime.layers.attention.backends.declaration import (
    BASIC,
    CUDA_ONLY,
    FP8,
    MERGEABLE,
    Variant,
)
from multimodal_gen.runtime.layers.attention.backends.packages import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_3_FORWARD,
)
from multimodal_gen.runtime.layers.attention.config import BackendConfig, option
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Feature
from multimodal_gen.runtime.platforms import AttentionBackendEnum, PlatformEnum

FORWARD = BASIC | MERGEABLE | {Feature.VARLEN}
_UP_TO_256 = HeadSizes(minimum=8, maximum=256, multiple_of=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashLibrary:
    """How one FlashAttention package is called.

    Attributes:
        module: module that holds `flash_attn_func` and `flash_attn_varlen_func`.
        lse: keyword that asks for the log-sum-exp.
        backward: whether gradients flow through it.
        lse_for_gradients: whether it insists on the log-sum-exp where gradients are recorded.
        e4m3: whether it is given operands in e4m3, with a scale for each sample and key head.
    """

    module: str
    lse: str = "return_attn_probs"
    backward: bool = True
    lse_for_gradients: bool = False
    e4m3: bool = False


_LIBRARIES: MappingProxyType[str, FlashLibrary] = MappingProxyType(
    {
        "fa3": FlashLibrary(module="flash_attn_interface"),
        "fa3_fwd": FlashLibrary(module="fa3_fwd_interface", backward=False),
        "fa3_fp8": FlashLibrary(module="flash_attn_interface", backward=False, e4m3=True),
        "fa3_fwd_fp8": FlashLibrary(module="fa3_fwd_interface", backward=False, e4m3=True),
        "fa4": FlashLibrary(module="flash_attn.cute", lse="return_lse"),
        "fa4_fwd": FlashLibrary(module="flash_attn.cute", lse="return_lse", backward=False),
        "fa4_sm100": FlashLibrary(module="flash_attn.cute", lse="return_lse"),
        "fa2": FlashLibrary(module="flash_attn"),
        "musa": FlashLibrary(module="flash_attn_interface", backward=False),
        "aiter": FlashLibrary(module="aiter", lse="return_lse", lse_for_gradients=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnConfig(BackendConfig):
    """Parameters of `fa`.

    Attributes:
        version: FlashAttention version to use; "auto" takes the best one present.
        kernel: "fp8" rounds q, k and v to e4m3, with a scale for each head, for the 8-bit kernel of
            version 3; "auto" never does.

    Raises:
        ConfigError: `kernel` is fp8 and `version` has no such kernel.
    """

    version: Literal["auto", "2", "3", "4"] = option(
        "auto", "FlashAttention version; auto takes the best one for the GPU"
    )
    kernel: Literal["auto", "fp8"] = option(
        "auto",
        "fp8 rounds to 8 bits (e4m3) for version 3, forward only, with a relative error of 0.054 "
        "on normal inputs and of 0.219 to 0.241 with large channels or offsets; auto never does",
    )

    def check(self) -> None:
        """Only version 3 has a kernel for e4m3."""
        if self.kernel == FP8 and self.version not in ("auto", "3"):
            raise ConfigError(
                f"`version` of fa must be 3 with `kernel` fp8, which no other version has, got "
                f"{self.version}; leave `version` out"
            )


class FlashAttentionImpl(DenseImpl):
    """Attention through one of the FlashAttention packages, named by `variant`."""

    label = "fa"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variant not in _LIBRARIES:
            raise UsageError(
                f"variant must be one of {', '.join(_LIBRARIES)}, got {self.variant!r}; "
                f"take it from `resolve`"
            )
        library = self._library = _LIBRARIES[self.variant]
        self._depends_on_gradients = library.lse_for_gradients or not library.backward
        self._options = {"softmax_scale": self.softmax_scale, "causal": self.causal}
        module = importlib.import_module(library.module)
        self.run = module.flash_attn_func
        self._varlen = module.flash_attn_varlen_func

    @override
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = self._options
        if lse or self._depends_on_gradients:
            options = self._options_for(query, key, value, lse=lse)
        if self._library.e4m3:
            return self._attend_e4m3(query, key, value, options)
        found: Any = self.run(query, key, value, **options)
        # FlashAttention 4 returns (out, lse or None) always, 3 has done so in some builds.
        return found[:2] if isinstance(found, tuple) else (found, None)

    def _attend_e4m3(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.numel() and key.numel()):
            return attend_to_nothing(query, value)
        (q, of_q), (k, of_k), (v, of_v) = (to_e4m3(x, key.shape[2]) for x in (query, key, value))
        scales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
        found: Any = self.run(q, k, v, **scales, **options)
        out, lse = found[:2] if isinstance(found, tuple) else (found, None)
        return out.to(query.dtype), lse

    @override
    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **segments: Unpack[Segments],
    ) -> torch.Tensor:
        options = self._options_for(query, key, value)
        found: Any = self._varlen(query, key, value, **segments, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    def _options_for(self, *tensors: torch.Tensor, lse: bool = False) -> dict[str, Any]:
        """Return what both functions take by name; refuses gradients that would be lost."""
        library = self._library
        if not library.backward:
            refuse_grad(f"{self.label} ({self.variant})", *tensors)
        wanted = lse or (library.lse_for_gradients and records_gradient(*tensors))
        return {**self._options, library.lse: True} if wanted else self._options


_FA3 = Variant(
    name="fa3",
    head_sizes=_UP_TO_256,
    features=FORWARD | {Feature.BACKWARD},
    packages=(FLASH_ATTN_3,),
    capability=Capability(exact=((9, 0),)),
)
_FA3_FORWARD = replace(
    _FA3,
    name="fa3_fwd",
    dtypes=frozenset({torch.bfloat16}),
    features=FORWARD,
    packages=(FLASH_ATTN_3_FORWARD,),
)
# Packed segments would share their scales.
_FA3_FP8 = replace(
    _FA3,
    name="fa3_fp8",
    head_sizes=HeadSizes(minimum=16, maximum=256, multiple_of=16),
    features=FORWARD - {Feature.VARLEN},
    operand_bits=8,
)
# At other head sizes FlashAttention 4 returns wrong gradients without a word (8, 40 and 80, version
# 4.0.0b36, SM90). Dense calls have the same interface in every version.
_FA4 = replace(
    _FA3,
    name="fa4",
    head_sizes=HeadSizes(listed=(64, 96, 128, 192, 256)),
    packages=(replace(FLASH_ATTN_4, minimum=None),),
)


class FlashAttentionBackend(DenseBackend):
    """FlashAttention 2, 3 or 4."""

    backend = AttentionBackendEnum.FA
    summary = "FlashAttention 2, 3 or 4, the best one for the GPU"
    config_cls = FlashAttnConfig
    impl = FlashAttentionImpl
    variants = (
        _FA3,
        _FA3_FORWARD,
        _FA4,
        replace(_FA4, name="fa4_fwd", head_sizes=_UP_TO_256, features=FORWARD),
        replace(
            _FA4,
            name="fa4_sm100",
            head_sizes=HeadSizes(listed=(64, 96, 128)),
            capability=Capability(minimum=(10, 0), below=(12, 0)),
        ),
        replace(
            _FA3,
            name="fa2",
            platforms=CUDA_ONLY | {PlatformEnum.ROCM},
            packages=(FLASH_ATTN_2,),
            capability=Capability(minimum=(8, 0)),
        ),
        _FA3_FP8,
        replace(_FA3_FP8, name="fa3_fwd_fp8", packages=_FA3_FORWARD.packages),
    )

    @override
    @classmethod
    def variants_for(cls, config: BackendConfig | None) -> tuple[Variant, ...]:
        known = config if isinstance(config, FlashAttnConfig) else FlashAttnConfig()
        begin = "fa" if known.version == "auto" else f"fa{known.version}"
        named = (v for v in cls.variants if v.name.startswith(begin))
        return tuple(v for v in named if v.name.endswith(FP8) == (known.kernel == FP8))

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
