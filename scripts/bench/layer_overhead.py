"""Python time a layer takes per call, and what it adds over calling the kernel directly.

Tensors are so small that the host, not the GPU, sets the pace: with the queue never full, the host
time per call is what Python and the launch cost. Of the package's own kernels, dense and sparse,
whole layers are timed, with plans that they made before, where a method's plan is not up to the
data.

    python3 scripts/bench/run.py layer_overhead --commit HASH [--only "sage_attn own"]
    python3 scripts/bench/run.py layer_overhead --commit HASH --against CHECKOUT  # see _against.py
    python3 scripts/bench/run.py layer_overhead --commit HASH --smoke    # few calls, on any machine

`--only direct` leaves the own kernels out, `--only own` the others.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch
from _harness import (
    DEVICE,
    rows_of,
    shuffled_rounds,
    synchronize,
    version_of,
    write_rows,
)

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.backends.sage_attn import SageAttnConfig
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import AttentionBackendEnum

HEADS, HEAD_SIZE, TOKENS, CALLS, SMOKE_CALLS = 4, 64, 128, 500, 2
# What the own kernels are timed on: several tiles of every method, which cut it evenly.
GRID = (12, 16, 16)
# Backend -> parameters.
OWN: MappingProxyType[str, dict[str, object]] = MappingProxyType(
    {
        "triton_attn": {},
        "sage_attn": {"kernel": "triton"},
        "sliding_tile_attn": {"window": (1, 1, 1), "skip_time_steps": 0},
        "video_sparse_attn": {"sparsity": 0.5, "tile_size": (4, 8, 8)},
        "sla_attn": {},
        "sage_sla_attn": {},
        "vmoba_attn": {
            "temporal_chunk_size": 2,
            "temporal_topk": 2,
            "spatial_chunk_size": (4, 4),
            "spatial_topk": 2,
            "st_chunk_size": (2, 4, 4),
            "st_topk": 4,
            "first_full_step": 0,
            "first_full_layer": 0,
        },
    }
)


def host_ms(
    contenders: dict[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return host milliseconds per call; a figure per round is the mean of `CALLS` calls."""
    calls = SMOKE_CALLS if options.smoke else CALLS
    for run in contenders.values():
        for _ in range(calls):
            run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in shuffled_rounds(contenders, options.rounds):
        run = contenders[name]
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times[name].append((time.perf_counter() - start) / calls * 1e3)
    return times


def draw(tokens: int) -> list[torch.Tensor]:
    """Return q, k and v."""
    shape = (1, tokens, HEADS, HEAD_SIZE)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]


def layer_on(asked: BackendPreference, site: LayerSite | None = None) -> LocalAttention | None:
    """Return a layer on the backend that is asked for; None, and says why, where it cannot run."""
    scope = SelectionScope(default=asked)
    try:
        layer = LocalAttention(
            HEADS, HEAD_SIZE, compute_dtype=torch.bfloat16, scope=scope, site=site
        )
    except UnsupportedBackendError as error:
        print(f"left out: {error}")
        return None
    if layer.backend is not asked.backend:
        print(f"left out: {asked.backend}, {layer.report().entries[-1].selection.reason}")
        return None
    return layer


def main(arguments: argparse.Namespace) -> int:
    """Time layers and the kernels behind them, interleaved; append to `layer_overhead.csv`."""
    q, k, v = draw(TOKENS)
    for name in ("torch_sdpa", "torch_cudnn_sdpa", "fa", "sage_attn"):
        if arguments.only not in f"{name} direct":
            continue
        # What a package takes is known by calling it; our own kernels follow below.
        config = SageAttnConfig(kernel="sageattention") if name == "sage_attn" else None
        backend = AttentionBackendEnum.parse(name)
        asked = BackendPreference(source=Source.SETTINGS, backend=backend, config=config)
        layer = layer_on(asked)
        if layer is None:
            continue
        direct = direct_call(name, q, k, v)
        with torch.inference_mode():
            expected, actual = direct(), layer(q, k, v)
            torch.testing.assert_close(actual, expected.view_as(actual))
            contenders = {
                f"{name} direct": direct,
                f"{name} layer": lambda layer=layer: layer(q, k, v),
            }
            times = host_ms(contenders, arguments)
        rows = rows_of(
            times,
            commit=arguments.commit,
            benchmark="layer_overhead",
            case=f"host time per call, {name}",
            shape=f"B1 H{HEADS} S{TOKENS} D{HEAD_SIZE} bf16",
            flop=0.0,
            flop_formula="host time only",
            errors=dict.fromkeys(times, 0.0),
            versions=dict.fromkeys(times, version_of("torch")),
        )
        write_rows(arguments.out / "layer_overhead.csv", rows)
        added = (rows[1].median_ms - rows[0].median_ms) * 1e3
        print(f"{name}: the layer adds {added:.1f} us per call")
    time_own_layers(arguments)
    return 0


def time_own_layers(arguments: argparse.Namespace) -> None:
    """Time layers on the package's own kernels; append to `layer_overhead.csv`."""
    tokens = math.prod(GRID)
    q, k, v = draw(tokens)
    contenders: dict[str, Callable[[], object]] = {}
    with torch.inference_mode(), set_forward_context(0, latent_grid=GRID, num_steps=2):
        for name, options in OWN.items():
            if arguments.only not in f"{name} own":
                continue
            backend = AttentionBackendEnum.parse(name)
            cls = find_backend(backend, current_environment().platform).config_cls
            asked = BackendPreference(
                source=Source.SETTINGS, backend=backend, config=cls(**options)
            )
            layer = layer_on(asked, LayerSite(layer=0))
            if layer is None:
                continue
            layer(q, k, v)
            contenders[layer.report().entries[-1].selection.label] = partial(layer, q, k, v)
        times = host_ms(contenders, arguments) if contenders else {}
    for label, figures in times.items():
        rows = rows_of(
            {label: figures},
            commit=arguments.commit,
            benchmark="layer_overhead",
            case=f"host time per call of a whole layer, {label}",
            shape=f"B1 H{HEADS} {'x'.join(map(str, GRID))} S{tokens} D{HEAD_SIZE} bf16",
            flop=0.0,
            flop_formula="host time only",
            errors={label: 0.0},
            versions={label: version_of("triton")},
        )
        write_rows(arguments.out / "layer_overhead.csv", rows)
        print(f"{label}: {rows[0].median_ms * 1e3:.1f} us per call of the layer")


def direct_call(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return the plain kernel call a careful user would write, with nothing around it."""
    if name == "torch_sdpa":
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def run_sdpa() -> torch.Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return sdpa(*heads_first).transpose(1, 2)

        return run_sdpa
    if name == "torch_cudnn_sdpa":
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention

        def run_cudnn() -> torch.Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return cudnn(*heads_first, None, True)[0].transpose(1, 2)

        return run_cudnn
    if name == "fa":
        import fa3_fwd_interface

        def run_fa() -> torch.Tensor:
            out = fa3_fwd_interface.flash_attn_func(q, k, v)
            return out[0] if isinstance(out, tuple) else out

        return run_fa
    import sageattention

    # The kernel smooths K in place, so a careful caller hands it a copy.
    return lambda: sageattention.sageattn(q, k.clone(), v, tensor_layout="NHD")
