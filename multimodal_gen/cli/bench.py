"""`sglang attention bench`: what dense attention takes on this machine, and a table of it."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multimodal_gen.cli.options import AsJson, Settings, takes
from multimodal_gen.cli.table import Row, echo, table, wrapped
from multimodal_gen.errors import UsageError
from multimodal_gen.files import naming_file, require_file
from multimodal_gen.runtime.backend_names import parse_attention_backend
from multimodal_gen.runtime.server_args import SETTINGS
from multimodal_gen.settings import Setting

if TYPE_CHECKING:
    import torch

    from multimodal_gen.runtime.benchmark import BackendTime, ShapeTimes
    from multimodal_gen.runtime.layers.attention.auto_table import CallShape
    from multimodal_gen.runtime.platforms import AttentionBackendEnum

_MODEL = replace(
    SETTINGS["model_path"],
    default=None,
    help="Measure at the heads of this pipeline's denoisers, with the numbers of tokens of "
    "--tokens. Reads its configs only.",
)
_DTYPE = replace(SETTINGS["dtype"], help="Dtype of q, k and v. auto: as in `sglang generate`.")

_TOKENS = (1024, 4096, 16384, 32760, 75600)
_TEXT = (77, 256, 512)


_ShapeOption = Annotated[
    list[str] | None,
    Setting(
        many=True,
        metavar="BxSxHxD",
        help="Batch, tokens, heads and head size of the calls to measure, e.g. 1x4096x24x128; "
        ":keys=N and :kv_heads=N where they differ, :mask with some keys masked. May be "
        "repeated. Default: the shapes of the package's own table; on the CPU the small ones.",
    ),
]
_TokensOption = Annotated[
    list[int] | None,
    Setting(
        many=True,
        metavar="N",
        ge=1,
        help="Tokens of the denoiser with --model-path. May be repeated. Default: "
        f"{', '.join(map(str, _TOKENS))}.",
    ),
]
_BackendOption = Annotated[
    list[str] | None,
    Setting(
        many=True,
        metavar="NAME",
        help="Measure these alone. May be repeated. Default: every dense one that is present.",
    ),
]
_RoundsOption = Annotated[
    int, Setting(metavar="N", ge=1, help="How often each is timed, in turns.")
]
_SaveOption = Annotated[
    Path | None,
    Setting(
        metavar="FILE",
        help="Write what was measured to a new JSON file, for --attention-auto-table.",
    ),
]


@takes(_MODEL, _DTYPE, SETTINGS["device"])
def bench(
    shape: _ShapeOption = None,
    *,
    settings: Settings,
    tokens: _TokensOption = None,
    backend: _BackendOption = None,
    rounds: _RoundsOption = 5,
    save: _SaveOption = None,
    as_json: AsJson = False,
) -> None:
    """Time dense attention on this machine: every backend that is present, shape by shape.

    Each is called through a layer, and checked before it is timed: the relative error is that of
    rows drawn at random, against float64. A GPU is timed while it always has calls waiting; the
    host until a call returns. What takes longer of the two is what `auto` goes by.
    """
    from multimodal_gen.runtime import benchmark
    from multimodal_gen.runtime.generator import pick_device, pick_dtype
    from multimodal_gen.runtime.layers.attention.auto_table import write_tables

    _check_free(save)
    device = pick_device(settings["device"])
    dtype = pick_dtype(settings["dtype"], device)
    parsed = [parse_attention_backend(name, name="--backend") for name in backend or ()]
    named = [name for name in parsed if name is not None]
    if save is not None:
        benchmark.check_table_of(named, device)
    results = []
    for each in _shapes(shape, settings["model_path"], tokens, device):
        found = benchmark.measure(
            each,
            dtype=dtype,
            device=device,
            backends=named or None,
            rounds=rounds,
        )
        results.append(found)
        if not as_json:
            echo(_lines(found))
    if as_json:
        typer.echo(json.dumps([_as_dict(result) for result in results], indent=2))
    else:
        echo(_left_out(results))
    _check_timed(named, results)
    if save is not None:
        made = benchmark.table_of(results, device, source="sglang attention bench")
        _check_free(save)
        with naming_file(save, "--save"):
            write_tables(save, [made])
        typer.echo(f"table: {save}", err=as_json)


def _check_timed(named: "list[AttentionBackendEnum]", results: "list[ShapeTimes]") -> None:
    timed = {each.timing.backend for result in results for each in result.times}
    for backend in map(str, named):
        if backend in timed:
            continue
        found = (result.left_out.get(backend) for result in results)
        reasons = dict.fromkeys(reason for reason in found if reason is not None)
        raise UsageError(
            f"--backend must name what can be timed here, {backend} was at no shape: "
            f"{'; '.join(reasons)}; see `sglang attention list`, or leave it out"
        )


def _check_free(save: Path | None) -> None:
    if save is None:
        return
    exists = require_file(save, "--save")
    if save.is_dir():
        raise UsageError(
            f"--save must name a new file, got the folder {str(save)!r}; name a file in it"
        )
    if exists:
        raise UsageError(f"--save must name a new file, {str(save)!r} exists; remove it first")
    if not save.parent.is_dir():
        raise UsageError(f"--save must lie in a folder that exists, got {str(save)!r}")


def _shapes(
    texts: list[str] | None,
    model_path: str | None,
    tokens: list[int] | None,
    device: "torch.device",
) -> "tuple[CallShape, ...]":
    from multimodal_gen.runtime.benchmark import shapes_for
    from multimodal_gen.runtime.layers.attention.auto_table import CallShape

    if texts and model_path is not None:
        raise UsageError("--shape must not be given with --model-path, which has shapes of its own")
    if tokens and model_path is None:
        raise UsageError("--tokens must be given with --model-path; --shape has its own tokens")
    if model_path is not None:
        return _shapes_of_model(model_path, tuple(tokens or _TOKENS), device)
    return tuple(map(CallShape.parse, texts)) if texts else shapes_for(device)


def _shapes_of_model(
    model_path: str, tokens: tuple[int, ...], device: "torch.device"
) -> "tuple[CallShape, ...]":
    """Return the calls of a pipeline's denoisers, of which the configs do not tell the tokens."""
    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.generator import PipelineIndex, load_skeleton
    from multimodal_gen.runtime.layers.attention.auto_table import CallShape
    from multimodal_gen.runtime.layers.attention.request import AttentionRole

    with apply(load_skeleton(PipelineIndex.read(model_path), "auto", device)) as handle:
        sizes = handle.sizes()
    found: dict[CallShape, None] = {}
    for site, heads, kv_heads, head_size in sizes:
        if site.role is AttentionRole.ENCODER:
            continue
        for queries in tokens:
            for keys in _TEXT if site.role is AttentionRole.CROSS else (queries,):
                shape = CallShape(
                    batch=1,
                    queries=queries,
                    keys=keys,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_size=head_size,
                )
                found[shape] = None
    return tuple(found)


def _lines(result: "ShapeTimes") -> Iterator[str]:
    """Yield what was measured at one shape, the fastest first."""
    dtype = str(result.dtype).removeprefix("torch.")
    yield f"{result.shape} {dtype}"
    unasked = next((each for each in result.times if not each.never_unasked), None)
    rows = []
    for each in result.times:
        ms = each.timing.device_ms
        host = each.timing.host_ms
        cells = (
            each.label,
            f"{ms:.4f}",
            "-" if host is None else f"{host:.4f}",
            f"{result.shape.flop / ms / 1e9:.4g}",
            f"{each.relative_error:.1e}",
            "auto" if each is unasked else each.never_unasked,
        )
        rows.append(Row(cells))
    if rows:
        yield from table(("backend", "ms", "host ms", "TFLOP/s", "error", ""), rows)
    yield ""


def _left_out(results: "list[ShapeTimes]") -> Iterator[str]:
    """Yield what was not timed, and why; once where the reason is the same at several shapes."""
    counts = Counter(each for result in results for each in result.left_out.items())
    for (backend, reason), count in counts.items():
        where = "" if count == len(results) else f" at {count} of {len(results)} shapes"
        yield from wrapped(f"left out{where}: {backend}: {reason}")


def _as_dict(result: "ShapeTimes") -> dict[str, Any]:
    return {
        "shape": str(result.shape),
        "dtype": str(result.dtype).removeprefix("torch."),
        "times": [_time_as_dict(each, result.shape.flop) for each in result.times],
        "left_out": dict(result.left_out),
    }


def _time_as_dict(each: "BackendTime", flop: float) -> dict[str, Any]:
    return {
        "backend": each.timing.backend,
        "variant": each.timing.variant,
        "device_ms": each.timing.device_ms,
        "host_ms": each.timing.host_ms,
        "tflops": flop / each.timing.device_ms / 1e9,
        "relative_error": each.relative_error,
        "never_unasked": each.never_unasked,
    }
