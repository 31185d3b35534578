"""What `layers.py` times of other packages, where they do not run as a kernel of a layer.

A peer is made of the inputs, its parameters and a call of our layer, whose own calls tell what it
is to compute. It returns what runs, and which distribution that is.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import _flash_attn_2
import torch
from _harness import DEVICE, Run, version_of

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse.plan import BlockPlan, Blocks
from multimodal_gen.kernels.cluster_attention.plan import Groups
from multimodal_gen.kernels.quantized_attention.api import quantized_attention
from multimodal_gen.kernels.tile_order.api import gather_tokens
from multimodal_gen.runtime.layers.attention.sparse.executors import groups, rows
from multimodal_gen.runtime.layers.attention.sparse.methods import vmoba_upstream
from multimodal_gen.runtime.layers.attention.sparse.methods.vmoba import VMoBAConfig

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Peer = Callable[[QKV, Mapping[str, Any], Callable[[str], Run]], tuple[Run, str]]
"""From q, k and v, the parameters, and what makes our layer of a method with them."""


def load(name: str) -> ModuleType:
    """Import a package, or say why the peer is left out."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken build fails in many ways
        raise UnsupportedBackendError(f"{type(error).__name__}: {error}") from error


def calls_of(run: Run, module: ModuleType, name: str) -> list[tuple[Any, ...]]:
    """Return the positional arguments of every call of a function of a module while `run` runs."""
    with mock.patch.object(module, name, wraps=getattr(module, name)) as function:
        run()
    return [call.args for call in function.call_args_list]


def comfy_kitchen(
    qkv: QKV, config: Mapping[str, Any], make: Callable[[str], Run]
) -> tuple[Run, str]:
    """Sol-Attn of comfy-kitchen, whose blocks have 64 tokens."""
    package = load("comfy_kitchen")
    if DEVICE != "cuda" or not package.sol_attn_is_available(torch.device("cuda")):
        raise UnsupportedBackendError("its kernel needs a GPU of SM80 or later")
    given = {**config, "tail": config["tail"] == "pooled"}
    given.pop("dense_above", None)
    return partial(package.sol_attn, *qkv, **given), version_of("comfy-kitchen")


def portable_8_bits(
    qkv: QKV, config: Mapping[str, Any], make: Callable[[str], Run]
) -> tuple[Run, str]:
    """Our own 8-bit attention on Triton, where a layer takes another kernel."""
    blocks = Blocks.regular(qkv[0].shape[1], 128)
    plan = BlockPlan.dense(blocks, blocks, DEVICE)
    return partial(quantized_attention, *qkv, plan, kernel="triton"), version_of("triton")


def flashinfer(qkv: QKV, config: Mapping[str, Any], make: Callable[[str], Run]) -> tuple[Run, str]:
    """FlashInfer's kernel for blocks of any size, on the clusters of a layer of SVG2."""
    package = load("flashinfer")
    made = calls_of(make("sparse_video_gen_2_attn"), groups, "cluster_attention")
    wrapper = package.sparse.VariableBlockSparseAttentionWrapper(
        torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE), backend="auto"
    )

    def run() -> torch.Tensor:
        for q, k, v, queries, keys, mask, out in made:
            out.copy_(variable_blocks(wrapper, q, k, v, queries, keys, mask))
        return made[0][-1] if len(made) == 1 else torch.cat([each[-1] for each in made], 2)

    return run, version_of("flashinfer-python")


def variable_blocks(
    wrapper: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Groups,
    keys: Groups,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return FlashInfer's attention of clusters, planned anew, as a layer has to."""
    (q,) = gather_tokens((q,), queries.order)
    k, v = gather_tokens((k, v), keys.order)
    wrapper.plan(
        block_mask_map=mask[0],
        block_row_sz=queries.counts[0],
        block_col_sz=keys.counts[0],
        num_qo_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        q_data_type=q.dtype,
    )
    found = wrapper.run(*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)))
    place = queries.order[0].long().T.unsqueeze(-1).expand_as(q[0])
    return torch.empty_like(q).scatter_(1, place[None], found.transpose(0, 1)[None])


def fastvideo_vmoba(
    qkv: QKV, config: Mapping[str, Any], make: Callable[[str], Run]
) -> tuple[Run, str]:
    """V-MoBA of its authors; FlashAttention 3 computes its dense parts without flash-attn 2."""
    theirs, version = version_of("fastvideo-kernel"), version_of("flash-attn")
    standing_in = nullcontext()
    if not _flash_attn_2.is_installed():
        load(_flash_attn_2.INSTEAD)
        standing_in, version = _flash_attn_2.standing_in(), version_of("fa3-fwd")
        version = f"dense parts by {version}"
    with standing_in:
        load(vmoba_upstream.UPSTREAM)
    (call, chunks, *_), *_ = calls_of(make("vmoba_attn"), rows, "attend_choice")
    settings = VMoBAConfig(**config)
    rule = settings.rule(settings.kind(0))
    attend = partial(vmoba_upstream.attend_upstream, keeps_own=False, backend="vmoba_attn")
    return partial(attend, call, chunks.keys.order, rule), f"{theirs}, {version}"


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "comfy_kitchen": comfy_kitchen,
        "fastvideo_vmoba": fastvideo_vmoba,
        "flashinfer": flashinfer,
        "portable_8_bits": portable_8_bits,
    }
)
