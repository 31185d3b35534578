"""Attention inputs that vary over a video as those of trained models do.

Independent normal tokens flatten what selects by content: every cluster matters as much.
"""

import math
from itertools import pairwise

import torch

from multimodal_gen.testing.inputs import QKV

__all__ = ["make_video_qkv"]

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
