"""`sglang attention`: which backends this machine has, and which ones a pipeline would run."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from multimodal_gen.cli.describe import describe
from multimodal_gen.cli.options import App, AsJson, Settings, takes
from multimodal_gen.cli.table import Row, echo, table, wrapped
from multimodal_gen.runtime.backend_names import ROLES
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs
from multimodal_gen.settings import Setting

if TYPE_CHECKING:
    from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Environment
    from multimodal_gen.runtime.platforms import AttentionBackendEnum

app = App(help="Say which attention backends run here, and why.")


app.command()(describe)

_EXPLAINED = (
    "model_path",
    "attention_backend",
    "attention_backend_config",
    "component_attention_backends",
    "attention_config",
    "attention_auto_table",
    "strict_attention",
    "dtype",
    "device",
)
_DTYPE = replace(SETTINGS["dtype"], help="Dtype of the layer. auto: as in `sglang generate`.")
_HEAD_SIZE = Setting(
    name="head_size",
    kind=int,
    default=128,
    metavar="N",
    ge=1,
    help="Channels per head of the layer.",
)
_HEADS = Setting(name="heads", kind=int, default=24, metavar="N", ge=1, help="Heads of the layer.")
_ROLE = Setting(
    name="role", kind=str, default="self", choices=ROLES, help="What the layer attends to."
)


@app.command(name="list")
@takes(_HEAD_SIZE, _HEADS, _DTYPE, _ROLE)
def list_backends(settings: Settings, as_json: AsJson = False) -> None:
    """List every attention backend: usable on this machine, or why not and what to install.

    Whether a backend is usable depends on the layer it is for; the options describe that layer.
    """
    from multimodal_gen.kernels.launch.self_check import self_checks
    from multimodal_gen.runtime.layers.attention import selector
    from multimodal_gen.runtime.layers.attention.backends.registry import (
        all_backends,
        current_environment,
    )
    from multimodal_gen.runtime.layers.attention.scope import AUTO

    environment = current_environment()
    request = _request(environment, settings)
    picked = selector.after_self_checks(lambda known: selector.resolve(known, AUTO), request)
    found = [_status(backend, request) for backend in all_backends()]
    broken, checks = _broken_plugins(), self_checks()
    if as_json:
        document = {
            "platform": _platform(environment),
            "request": _request_as_dict(request),
            "auto": {
                "backend": str(picked.backend),
                "variant": picked.variant,
                "reason": picked.reason,
            },
            "backends": found,
            "self_checks": [asdict(check) for check in checks],
            "broken_plugins": broken,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    echo(wrapped(f"platform: {_platform_line(environment)}"))
    echo(wrapped(f"layer:    {_request_line(request)}"))
    echo(wrapped(f"auto:     {picked.label}: {picked.reason}"))
    typer.echo("")
    rows = [
        Row(
            (item["backend"], "yes" if item["usable"] else "no", item["variant"] or "-"),
            [item["summary"]] if item["usable"] else selector.condensed(item["reasons"]),
        )
        for item in found
    ]
    echo(table(("backend", "usable", "as"), rows))
    for check in checks:
        echo(wrapped(f"note: {check}"))
    if broken:
        typer.echo("")
        rows = [Row((item["name"], item["group"]), [item["error"]]) for item in broken]
        echo(table(("broken plug-in", "entry-point group"), rows))


@app.command()
@takes(*(SETTINGS[name] for name in _EXPLAINED))
def explain(settings: Settings, as_json: AsJson = False) -> None:
    """Say which backend every attention layer of a pipeline would run, and why.

    Reads the pipeline's configs only, never its weights, so it takes seconds on any model.
    """
    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.attention_report import Footnotes, grouped
    from multimodal_gen.runtime.generator import PipelineIndex, load_skeleton, pick_device
    from multimodal_gen.runtime.layers.attention.backends.registry import current_environment
    from multimodal_gen.runtime.layers.attention.scope import scope_from_args

    args = ServerArgs(**settings, backend="sglang")
    scope = scope_from_args(args)
    device = pick_device(args.device)
    index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
    with apply(load_skeleton(index, args.dtype, device), scope=scope) as handle:
        report = handle.report()
    environment = current_environment()
    groups = grouped(report)
    if as_json:
        document = {
            "model_path": args.model_path,
            "pipeline": index.name,
            "platform": _platform(environment),
            "groups": [group.as_dict() for group in groups],
            **report.as_dict(),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    echo(wrapped(f"platform: {_platform_line(environment)}"))
    echo(wrapped(f"pipeline: {index.name} ({len(report.layers)} attention layers)"))
    typer.echo("")
    footnotes = Footnotes()
    rows = []
    for group in groups:
        selection = group.entry.selection
        cells = (group.component, group.role, group.layers_text, group.steps, selection.label)
        rows.append(Row((*cells, group.source), [footnotes.reason(selection)]))
    echo(table(("component", "role", "layers", "steps", "backend", "source"), rows))
    for text in (*(f"note: {note}" for note in report.notes), *footnotes.lines()):
        echo(wrapped(text))


def _request(environment: "Environment", settings: Settings) -> "AttentionRequest":
    from multimodal_gen.runtime.generator import pick_device, pick_dtype
    from multimodal_gen.runtime.layers.attention.request import AttentionRequest, AttentionRole

    return AttentionRequest(
        environment=environment,
        head_size=settings["head_size"],
        num_heads=settings["heads"],
        num_kv_heads=settings["heads"],
        dtype=pick_dtype(settings["dtype"], pick_device(None)),
        role=AttentionRole(settings["role"]),
    )


def _status(backend: "AttentionBackendEnum", request: "AttentionRequest") -> dict[str, Any]:
    from multimodal_gen.runtime.layers.attention.backends.registry import find_backend

    environment = request.environment
    cls = find_backend(backend, environment.platform)
    variant = cls.choose_variant(request)
    while variant is not None:
        checked = variant.after_self_checks(request, tail=True)
        if checked == request:
            break
        request, variant = checked, cls.choose_variant(checked)
    reasons = cls.unsupported_reasons(request)
    commands = [probe.install for candidate in cls.variants for probe in candidate.packages]
    missing = [command for command in commands if any(command in reason for reason in reasons)]
    return {
        "backend": str(backend),
        "usable": not reasons,
        "variant": variant.name if variant else None,
        "summary": cls.summary,
        "reasons": list(reasons),
        "install": list(dict.fromkeys(missing)),
    }


def _broken_plugins() -> list[dict[str, str]]:
    from multimodal_gen.runtime import platforms
    from multimodal_gen.runtime.layers.attention.backends import registry

    groups = {
        registry.ENTRY_POINT_GROUP: registry.broken_plugins(),
        platforms.ENTRY_POINT_GROUP: platforms.broken_platforms(),
    }
    return [
        {"name": name, "group": group, "error": str(error)}
        for group, errors in groups.items()
        for name, error in errors.items()
    ]


def _platform(environment: "Environment") -> dict[str, Any]:
    capability = environment.capability
    return {
        "name": str(environment.platform),
        "device": environment.device_name,
        "capability": capability.as_version_str() if capability else None,
    }


def _platform_line(environment: "Environment") -> str:
    facts = _platform(environment)
    text = facts["name"]
    if facts["device"] and facts["device"] != text:
        text += f", {facts['device']}"
    return text + (f", compute capability {facts['capability']}" if facts["capability"] else "")


def _request_as_dict(request: "AttentionRequest") -> dict[str, Any]:
    return {
        "role": str(request.role),
        "heads": request.num_heads,
        "head_size": request.head_size,
        "dtype": str(request.dtype).removeprefix("torch."),
    }


def _request_line(request: "AttentionRequest") -> str:
    facts = _request_as_dict(request)
    return "{role} attention, {heads} heads of size {head_size}, {dtype}".format(**facts)
