"""What `sparse.py` compares our code with: dense attention, and the kernels of other packages.

Other kernels get tensors in the order they want, so moving tokens into tiles and back is counted
for our layers only.
"""

import importlib
import warnings
from collections.abc import Callable
from functools import partial

import torch
from _attention import first_of, sdpa
from _harness import DEVICE, Run, version_of
from _sparse_contenders import (
    Contender,
    LeftOutError,
    Maker,
    Setting,
    Tiled,
    in_place,
    need,
    need_tiles_alone,
    sta_engine,
    vsa_engine,
)

from multimodal_gen.kernels.block_sparse.plan import BlockPlan
from multimodal_gen.kernels.tile_order.api import tile_order
from multimodal_gen.runtime.layers.attention.sparse.methods.sta.upstream import upstream_reasons
from multimodal_gen.runtime.layers.attention.sparse.tiles import SequenceLayout, SparseCall
from multimodal_gen.runtime.layers.attention.sparse.windows import effective_window

# Two whole operators that select tiles by scores of different precision choose differently.
OWN_SELECTION = 0.5
# What needs no trial in a process of its own.
SAFE = ("fa3 dense", "cudnn dense", "sdpa dense")


def fa3_dense(setting: Setting) -> Contender:
    """FlashAttention 3."""
    function = _import("fa3_fwd_interface").flash_attn_func
    return _dense("fa3 dense", lambda: first_of(function(*setting.inputs.qkv)), "fa3-fwd")


def _dense(name: str, run: Run, distribution: str) -> Contender:
    version = version_of(distribution)
    return Contender(name=name, kind="dense", run=run, take=in_place, version=version)


def cudnn_dense(setting: Setting) -> Contender:
    """PyTorch's attention by cuDNN."""
    if DEVICE == "cpu":
        raise LeftOutError("needs a GPU")
    if not setting.case.slow_peers:
        raise LeftOutError("dense.py has it at this shape")
    function = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run() -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in setting.inputs.qkv)
        return function(*heads_first, None, False)[0].transpose(1, 2)

    return _dense("cudnn dense", run, "torch")


def sdpa_dense(setting: Setting) -> Contender:
    """PyTorch's attention on the CPU, where nothing else is dense."""
    if DEVICE != "cpu":
        raise LeftOutError("stands in on the CPU")
    return _dense("sdpa dense", lambda: sdpa(*setting.inputs.qkv), "torch")


def fastvideo_sta(setting: Setting) -> Contender:
    """Sliding Tile Attention of fastvideo-kernel."""
    case = setting.case
    need(case.sta, "not measured here")
    query, key, value = setting.inputs.qkv
    tokens = query.shape[1]
    layout = SequenceLayout(grid=case.grid, start=0, num_queries=tokens, num_keys=tokens)
    call = SparseCall(query=query, key=key, value=value, layout=layout, scale=case.scale)
    order = tile_order(case.grid, case.sta_tile)
    windows = [effective_window(case.window, order.tiles)] * case.heads
    reasons = upstream_reasons(call, order, windows)
    need(not reasons, "; ".join(reasons))
    function = _import("fastvideo_kernel").sliding_tile_attention
    q, k, v, _ = setting.sta.heads_first
    options = {"has_text": case.text > 0, "seq_shape": "x".join(map(str, case.grid))}
    return Contender(
        name="sta fastvideo-kernel",
        kind="sta",
        run=lambda: function(q, k, v, windows, case.text, **options),
        take=setting.sta.take_heads_first,
        version=version_of("fastvideo-kernel"),
    )


def fastvideo_vsa(setting: Setting) -> Contender:
    """The whole operator of fastvideo-kernel, with its own selection."""
    case = setting.case
    need_tiles_alone(case)
    function = _import("fastvideo_kernel").video_sparse_attn
    q, k, v, gate = setting.vsa.padded
    lengths = setting.vsa.sequence.order.lengths

    def run() -> torch.Tensor:
        return function(
            q,
            k,
            v,
            variable_block_sizes=lengths,
            q_variable_block_sizes=lengths,
            topk=case.kept,
            block_size=case.vsa_tile,
            compress_attn_weight=gate,
        )

    return Contender(
        name="vsa operator fastvideo-kernel",
        kind="vsa gate",
        run=run,
        take=setting.vsa.take_padded,
        version=version_of("fastvideo-kernel"),
        tensors=4,
        bound=OWN_SELECTION,
    )


def fastvideo_vsa_fine(setting: Setting) -> Contender:
    """The fine stage of fastvideo-kernel, on the tiles that we select."""
    need_tiles_alone(setting.case)
    function = _import("fastvideo_kernel").block_sparse_attn
    if not callable(function):  # before 0.3 a submodule of that name holds it
        function = _import("fastvideo_kernel.block_sparse_attn").block_sparse_attn
    q, k, v, _ = setting.vsa.padded
    lengths, keep = setting.vsa.sequence.order.lengths, _map(setting.vsa_plan)
    return Contender(
        name="vsa fine fastvideo-kernel",
        kind="vsa",
        run=lambda: function(q, k, v, keep, lengths)[0],
        take=setting.vsa.take_padded,
        version=version_of("fastvideo-kernel"),
    )


def flex_sta(setting: Setting) -> Contender:
    """FlexAttention on the tiles of Sliding Tile Attention."""
    need(setting.case.sta, "not measured here")
    return _flex("sta", setting, setting.sta, lambda: setting.sta_plan, {})


def flex_vsa(setting: Setting) -> Contender:
    """FlexAttention on the fine stage of Video Sparse Attention."""
    need_tiles_alone(setting.case)
    options = {"BLOCK_M": 64, "BLOCK_N": 64}
    return _flex("vsa", setting, setting.vsa, lambda: setting.vsa_plan, options)


def _flex(
    kind: str,
    setting: Setting,
    tiled: Tiled,
    plan: Callable[[], BlockPlan],
    options: dict[str, object],
) -> Contender:
    case = setting.case
    need(case.slow_peers, "compiles for long; measured on another grid")
    need(not case.text and tiled.sequence.order.uniform, "needs whole tiles alone")
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    keep, size = _map(plan()), tiled.sequence.order.largest
    q, k, v, _ = tiled.heads_first
    counts = keep.sum(-1, dtype=torch.int32)
    indices = keep.byte().argsort(dim=-1, descending=True, stable=True).int()

    def kept(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return keep[0, h % keep.shape[1], i // size, j // size]

    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=size, mask_mod=kept
    )
    run = partial(flex_attention, q, k, v, block_mask=mask)
    if DEVICE == "cuda":
        compiled = torch.compile(flex_attention, dynamic=False)
        kernel_options = {"USE_TMA": True, **options}
        run = partial(compiled, q, k, v, block_mask=mask, kernel_options=kernel_options)
    else:
        run = partial(_without_warnings, run)
    return Contender(
        name=f"{kind} flex_attention",
        kind=kind,
        run=run,
        take=tiled.take_heads_first,
        version=version_of("torch"),
    )


def _without_warnings(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not compiled: there is no speed to lose here
        return run()


def _map(plan: BlockPlan) -> torch.Tensor:
    """Return the lists of a plan whose rows all keep as many blocks: bool [1, 1|H, N, N]."""
    keep = torch.zeros((*plan.indices.shape[:3], plan.kv.num), dtype=torch.bool)
    keep = keep.to(plan.device)
    return keep.scatter_(-1, plan.indices.long(), True)


def _import(module: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken build fails in many ways
        raise LeftOutError(f"{type(error).__name__}: {error}") from error


OTHERS: dict[str, Maker] = {
    "fa3 dense": fa3_dense,
    "cudnn dense": cudnn_dense,
    "sdpa dense": sdpa_dense,
    "sta engine, fa4": sta_engine("fa4"),
    "vsa engine, fa4": vsa_engine("fa4"),
    "sta fastvideo-kernel": fastvideo_sta,
    "vsa operator fastvideo-kernel": fastvideo_vsa,
    "vsa fine fastvideo-kernel": fastvideo_vsa_fine,
    "sta flex_attention": flex_sta,
    "vsa flex_attention": flex_vsa,
}
