"""Quantised tensors as the attention kernels read them."""

from dataclasses import dataclass

import torch

__all__ = ["Packed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """8-bit queries, keys and values in slots; R slots, T = R / `keys` tiles, D padded channels.

    Attributes:
        q: int8 [B, H, Rq, D], rotated over the channels.
        q_scale: fp32 [B, H, Rq], one per row, times the scale of the scores times log2(e).
        shift: fp32 [B, H, Rq], what the smoothing of K took from the lse of a row; of any size
            where no lse is wanted.
        k: int8 [B, Hkv, Rk, D], rotated likewise.
        k_scale: fp32 [B, Hkv, T], one per tile of keys.
        v: e4m3 [B, Hkv, D, Rk]; or 16-bit [B, Rk, Hkv, D].
        v_scale: fp32 [B, Hkv, T], one per tile of keys; ones for 16-bit values.
        q_slots: slots per query block.
        keys: keys of a tile.
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    shift: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    q_slots: int
    keys: int
