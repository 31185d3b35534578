"""cuDNN's attention of operands in e4m3, through the graphs of the package nvidia-cudnn-frontend.

A graph is planned for each shape and kept. cuDNN takes one scale for each whole tensor, and on
compute capability 9.0 gives nothing but 8 bits: the output is rounded to e4m3 as well, relative to
the largest value, which no average of values exceeds.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side. Graphs name dimensions
in the order B, H, S, D, whatever the memory's.

Tests without a GPU check the calls against a package with the same signatures.
"""

import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from multimodal_gen.errors import UnsupportedBackendError, first_line
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.backends.common import attend_to_nothing, to_e4m3

# Weights are at most 1; a power of two leaves room for their sum.
_WEIGHT_SCALE = 256.0
# What is left of the range of e4m3 where rounded weights add up to more than 1.
_ROOM = 0.5


class _Shape(NamedTuple):
    """What a graph is planned for."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    causal: bool
    lse: bool
    device_index: int
    thread: int


class _Plan(NamedTuple):
    """A graph that was planned, its handle, and its tensors by name."""

    graph: Any
    handle: Any
    tensors: Mapping[str, Any]


def attend_e4m3(
    cudnn: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention of what e4m3 leaves of the tensors, and its log-sum-exp.

    Args:
        cudnn: the package.
        query: [B, Sq, H, D].
        key: [B, Sk, Hkv, D].
        value: [B, Sk, Hkv, Dv].
        scale: factor of the scores.
        causal: whether keys after the query are masked out, of as many keys as queries.
        lse: whether the log-sum-exp is wanted.

    Returns:
        [B, Sq, H, Dv] in the dtype of `query`, and fp32 [B, H, Sq] or None.

    Raises:
        UnsupportedBackendError: cuDNN plans no such graph.
    """
    if not (query.numel() and key.numel()):
        return attend_to_nothing(query, value)
    device, index = query.device, query.get_device()
    batch, num_queries, num_heads, head_size = query.shape
    shape = _Shape(
        *(batch, num_queries, key.shape[1], num_heads, key.shape[2], head_size, value.shape[3]),
        *(scale, causal, lse, index, threading.get_ident()),
    )
    (q, of_q), (k, of_k), (v, of_v) = map(_rounded, (query, key, value))
    of_out = of_v / _ROOM
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=q.dtype, device=device)
    stats = torch.empty(batch, num_heads, num_queries, 1, device=device) if lse else None
    largest_weight, largest_out = torch.empty(2, 1, 1, 1, 1, device=device)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "o": out,
        "stats": stats,
        "descale_q": of_q,
        "descale_k": of_k,
        "descale_v": of_v,
        "descale_s": torch.full_like(of_q, 1 / _WEIGHT_SCALE),
        "scale_s": torch.full_like(of_q, _WEIGHT_SCALE),
        "scale_o": 1 / of_out,
        "amax_s": largest_weight,
        "amax_o": largest_out,
    }
    with torch.cuda.device(index):  # of which a handle is; none where tensors lie elsewhere
        plan = _planned(cudnn, shape)
        cudnn.set_stream(handle=plan.handle, stream=torch.cuda.current_stream(device).cuda_stream)
        size = plan.graph.get_workspace_size()
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        pack = {tensor: given[name] for name, tensor in plan.tensors.items()}
        plan.graph.execute(pack, workspace, handle=plan.handle)
    return out.to(query.dtype).mul_(of_out), None if stats is None else stats.squeeze(-1)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, S, H, D] in e4m3, and the one scale of it, [1, 1, 1, 1]."""
    rounded, scale = to_e4m3(x.flatten(0, 1)[None], 1)
    return rounded.view(x.shape), scale.view(1, 1, 1, 1)


@static_cache(maxsize=128)
def _planned(cudnn: ModuleType, shape: _Shape) -> _Plan:
    """Return the graph for a shape; a handle serves one thread."""
    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
    )

    def layout(length: int, heads: int, size: int) -> dict[str, list[int]]:
        stride = [length * heads * size, size, heads * size, 1]
        return {"dim": [shape.batch, heads, length, size], "stride": stride}

    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    operands = {
        "q": layout(shape.num_queries, shape.num_heads, shape.head_size),
        "k": layout(shape.num_keys, shape.num_kv_heads, shape.head_size),
        "v": layout(shape.num_keys, shape.num_kv_heads, shape.value_size),
    }
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    inputs = {name: graph.tensor(name=name, data_type=kind.FLOAT, **one) for name in scales}
    for name, place in operands.items():
        inputs[name] = graph.tensor(name=name, data_type=kind.FP8_E4M3, **place)
    out, stats, largest_weight, largest_out = graph.sdpa_fp8(
        **inputs,
        attn_scale=shape.scale,
        use_causal_mask=shape.causal,
        generate_stats=shape.lse,
    )
    outputs = {
        "o": (out, kind.FP8_E4M3, layout(shape.num_queries, shape.num_heads, shape.value_size)),
        "amax_s": (largest_weight, kind.FLOAT, one),
        "amax_o": (largest_out, kind.FLOAT, one),
    }
    if shape.lse:
        dim = [shape.batch, shape.num_heads, shape.num_queries, 1]
        place = {"dim": dim, "stride": [dim[1] * dim[2], dim[2], 1, 1]}
        outputs["stats"] = (stats, kind.FLOAT, place)
    for tensor, dtype, place in outputs.values():
        tensor.set_output(True).set_data_type(dtype)
        tensor.set_dim(place["dim"]).set_stride(place["stride"])
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise UnsupportedBackendError(
            f"kernel fp8 of torch_cudnn_sdpa must get a call that cuDNN plans in e4m3, got "
            f"{shape.num_heads} heads of {shape.head_size} channels, {shape.num_queries} queries "
            f"and {shape.num_keys} keys: {first_line(error)}; leave kernel out"
        ) from error
    named = {name: tensor for name, (tensor, *_) in outputs.items()}
    return _Plan(graph, cudnn.create_handle(), {**inputs, **named})
