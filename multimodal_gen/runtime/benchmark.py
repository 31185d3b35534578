"""What dense backends take on this machine, shape by shape: checked first, then timed in turns.

Every backend is called as a model calls it, through a layer, so what the layer adds is counted. On
a GPU two times are taken: of the device, while it always has calls waiting, and of the host, until
a call returns. GPUs are power-capped, so backends are compared in rounds of one process, each round
in an order drawn anew, and figures are medians over the rounds.

Shapes: B batch, S tokens, H heads, D head size; q/k suffix = query/key side.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from multimodal_gen.errors import UsageError, first_line
from multimodal_gen.runtime.generator.attention_check import exact_rows, sample_rows
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.auto_table import (
    AutoTable,
    CallShape,
    Measured,
    versions_of,
)
from multimodal_gen.runtime.layers.attention.backends.registry import (
    all_backends,
    current_environment,
    environment_for,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.call import AttentionCall
from multimodal_gen.runtime.layers.attention.request import (
    AttentionRequest,
    AttentionRole,
    Environment,
    Feature,
    Timing,
)
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_NOTHING_FOR_AUTO = (
    "a table must hold a time of a backend that `auto` may take, got none; leave out --backend, or "
    "--save"
)

_SELF = (
    "256x24x128 512x24x128 1024x24x128 2048x24x128 4096x24x128 8192x24x128 16384x24x128 "
    "32760x12x128 32760x24x128 32760x40x128 75600x24x128 75600x40x128 118800x24x128 "
    "256x16x64 1024x16x64 4096x10x64 4096x16x64 16384x16x64 65536x16x64 "
    "256x16x72 1024x16x72 4096x16x72 16384x16x72 65536x16x72 "
    "256x16x80 1024x16x80 4096x16x80 16384x16x80 65536x16x80 "
    "256x16x96 1024x16x96 4096x16x96 16384x16x96 65536x16x96"
)
_BATCHES = (
    "4x256x24x128 4x1024x24x128 4x1024x16x64 2x4096x10x64 2x4096x24x128 4x4096x40x128 4x4096x16x64 "
    "2x16384x24x128 2x32760x16x128 2x75600x12x128"
)
_CROSS = tuple(
    f"1x{queries}x{heads}:keys={keys}"
    for heads, lengths in (("24x128", (1024, 4096, 16384, 32760, 75600)), ("16x64", (1024, 4096)))
    for queries in lengths
    for keys in (77, 256, 512)
)
_MASKED = (
    "1x512x24x128 2x512x24x128 1x4096x24x128 2x4096x24x128 2x4096x16x64 2x16384x24x128 "
    "1x32760x24x128 2x4096x24x128:keys=512 2x32760x24x128:keys=512 1x4096x24x128:keys=77"
)
_GROUPED = (
    "1x1024x24x128:kv_heads=8 1x4096x24x128:kv_heads=8 1x16384x32x128:kv_heads=8 "
    "1x65536x32x128:kv_heads=8 1x4096x16x64:kv_heads=4"
)
SHAPES: tuple[CallShape, ...] = tuple(
    map(
        CallShape.parse,
        (
            *(f"1x{text}" for text in _SELF.split()),
            *_BATCHES.split(),
            *_CROSS,
            *(f"{text}:mask" for text in _MASKED.split()),
            *_GROUPED.split(),
        ),
    )
)
"""What the package's own table is measured at."""

# On the CPU, longer calls take minutes.
_MOST_ON_CPU = 1 << 22

_WARM_UP = 3
_SAMPLED_ROWS = 32
# A round of one backend: about so much time, and at most so many calls, whose launches all fit into
# the queue of a GPU.
_ROUND_MS = 5.0
_MOST_CALLS = 50
# Clock cycles of a GPU in a millisecond, at most.
_CYCLES_PER_MS = 2_000_000

# A relative error of kernels that round weights to the dtype is a third of its eps.
_EXACT_BOUNDS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}
)
# Weights and values of 4 significant bits err by 2.6 % each; more is a wrong kernel.
_QUANTISED_BOUND = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTime:
    """What one backend took at one shape.

    Attributes:
        timing: medians of device and host.
        label: the backend with its variant.
        p20_ms: device time that a fifth of the rounds stayed below.
        p80_ms: device time that four fifths stayed below.
        rounds: how many there were.
        relative_error: norm of the error over norm of the result, of rows drawn at random, against
            float64.
        versions: of the packages behind it, by distribution.
        never_unasked: why `auto` does not take it, however fast; "" where it may.
    """

    timing: Timing
    label: str
    p20_ms: float
    p80_ms: float
    rounds: int
    relative_error: float
    versions: Mapping[str, str]
    never_unasked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTimes:
    """What was measured at one shape.

    Attributes:
        shape: the shape.
        dtype: dtype of q, k and v.
        times: fastest first.
        left_out: why backends were not timed, by their names.
    """

    shape: CallShape
    dtype: torch.dtype
    times: tuple[BackendTime, ...]
    left_out: Mapping[str, str]


def shapes_for(device: torch.device) -> tuple[CallShape, ...]:
    """Return the shapes of `SHAPES` that a device can be measured at in reasonable time."""
    if device.type != "cpu":
        return SHAPES
    return tuple(s for s in SHAPES if s.queries * s.keys * s.heads * s.batch <= _MOST_ON_CPU)


def measure(
    shape: CallShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backends: Sequence[AttentionBackendEnum] | None = None,
    rounds: int = 5,
) -> ShapeTimes:
    """Check and time every dense backend that can serve calls of a shape.

    Args:
        shape: the shape.
        dtype: dtype of q, k and v.
        device: a GPU that torch addresses as "cuda", or the CPU.
        backends: those to time; None for all that are present.
        rounds: how often each is timed, in turns.

    Raises:
        UsageError: the device is of another kind, or a backend is sparse.
    """
    chosen = _dense_ones(backends)
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"a benchmark must run on a cuda or cpu device, got {device}")
    environment = environment_for(device, current_environment())
    left_out: dict[str, str] = {}
    found = {}
    with torch.inference_mode():
        try:
            call = _draw(shape, dtype, device)
            rows, expected = _reference(shape, call)
        except RuntimeError as failure:  # of memory, mostly
            reason = f"no inputs: {first_line(failure)}"
            none_ran = dict.fromkeys(map(str, chosen), reason)
            return ShapeTimes(shape=shape, dtype=dtype, times=(), left_out=none_ran)
        for backend in chosen:
            layer = _contender(backend, shape, dtype, environment)
            error: float | str = ""
            if isinstance(layer, LocalAttention):
                quantised = find_backend(backend, environment.platform).never_unasked
                error = _check(layer, call, rows, expected, quantised="rounds" in quantised)
                if isinstance(error, float):
                    found[backend] = layer, error
                    continue
            left_out[str(backend)] = str(error or layer)
        runs = {name: _run(layer, call) for name, (layer, _) in found.items()}
        samples = _timed(runs, device, rounds)
    times = [
        _result(layer, error, samples[name], environment) for name, (layer, error) in found.items()
    ]
    return ShapeTimes(
        shape=shape,
        dtype=dtype,
        times=tuple(sorted(times, key=lambda t: t.timing.ms)),
        left_out=left_out,
    )


def check_table_of(backends: Sequence[AttentionBackendEnum], device: torch.device) -> None:
    """Refuse a table of backends of which `auto` may take none.

    Raises:
        UsageError: there are some, and all are taken only when asked for.
    """
    platform = environment_for(device, current_environment()).platform
    if backends and all(find_backend(each, platform).never_unasked for each in backends):
        raise UsageError(_NOTHING_FOR_AUTO)


def table_of(results: Sequence[ShapeTimes], device: torch.device, *, source: str) -> AutoTable:
    """Return measurements as a table that `auto` can go by.

    Raises:
        UsageError: nothing was timed that `auto` may take.
    """
    if all(each.never_unasked for result in results for each in result.times):
        raise UsageError(_NOTHING_FOR_AUTO)
    environment = environment_for(device, current_environment())
    versions = {"torch": versions_of(environment)["torch"]}
    if "triton" in versions_of(environment):
        versions["triton"] = versions_of(environment)["triton"]
    for result in results:
        for each in result.times:
            versions |= each.versions
    capability = environment.capability
    name = environment.device_name
    return AutoTable(
        name=", ".join((name, *(f"{key} {version}" for key, version in versions.items()))),
        platform=str(environment.platform),
        device=name,
        capability=capability.as_version_str() if capability else "",
        versions=dict(sorted(versions.items())),
        source=source,
        measured=tuple(
            Measured(
                shape=result.shape,
                dtype=str(result.dtype).removeprefix("torch."),
                timings=tuple(each.timing for each in result.times if not each.never_unasked),
            )
            for result in results
            if any(not each.never_unasked for each in result.times)
        ),
    )


def _dense_ones(
    backends: Sequence[AttentionBackendEnum] | None,
) -> tuple[AttentionBackendEnum, ...]:
    """Return the backends to time, each once."""
    if backends is None:
        return tuple(backend for backend in all_backends() if not backend.is_sparse)
    sparse = [str(backend) for backend in backends if backend.is_sparse]
    if sparse:
        raise UsageError(
            f"a benchmark must be of dense backends, got {', '.join(sparse)}; what a sparse one "
            f"takes depends on the model: see `sglang attention compare`"
        )
    return tuple(dict.fromkeys(backends))


def _draw(shape: CallShape, dtype: torch.dtype, device: torch.device) -> AttentionCall:
    """Return normal inputs; of a masked shape, every sample lacks up to a quarter of its keys."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.queries, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads)
    query, key, value = (
        torch.randn(
            (shape.batch, tokens, heads, shape.head_size),
            dtype=dtype,
            device=device,
            generator=generator,
        )
        for tokens, heads in sizes
    )
    mask = None
    if shape.masked:
        missing = torch.arange(1, shape.batch + 1, device=device) * shape.keys // (4 * shape.batch)
        mask = torch.arange(shape.keys, device=device) < (shape.keys - missing)[:, None]
    return AttentionCall(query, key, value, mask)


def _reference(shape: CallShape, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some rows, [R], and attention of these queries in float64, [B, R, H, D].

    Rows are among the first three quarters, which no mask covers.
    """
    unmasked = max(3 * shape.queries // 4, 1)
    rows = sample_rows(unmasked, 0, _SAMPLED_ROWS, device=call.query.device)
    layer = LocalAttention(shape.heads, shape.head_size, shape.kv_heads)
    return rows, exact_rows(layer, call, rows, (call.value,))[0]


def _contender(
    backend: AttentionBackendEnum, shape: CallShape, dtype: torch.dtype, environment: Environment
) -> LocalAttention | str:
    """Return a layer on a backend, or why it cannot serve such calls."""
    cls = find_backend(backend, environment.platform)
    request = AttentionRequest(
        environment=environment,
        head_size=shape.head_size,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        dtype=dtype,
        role=AttentionRole.SELF if shape.queries == shape.keys else AttentionRole.CROSS,
    )
    variant = cls.choose_variant(request)
    if variant is None:
        return "; ".join(cls.unsupported_reasons(request))
    if shape.masked and not variant.features & {Feature.KEY_MASK, Feature.VARLEN}:
        return f"{variant.name} has no key mask"
    return LocalAttention(
        shape.heads,
        shape.head_size,
        shape.kv_heads,
        is_cross_attention=request.role is AttentionRole.CROSS,
        scope=SelectionScope(
            default=BackendPreference(source=Source.SETTINGS, backend=backend), strict=True
        ),
    )


def _check(
    layer: LocalAttention,
    call: AttentionCall,
    rows: torch.Tensor,
    expected: torch.Tensor,
    *,
    quantised: bool,
) -> float | str:
    """Return the relative error of a layer, or why it must not be timed."""
    try:
        out = _run(layer, call)()
    except Exception as failure:  # other people's kernels may fail in any way
        return f"failed: {first_line(failure)}"
    report = layer.report()
    if report.detours:
        (detour, *_) = report.detours
        return f"{detour.selection.label} serves such calls: {detour.selection.reason}"
    error = float((out[:, rows].double() - expected).norm() / expected.norm())
    bound = _QUANTISED_BOUND if quantised else _EXACT_BOUNDS[out.dtype]
    return error if error < bound else f"is wrong: its relative error is {error:.2e}"


def _run(layer: LocalAttention, call: AttentionCall) -> Callable[[], torch.Tensor]:
    return partial(layer, *call[:4])


def _timed(
    runs: Mapping[AttentionBackendEnum, Callable[[], object]], device: torch.device, rounds: int
) -> dict[AttentionBackendEnum, list[tuple[float, float | None]]]:
    """Return milliseconds of device and host per call and round."""
    calls = {}
    for name, run in runs.items():
        for _ in range(_WARM_UP):
            run()
        start = _now(device)
        run()
        calls[name] = min(max(round(_ROUND_MS / (_now(device) - start)), 1), _MOST_CALLS)
    samples: dict[AttentionBackendEnum, list[tuple[float, float | None]]] = {n: [] for n in runs}
    order, draw = list(runs), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            samples[name].append(_sample(runs[name], calls[name], device))
    return samples


def _sample(
    run: Callable[[], object], calls: int, device: torch.device
) -> tuple[float, float | None]:
    start = _now(device)
    for _ in range(calls):
        run()
    if device.type == "cpu":
        return (_now(device) - start) / calls, None
    host_ms = time.perf_counter() * 1e3 - start
    _now(device)
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        # The device waits until all calls are in its queue.
        cycles = int((1.5 * host_ms + 0.2) * _CYCLES_PER_MS)
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(calls):
            run()
        last.record()
    _now(device)
    return first.elapsed_time(last) / calls, host_ms / calls


def _now(device: torch.device) -> float:
    """Return milliseconds of the clock once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def _result(
    layer: LocalAttention,
    error: float,
    samples: Sequence[tuple[float, float | None]],
    environment: Environment,
) -> BackendTime:
    selection = layer.report().entries[0].selection
    cls = find_backend(selection.backend, environment.platform)
    variant = next(v for v in cls.variants if v.name == selection.variant)
    device = sorted(ms for ms, _ in samples)
    host = [ms for _, ms in samples if ms is not None]
    return BackendTime(
        timing=Timing(
            backend=str(selection.backend),
            variant=selection.variant,
            device_ms=_rounded(statistics.median(device)),
            host_ms=_rounded(statistics.median(host)) if host else None,
        ),
        label=selection.label,
        p20_ms=_rounded(device[int(0.2 * (len(device) - 1))]),
        p80_ms=_rounded(device[round(0.8 * (len(device) - 1))]),
        rounds=len(samples),
        relative_error=error,
        versions={p.distribution: environment.version(p) or "" for p in variant.packages},
        never_unasked=cls.never_unasked,
    )


def _rounded(ms: float) -> float:
    """Return a time with as many digits as mean anything."""
    return float(f"{ms:.5g}")
