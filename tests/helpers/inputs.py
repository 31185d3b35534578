"""Attention inputs: with the statistics of diffusion transformers, of videos, and in other layouts.

Independent normal tokens flatten what selects by content: every cluster matters as much. Inputs
from `make_video_qkv` vary over a video as those of trained models do.
"""

import math
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch


class QKV(NamedTuple):
    """Inputs of one attention call: query [B, Sq, H, D]; key and value [B, Sk, Hkv, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_qkv(
    batch: int,
    num_queries: int,
    num_heads: int,
    head_size: int,
    *,
    num_keys: int | None = None,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> QKV:
    """Return inputs drawn on the CPU, so that every device sees the same numbers.

    Queries and keys are RMS-normalised, as in DiTs with q/k norm, with a gain per channel that
    makes a few channels stand out; keys share an offset, as trained ones do (it is what quantised
    kernels smooth away). Values have unit variance and a mean per channel. Logits then have a
    standard deviation between 1 and 3.

    Args:
        batch: B.
        num_queries: Sq.
        num_heads: H.
        head_size: D.
        num_keys: Sk; Sq when None.
        num_kv_heads: Hkv; H when None.
        dtype: dtype of the result.
        device: where the result lives.
        seed: seed of this call's own generator.
        requires_grad: whether the results are leaves that require grad.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    num_keys = num_queries if num_keys is None else num_keys
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    kv_shape = (batch, num_keys, num_kv_heads, head_size)
    gain = 1.0 + 0.5 * normal(head_size).abs()
    query = _rms_norm(normal(batch, num_queries, num_heads, head_size)) * gain
    key = _rms_norm(normal(*kv_shape) + 0.5 * normal(head_size)) * gain.flip(0)
    value = normal(*kv_shape) + 0.3 * normal(head_size)
    tensors = (x.to(device=device, dtype=dtype) for x in (query, key, value))
    return QKV(*(x.requires_grad_(requires_grad) for x in tensors))


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().mean(dim=-1, keepdim=True).rsqrt()


# Root mean squares of Wan's queries, keys and values.
_RMS = (1.2, 1.25, 2.0)
# Waves of which queries and keys are made, and their share of the variance. Scores of tokens then
# have a standard deviation of sqrt(head size / waves) * share * 1.5: about 2.5 at head size 128.
_WAVES = 24
_SHARE = 0.72


def make_video_qkv(
    grid: tuple[int, int, int],
    num_heads: int,
    head_size: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> QKV:
    """Return queries and keys that are smooth over a latent grid, plus noise; [B, S, H, D] each.

    Each head projects the same few waves over time, height and width; its queries and keys do so
    alike, and tokens with similar surroundings attend to each other.

    Args:
        grid: (T, H, W) of the video; S is their product.
        num_heads: H.
        head_size: D.
        batch: B.
        dtype: dtype of the result.
        device: where the result is drawn and lives.
        seed: seed of this call's own generator.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    axes = [torch.linspace(0, 1, size, device=device) for size in grid]
    places = torch.cartesian_prod(*axes).view(-1, 3)
    width = num_heads * head_size
    out = [torch.empty(batch, len(places), width, dtype=dtype, device=device) for _ in range(3)]
    for b in range(batch):
        phases = places @ (normal(3, _WAVES) * 2) + normal(_WAVES)
        waves = (2 * math.pi * phases).cos() * math.sqrt(2 * _SHARE / _WAVES)
        weights = normal(_WAVES, width)
        for x, rms in zip(out, _RMS, strict=True):
            # In parts: a whole tensor in fp32 would be twice the result.
            for first, last in pairwise([*range(0, len(places), 8192), len(places)]):
                noise = normal(last - first, width) * math.sqrt(1 - _SHARE)
                x[b, first:last] = ((waves[first:last] @ weights + noise) * rms).to(dtype)
    shape = (batch, len(places), num_heads, head_size)
    return QKV(*(x.view(shape) for x in out))


# Name -> (axes of the memory from the outermost in, entries before and after along the heads).
LAYOUTS = MappingProxyType(
    {
        "token-major": ("bshd", 0),
        "head-major": ("bhsd", 0),
        "tokens outermost": ("sbhd", 0),
        "a slice of the heads": ("bshd", 2),
        "a slice of the heads, head-major": ("bhsd", 1),
        "heads innermost": ("bsdh", 0),
    }
)


def with_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view equal to `values` [B, S, H, D] whose memory is laid out as `layout` names.

    What lies around a slice is NaN.
    """
    axes, around = LAYOUTS[layout]
    order = tuple("bshd".index(axis) for axis in axes)
    batch, tokens, heads, size = values.shape
    whole = values.new_full((batch, tokens, heads + 2 * around, size), torch.nan)
    whole = whole.permute(order).contiguous().permute(tuple(order.index(i) for i in range(4)))
    view = whole[:, :, around : around + heads]
    return view.copy_(values)
