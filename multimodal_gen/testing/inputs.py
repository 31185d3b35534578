"""Attention inputs with the statistics of diffusion transformers."""

from typing import NamedTuple

import torch


class QKV(NamedTuple):
    """Inputs of one attention call: query [B, Sq, H, D]; key and value [B, Sk, Hkv, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


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
