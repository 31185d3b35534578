"""Block-sparse attention of other packages over lists, for `engine` and `backward`."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from _attention import Attend
from _harness import DEVICE, Run, version_of
from _peers import load

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan

CUDNN = "cudnn.block_sparse_attention"


def kept_blocks(plan: BlockPlan) -> torch.Tensor:
    """Return which blocks a plan of equal counts keeps: bool [1, H, Nq, Nk]."""
    shape = (*plan.indices.shape[:3], plan.kv.num)
    keep = torch.zeros(shape, dtype=torch.bool, device=plan.device)
    return keep.scatter_(-1, plan.indices.long(), True)


class _CuDNN(torch.autograd.Function):
    """cuDNN's block-sparse attention of [B, H, S, D] over lists of equal length."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, lists: torch.Tensor, size: int) -> torch.Tensor:
        found = load(CUDNN).block_sparse_attention_forward(q, k, v, lists, sparse_block_size=size)
        out: torch.Tensor = found["o_tensor"]
        ctx.save_for_backward(q, k, v, out, found["lse_tensor"], lists)
        ctx.size = size
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = load(CUDNN).block_sparse_attention_backward(
            upstream[0].contiguous(), *ctx.saved_tensors, sparse_block_size=ctx.size
        )
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def cudnn(plan: BlockPlan) -> Attend:
    """Return cuDNN's attention of [B, H, S, D], which has a backward pass."""
    load(CUDNN)
    lists = plan.indices.contiguous()
    return lambda q, k, v: _CuDNN.apply(q, k, v, lists, plan.q.size)


def cudnn_8_bits(plan: BlockPlan) -> Attend:
    """Return cuDNN's attention of [B, H, S, D] in e4m3, which quantises in every call."""
    function, lists = load(CUDNN).block_sparse_attention_fp8_forward, plan.indices.contiguous()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = function(q, k, v, lists, sparse_block_size=plan.q.size)["o_tensor"]
        return out

    return attend


def flashinfer(plan: BlockPlan) -> Attend:
    """Return FlashInfer's attention of one sample of [B, H, S, D], planned once."""
    wrapper = load("flashinfer").sparse.VariableBlockSparseAttentionWrapper(
        torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE), backend="auto"
    )
    keep = kept_blocks(plan)[0]
    sizes = [
        torch.full((blocks.num,), blocks.size, dtype=torch.int32, device=DEVICE)
        for blocks in (plan.q, plan.kv)
    ]
    for each, blocks in zip(sizes, (plan.q, plan.kv), strict=True):
        each[-1] -= blocks.num * blocks.size - blocks.total
    planned: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not planned:
            wrapper.plan(
                block_mask_map=keep,
                block_row_sz=sizes[0].expand(len(keep), -1),
                block_col_sz=sizes[1].expand(len(keep), -1),
                num_qo_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=q.shape[3],
                q_data_type=q.dtype,
            )
            planned.append(tuple(q.shape))
        out: torch.Tensor = wrapper.run(q[0], k[0], v[0])
        return out[None]

    return attend


PEERS: Mapping[str, tuple[Callable[[BlockPlan], Attend], str]] = MappingProxyType(
    {
        "cudnn": (cudnn, "nvidia-cudnn-frontend"),
        "cudnn 8 bits": (cudnn_8_bits, "nvidia-cudnn-frontend"),
        "flashinfer": (flashinfer, "flashinfer-python"),
    }
)
"""By name: what makes the attention of a plan, and the distribution it comes from."""


def runs_of(
    qkv: tuple[torch.Tensor, ...], plan: BlockPlan
) -> tuple[dict[str, Run], dict[str, str]]:
    """Return calls on inputs [B, S, H, D] that give [B, S, H, D], and versions, by name.

    A peer that cannot be had is left out with a word.
    """
    heads_first = [x.transpose(1, 2).contiguous() for x in qkv]
    runs: dict[str, Run] = {}
    for name, (make, _) in PEERS.items():
        try:
            attend = make(plan)
        except UnsupportedBackendError as error:
            print(f"left out: {name}, {error}", flush=True)
            continue
        runs[name] = partial(_turned, attend, *heads_first)
    return runs, {name: version_of(PEERS[name][1]) for name in runs}


def _turned(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v).transpose(1, 2)
