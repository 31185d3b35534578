"""The sparse methods of this package as a plug-in of vllm-omni's SPARSE_ATTN backend.

Installing this package declares it in the entry point group `vllm_omni.sparse_attn`; vllm-omni
calls it for every self-attention:

    vllm-omni serve Wan-AI/Wan2.2-T2V-A14B-Diffusers --enforce-eager \
      --diffusion-attention-config.per_role.self.backend multimodal_gen \
      --diffusion-attention-config.per_role.self.extra.method video_sparse_attn \
      --diffusion-attention-config.per_role.self.extra.sparsity 0.8

With `method` there are its parameters, as `sglang attention describe NAME` lists them. Which
layer calls is not told, so parameters that name layers are refused, and defaults that do are left
out with one warning. A call whose tokens are not those of the latent grid alone runs dense, with
one warning.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.backend_names import parse_attention_backend
from multimodal_gen.runtime.layers.attention.attention_layer import AttentionLayer
from multimodal_gen.runtime.layers.attention.backends.registry import find_backend
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.config import (
    BackendConfig,
    SparseConfig,
    build_config,
)
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.warn_once import PROCESS
from multimodal_gen.runtime.managers.forward_context import ForwardContext, use_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum, current_platform

# What vllm-omni adds to a method's own parameters.
_OF_THE_CALL = frozenset(
    {
        "attn_mask",
        "denoise_step_idx",
        "full_attn_spans",
        "latent_shape",
        "method",
        "patch_size",
        "patches_per_frame",
        "total_denoise_steps",
        "total_latent_frames",
    }
)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: Mapping[str, Any],
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Return attention of one call.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        params: `method`, its parameters, and what is known of the call.
        is_causal: mask out keys after the query.
        softmax_scale: factor on q k^T; None for `D ** -0.5`.

    Returns:
        [B, Sq, H, Dv].

    Raises:
        ConfigError: the method or a parameter is wrong, or names layers.
        UnsupportedBackendError: the method cannot serve the call.
    """
    sizes = (query.shape[2], query.shape[3], key.shape[2], softmax_scale, bool(is_causal))
    layer = _layer(*_asked(params), query.dtype, *sizes)
    grid = _grid(params)
    no_grid = "this call of the model tells none"
    if grid is not None and math.prod(grid) != query.shape[1]:
        no_grid = f"{grid} has {math.prod(grid)} tokens, some calls have {query.shape[1]}"
        grid = None
    context = ForwardContext(
        current_timestep=_number(params.get("denoise_step_idx")) or 0,
        num_steps=_number(params.get("total_denoise_steps")),
        latent_grid=grid,
    )
    call = AttentionCall(query, key, value, params.get("attn_mask"))
    with use_forward_context(context):
        return layer.attend(call if grid else call._replace(no_grid=no_grid))


# What vllm-omni reads: masks are honoured.
sparse_attention.capabilities = {"supports_attention_mask": True}


def _asked(params: Mapping[str, Any]) -> tuple[AttentionBackendEnum, BackendConfig]:
    """Return the method and its parameters; what is no plain value is the model's business."""
    method = parse_attention_backend(params.get("method"), name="method")
    if method is None or not method.is_sparse:
        sparse = ", ".join(str(member) for member in AttentionBackendEnum if member.is_sparse)
        raise ConfigError(f"method must be one of {sparse}, got {short(params.get('method'))}")
    plain = (bool, int, float, str, list, tuple, dict)
    given = {
        name: value
        for name, value in params.items()
        if name not in _OF_THE_CALL and isinstance(value, plain)
    }
    cls = find_backend(method, current_platform().name)
    config = build_config(cls.config_cls, given, backend=str(method))
    return method, _for_all_layers(method, config)


def _for_all_layers(method: AttentionBackendEnum, config: BackendConfig) -> BackendConfig:
    """Refuse parameters that keep some layers dense, and go without those that do by default."""
    parts = config.dense_parts("layers") if isinstance(config, SparseConfig) else ()
    defaults = {each.name: each.default for each in fields(config)}
    for part in parts:
        name = part.given.partition("=")[0]
        if getattr(config, name) != defaults[name]:
            raise ConfigError(
                f"{part.given} of {method} must be left out in vllm-omni, which does not tell "
                f"which layer calls"
            )
        PROCESS.warn(
            f"{method} runs in all layers: {part.given}, its default, keeps some of them dense, "
            f"but vllm-omni does not tell which layer calls"
        )
        config = replace(config, **{name: None if name == "dense_layers" else 0})
    return config


@lru_cache(maxsize=64)
def _layer(
    method: AttentionBackendEnum,
    config: BackendConfig,
    dtype: torch.dtype,
    num_heads: int,
    head_size: int,
    num_kv_heads: int,
    scale: float | None,
    causal: bool,
) -> AttentionLayer:
    """Return the layer of all calls that look alike."""
    asked = BackendPreference(source=Source.SETTINGS, backend=method, config=config)
    scope = SelectionScope(default=asked)
    return AttentionLayer(
        num_heads, head_size, num_kv_heads, scale, causal, compute_dtype=dtype, scope=scope
    )


def _grid(params: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return (T, H, W) after patching, or None where the model does not tell."""
    latent, patch = (_triple(params.get(name)) for name in ("latent_shape", "patch_size"))
    if latent is None or patch is None or not all(patch):
        return None
    frames, rows, columns = (size // cut for size, cut in zip(latent, patch, strict=True))
    return (frames, rows, columns)


def _triple(value: Any) -> tuple[int, ...] | None:
    """Return the three numbers of the first sample."""
    if value is None:
        return None
    first = torch.as_tensor(value).reshape(-1, 3)[0].tolist()
    return tuple(int(number) for number in first)


def _number(value: Any) -> int | None:
    """Return the number of the first sample; all samples of a batch are at one step."""
    if value is None:
        return None
    numbers = set(torch.as_tensor(value).flatten().tolist())
    if len(numbers) != 1:
        raise UsageError(
            f"all samples of a batch must be at one denoising step, got {sorted(numbers)}"
        )
    return int(numbers.pop())
