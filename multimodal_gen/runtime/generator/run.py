"""One generation: load a pipeline, attach attention, run it, save the result."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.distributed.groups import is_main_rank, parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator import output
from multimodal_gen.runtime.generator.attention_check import AttentionCheck
from multimodal_gen.runtime.generator.denoise import (
    Denoised,
    Timings,
    check_finite,
    denoise,
    differences,
    diffusers_backend_explained,
    out_of_memory_explained,
    produced,
)
from multimodal_gen.runtime.generator.load import (
    PipelineIndex,
    denoisers,
    load_pipeline,
)
from multimodal_gen.runtime.generator.output import OutputNames, OutputTarget, Staging
from multimodal_gen.runtime.generator.ranks import ending_signals_raise, rank_device
from multimodal_gen.runtime.generator.sampling import (
    Call,
    check_arguments,
    check_loaded,
    output_size,
    prepare_call,
)
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.report import AttentionReport, Json
from multimodal_gen.runtime.managers.generation import Generation, describe_generation
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["Attach", "Generated", "Handle", "Report", "generate", "prepare"]


class Report(Protocol):
    """What ran in the attention layers of a pipeline."""

    def as_dict(self) -> dict[str, Json]:
        """Return the report as JSON data."""

    def summary(self) -> str:
        """Return the report as text, one line per group of layers."""


class Handle(Protocol):
    """Attention backends attached to a pipeline, until it is removed."""

    def report(self) -> Report:
        """Return what ran so far."""

    def remove(self) -> None:
        """Restore the pipeline."""


Attach: TypeAlias = Callable[[Any], Handle]
"""Attaches attention backends to a loaded pipeline; layers above the generator pass it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A finished generation.

    Attributes:
        media: the images or videos.
        record: the JSON file beside them.
        latents: the file with the last latents, or None.
        attention: the file with what the attention ran on, or None.
        seed: seed of the noise.
        seconds: how long it took, loading included.
        report: what the attention ran on.
        mesh: the ranks that shared the work, or None on one GPU.
        notes: what the user should know.
    """

    media: tuple[Path, ...]
    record: Path
    latents: Path | None
    attention: Path | None
    seed: int
    seconds: float
    report: Report
    mesh: Mesh | None
    notes: tuple[str, ...]


def prepare(args: ServerArgs) -> tuple[ServerArgs, OutputTarget]:
    """Check what can be checked before weights are loaded, and settle the seed.

    Returns:
        The arguments with a seed, and where to write.

    Raises:
        UsageError: an option does not fit the pipeline or the disk.
        MissingDependencyError: diffusers, or an encoder for videos, is not installed.
    """
    index = PipelineIndex.read(args.model_path)
    check_arguments(index, args)
    args = replace(args, seed=_seed(args))
    return args, _target(index, args)


def generate(
    args: ServerArgs,
    *,
    attach: Attach,
    facts: dict[str, Json] | None = None,
    mark: str = "",
) -> Generated | None:
    """Generate an image or a video, and write it with a record of the run.

    Options that do not fit the pipeline, the device or the disk are refused before the weights
    are loaded, backends that cannot serve a layer before the first step. After an error or Ctrl-C
    no file is left. Where groups of several ranks are in use every rank calls this, and rank 0
    decodes and writes.

    Args:
        args: what to load, what to generate and where to write it; its attention arguments are
            `attach`'s business.
        attach: attaches attention backends to the loaded pipeline.
        facts: further entries for the record, e.g. this package's version.
        mark: what the names of half-written files start with; see `output.sweep`.

    Returns:
        What was written; None on ranks that write nothing.

    Raises:
        UsageError: an option does not fit the pipeline, the device or the disk; the device runs
            out of memory; the named backend of diffusers fails; the result is not finite.
        MissingDependencyError: diffusers, or an encoder for videos, is not installed.
    """
    started = time.perf_counter()
    device = rank_device(args.device)
    index = PipelineIndex.read(args.model_path)
    check_arguments(index, args)
    args = replace(args, seed=_seed(args))
    target = _target(index, args) if is_main_rank() else None
    check = AttentionCheck(args.check_attention) if args.check_attention else None
    timings = Timings(device)
    with out_of_memory_explained():
        with timings.phase("load"):
            pipe = load_pipeline(index, args, device)
        check_loaded(pipe, args)
        call = prepare_call(pipe, index, args)
        with timings.phase("attach"):
            handle = attach(pipe)
        try:
            notes = _compile(pipe) if args.enable_torch_compile else ()
            with watching(check):
                run = _denoise(pipe, index, args, call, timings)
            report = handle.report()
        finally:
            handle.remove()
    if target is None:
        return None
    check_finite(run)
    groups = parallel_groups()
    mesh = None if groups is None else groups.mesh
    made = produced(run.pixels)
    record: dict[str, Json] = {
        **(facts or {}),
        "versions": output.versions(device),
        "pipeline": index.name,
        "arguments": _arguments(args),
        "mesh": None if mesh is None else {**asdict(mesh), "ranks": mesh.world_size},
        "produced": made,
        "attention": report.as_dict(),
    }
    notes = (*call.notes, *notes, *differences(made, args))
    with ending_signals_raise():
        also = _attention_record(args, record, report, check)
        write = partial(_write, target, run, call, timings, record, notes, mark, also)
        names, notes = _save(target, len(run.pixels), write)
    return Generated(
        media=names.media,
        record=names.record,
        latents=names.latents,
        attention=next(iter(also), None),
        seed=args.seed or 0,
        seconds=time.perf_counter() - started,
        report=report,
        mesh=mesh,
        notes=notes,
    )


def _seed(args: ServerArgs) -> int:
    return secrets.randbelow(2**32) if args.seed is None else args.seed


def _denoise(
    pipe: Any, index: PipelineIndex, args: ServerArgs, call: Call, timings: Timings
) -> Denoised:
    """Run the pipeline; ranks that write nothing stop at the latents."""
    if not is_main_rank() and "output_type" in call.arguments:
        call = replace(call, arguments={**call.arguments, "output_type": "latent"})
    width, height = output_size(pipe, index, args)
    asked = Generation(prompt=args.prompt or "", width=width, height=height)
    with diffusers_backend_explained(_named_backend(args)), describe_generation(asked):
        return denoise(pipe, call, timings)


def _named_backend(args: ServerArgs) -> str | None:
    """Return the diffusers backend that was asked for by name, if any."""
    if args.backend != "diffusers" or args.attention_backend is None:
        return None
    return str(args.attention_backend)


def _arguments(args: ServerArgs) -> dict[str, Json]:
    """Return the arguments as JSON data; the seed is the one that was used."""
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _target(index: PipelineIndex, args: ServerArgs) -> OutputTarget:
    """Settle where to write, and fail now if that cannot work."""
    path = Path(args.output_path)
    try:
        target = OutputTarget.plan(
            path.expanduser(),
            index.kind,
            stem=f"{Path(index.model_path).name}-seed{args.seed}",
            overwrite=args.overwrite,
            latents=args.save_latents,
        )
        names = target.names(args.num_outputs)
    except UsageError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # Too long, a loop of links, in the home of nobody, or with characters that no name has.
        raise UsageError(
            f"--output-path must be a file or folder that can be made, got {str(path)[:80]!r} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    if index.kind == "video":
        output.require_encoder()
    _check_record_path(args, names)
    return target


def _check_record_path(args: ServerArgs, names: OutputNames) -> None:
    """Refuse a file for the attention's record that cannot be written, or that is another's."""
    if args.check_attention and args.backend == "diffusers":
        raise UsageError(
            "--check-attention must be 0 with --backend diffusers, whose attention is not run "
            "here; leave it out, or use --backend sglang"
        )
    if args.record_attention is None:
        return
    try:
        path = Path(args.record_attention).expanduser()
        output.require_writable(path.parent, "--record-attention")
        is_folder, exists = path.is_dir(), path.exists()
    except UsageError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--record-attention must be a file that can be made, got "
            f"{str(args.record_attention)[:80]!r} ({getattr(error, 'strerror', None) or error})"
        ) from error
    if path.absolute() in (file.absolute() for file in names.all):
        raise UsageError(
            f"--record-attention must be a file of its own, got {str(path)!r}, which the output is "
            f"to be written to; choose another name"
        )
    if is_folder or (exists and not args.overwrite):
        remedy = "name a file in it" if is_folder else "choose another name or --overwrite"
        raise UsageError(
            f"--record-attention must be a file that does not exist yet, got {str(path)!r}; "
            f"{remedy}"
        )


def _compile(pipe: Any) -> tuple[str, ...]:
    """Compile the repeated blocks of every denoiser; return a note for each that has none."""
    notes = []
    for name, model in denoisers(pipe).items():
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(fullgraph=True)
        else:
            notes.append(
                f"{name} was not compiled: {type(model).__name__} names no repeated blocks"
            )
    return tuple(notes)


def _save(
    target: OutputTarget, count: int, write: Callable[[OutputNames], tuple[str, ...]]
) -> tuple[OutputNames, tuple[str, ...]]:
    """Write everything under names that are free, or nothing; return the names and all notes."""
    while True:
        names = target.names(count)
        try:
            return names, write(names)
        except FileExistsError:
            if target.overwrite or not names.taken:
                raise
            if target.is_file:
                raise UsageError(
                    f"--output-path must not exist yet, got {str(target.path)!r}, which another "
                    f"program wrote meanwhile; run again with another name, a folder, or "
                    f"--overwrite"
                ) from None
            # Another run took the name in the folder while this one encoded.
        except OSError as error:
            raise UsageError(
                f"the output could not be written to {target.path}: {error}"
            ) from error


def _write(
    target: OutputTarget,
    run: Denoised,
    call: Call,
    timings: Timings,
    record: dict[str, Json],
    notes: tuple[str, ...],
    mark: str,
    also: Mapping[Path, dict[str, Json]],
    names: OutputNames,
) -> tuple[str, ...]:
    """Write everything, or nothing; return all notes.

    `also` are further records, by the files they go to.
    """
    with Staging(overwrite=target.overwrite, mark=mark) as staging:
        found = []
        with timings.phase("save"):
            for pixels, final in zip(run.pixels, names.media, strict=True):
                if target.kind == "video":
                    found.append(output.write_video(pixels, staging.path(final), call.fps))
                else:
                    output.write_image(pixels, staging.path(final))
            if names.latents is not None:
                output.write_latents(run.latents, staging.path(names.latents))
        notes = (*notes, *dict.fromkeys(note for note in found if note))
        complete = {
            **record,
            "outputs": [file.name for file in names.media],
            "fps": call.fps if target.kind == "video" else None,
            "timings_s": timings.as_dict(),
            "notes": list(notes),
        }
        output.write_record(complete, staging.path(names.record))
        for path, other in also.items():
            output.write_record(other, staging.path(path))
    return notes


def _attention_record(
    args: ServerArgs, record: Mapping[str, Json], report: Report, check: AttentionCheck | None
) -> dict[Path, dict[str, Json]]:
    """Return what `--record-attention` asks for, by the file it goes to."""
    if args.record_attention is None:
        return {}
    names = ("multimodal_gen", "versions", "pipeline", "arguments", "attention")
    found = {name: record[name] for name in names if name in record}
    if check is not None:
        layers = report if isinstance(report, AttentionReport) else AttentionReport(layers=())
        found["check"] = check.as_dict(layers)
    return {Path(args.record_attention).expanduser(): found}
