"""Generations with one loaded pipeline: attach attention, run it, save the result."""

import json
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError, short
from multimodal_gen.files import MalformedError, Staging, read_small_file, require_file
from multimodal_gen.kernels.launch.launcher import load_triton_early
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.distributed.groups import is_main_rank, parallel_groups
from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.generator import output
from multimodal_gen.runtime.generator.attention_check import AttentionCheck
from multimodal_gen.runtime.generator.cache import cached, read_cache
from multimodal_gen.runtime.generator.denoise import (
    Denoised,
    Timings,
    check_finite,
    denoise,
    differences,
    produced,
)
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.inputs import INPUTS, as_typed, read_inputs
from multimodal_gen.runtime.generator.library_errors import (
    not_told,
    out_of_memory_explained,
    told_of_run,
)
from multimodal_gen.runtime.generator.load import denoisers, load_pipeline, pick_device
from multimodal_gen.runtime.generator.lora import not_reached, read_loras
from multimodal_gen.runtime.generator.output import (
    GrowingVideo,
    OutputNames,
    OutputTarget,
)
from multimodal_gen.runtime.generator.ranks import ending_signals_raise, rank_device
from multimodal_gen.runtime.generator.sampling import (
    Call,
    check_arguments,
    check_sizes,
    default_fps,
    prepare_call,
    steps_of,
)
from multimodal_gen.runtime.generator.scheduler import given_sigmas
from multimodal_gen.runtime.generator.skeleton import without_weights
from multimodal_gen.runtime.generator.stream import Give, StreamedChunk, Streaming, check_stream
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_plain, expanded, read_json

logger = logging.getLogger(__name__)

# What may differ between a run and the one that goes on with it.
_NOT_DECIDING = ("output_path", "overwrite", "rank_timeout", "record_attention")

_RecorderT = TypeVar("_RecorderT")


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
"""Attaches what a generation asks for to a loaded pipeline; layers above the generator pass it
in."""

OnStep: TypeAlias = Callable[[int, torch.Tensor], None]
"""Takes the index of every denoising step, from 0 on, and the latents after it, in the pipeline's
own layout; what it raises ends the generation, and nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """A finished generation; its `repr` leaves out what fills pages.

    Attributes:
        pixels: floats in [0, 1], one [T, H, W, C] array per video or [H, W, C] per image; none of a
            video that was streamed.
        latents: what the last denoising step left, in the pipeline's own layout; of the whole video
            where it was streamed, and nothing where that was interrupted.
        fps: frames per second of a video, or None.
        record: versions, arguments, timings and the attention report, as JSON data.
        media: the files of images or videos; none where nothing was to be written.
        record_path: the JSON file next to them, or None.
        latents_path: the file with the last latents, or None.
        attention_path: the file with what the attention ran on, or None.
        seed: seed of the noise.
        seconds: how long it took, loading not included.
        report: what the attention ran on.
        mesh: the ranks that shared the work, or None on one GPU.
        notes: what the user should know.
        interrupted: whether Ctrl-C ended a video that was streamed, with the frames done by then.
    """

    pixels: tuple[Any, ...] = field(repr=False)
    latents: torch.Tensor = field(repr=False)
    fps: int | None
    record: Mapping[str, Json] = field(repr=False)
    media: tuple[Path, ...] = ()
    record_path: Path | None = None
    latents_path: Path | None = None
    attention_path: Path | None = None
    seed: int
    seconds: float = 0.0
    report: Report = field(repr=False)
    mesh: Mesh | None
    notes: tuple[str, ...]
    interrupted: bool = False


def prepare(
    asked: Sequence[ServerArgs],
) -> tuple[tuple[ServerArgs, ...], tuple[OutputTarget, ...]]:
    """Check what can be checked before weights are loaded, and settle the seeds.

    Args:
        asked: the arguments of each generation; all are to be made with one loaded model.

    Returns:
        The arguments with seeds, and where to write: nowhere on ranks that write nothing.

    Raises:
        UsageError: an option does not fit the pipeline or the disk, or two generations are to be
            written to one file.
        MissingDependencyError: diffusers, or an encoder for videos, is not installed.
    """
    first = asked[0]
    index = PipelineIndex.read(first.model_path, first.pipeline_class_name)
    settled, targets = [], []
    sized = any(args.height is not None or args.width is not None for args in asked)
    bare = without_weights(index) if sized else None
    read: list[list[object]] = []
    for args in asked:
        try:
            settled.append(_checked(index, args))
            given = [getattr(args, name) for name in (*INPUTS, "pipeline_arg")]
            if given not in read:  # the prompts of a file share theirs
                read_inputs(index, args)
                read.append(given)
            if bare is not None:
                check_sizes(bare, args)
            if is_main_rank():
                targets.append(_target(index, settled[-1]))
        except UsageError as error:
            if len(asked) == 1 or isinstance(error, MissingDependencyError):
                raise
            raise UsageError(f"the generation of {short(args.prompt)}: {error}") from error
    output.require_own_files(targets, [args.record_attention for args in asked])
    return tuple(settled), tuple(targets)


def find_done(asked: Sequence[ServerArgs]) -> tuple[Path | None, ...]:
    """Return the record of each generation whose output is there already, or None.

    A record counts where it has the arguments of the generation, and the files that it names are
    next to it. A generation without a seed finds one of any seed; no record counts twice.

    Args:
        asked: the arguments of each generation.
    """
    folders = {expanded(args.output_path, "--output-path") for args in asked}
    records = {
        path: found
        for folder in {f if f.is_dir() else f.parent for f in folders}
        for path in sorted(folder.glob("*.json"))
        if (found := _made(path)) is not None
    }
    done: list[Path | None] = []
    for args in asked:
        wanted = _deciding(as_plain(args))
        if args.seed is None:
            del wanted["seed"]
        match = next((path for path, it in records.items() if wanted.items() <= it.items()), None)
        if match is not None:
            del records[match]
        done.append(match)
    return tuple(done)


def _made(path: Path) -> dict[str, str] | None:
    """Return the deciding arguments of a record whose files are there; None for other files."""
    try:
        record: Any = read_json(read_small_file(path))
        if record.get("interrupted"):
            return None
        files = [path.with_name(name) for name in record["outputs"]]
        return _deciding(record["arguments"]) if all(file.is_file() for file in files) else None
    except (MalformedError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _deciding(arguments: Mapping[str, Json]) -> dict[str, str]:
    """Return the arguments that the result depends on, as text."""
    return {
        name: json.dumps(value, sort_keys=True)
        for name, value in arguments.items()
        if name not in _NOT_DECIDING
    }


class Session:
    """A pipeline that is loaded once, and makes any number of generations.

    Where groups of several ranks are in use, every rank has one and makes the same calls; rank 0
    decodes and writes.

    Args:
        args: what to load, and how: its `LOADING_SETTINGS`.

    Raises:
        UsageError: an option does not fit the pipeline or the device; the device runs out of
            memory.
        MissingDependencyError: diffusers, or what an option needs, is not installed.
    """

    def __init__(self, args: ServerArgs) -> None:
        self.device = rank_device(args.device)
        self.index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
        start = time.perf_counter()
        if self.device.type == "cuda":
            load_triton_early()
        with out_of_memory_explained():
            self._pipe = load_pipeline(self.index, args, self.device)
            self._notes = not_reached(self._pipe, read_loras(args.lora_path or ()))
            for note in self._notes:
                logger.warning(note)
            self._notes += _compile(self._pipe) if args.enable_torch_compile else ()
        self.load_seconds = time.perf_counter() - start

    def generate(
        self,
        args: ServerArgs,
        attach: Attach,
        *,
        facts: Mapping[str, Json] = MappingProxyType({}),
        mark: str = "",
        save: bool = True,
        on_chunk: Give | None = None,
        on_step: OnStep | None = None,
    ) -> Generated | None:
        """Generate an image or a video, and write it with a record of the run.

        Options that do not fit the pipeline or the disk are refused before the first step. After an
        error or Ctrl-C no file is left, but a video that is streamed stays with what is done of it,
        and with a record that says so.

        Args:
            args: what to generate and where to write it; what concerns loading is as it was.
            attach: see `Attach`.
            facts: further entries for the record, e.g. this package's version.
            mark: what the names of half-written files start with; see `files.sweep`.
            save: write files; otherwise nothing but the latents and pixels in memory is left.
            on_chunk: takes the frames of a video that is streamed as they are done.
            on_step: see `OnStep`; not of a video that is streamed.

        Returns:
            What was made; None on ranks that make nothing.

        Raises:
            UsageError: an option does not fit the pipeline or the disk; the device runs out of
                memory; the named backend of diffusers fails; the result is not finite.
            MissingDependencyError: an encoder for videos is not installed.
        """
        started = time.perf_counter()
        args = _checked(self.index, args)
        target = _target(self.index, args) if save and is_main_rank() else None
        check = AttentionCheck(args.check_attention) if args.check_attention else None
        timings = Timings(self.device)
        timings.phases["load"] = self.load_seconds
        record = self._record(args, facts)
        video, stream = None, None
        if args.stream:
            rate = args.fps or default_fps(self.index)
            video = None if target is None else GrowingVideo(target, rate, record)
            stream = Streaming(args, partial(_give, video, on_chunk))
        try:
            with out_of_memory_explained():
                run, call, report = self._run(args, attach, timings, check, stream, on_step)
        finally:
            if video is not None:
                video.close()
        if not is_main_rank():
            return None
        check_finite(run)
        shape = produced(run.pixels) if stream is None else stream.produced()
        if video is not None:  # Ctrl-C may come between two frames
            shape["num_frames"] = video.num_frames
        record |= {"produced": shape, "attention": report.as_dict()}
        also = _attention_record(args, record, report, check)
        record |= {} if stream is None else stream.as_dict()
        notes = (*call.notes, *self._notes, *run.notes, *differences(shape, args))
        if video is not None and video.note is not None:
            notes += (video.note,)
        fps = call.fps if self.index.kind == "video" else None
        made = Generated(
            pixels=run.pixels,
            latents=run.latents,
            fps=fps,
            record={**record, "fps": fps, "timings_s": timings.as_dict(), "notes": list(notes)},
            seed=args.seed or 0,
            report=report,
            mesh=_mesh(),
            notes=notes,
            interrupted=stream is not None and stream.interrupted,
        )
        if target is not None:
            names = None if video is None else video.names
            if video is None or names is not None:
                made = _save(target, made, timings, mark, also, names)
        return replace(made, seconds=time.perf_counter() - started)

    def close(self) -> None:
        """Let go of the model; what was made stays."""
        self._pipe = None
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def _run(
        self,
        args: ServerArgs,
        attach: Attach,
        timings: Timings,
        check: AttentionCheck | None,
        stream: Streaming | None,
        on_step: OnStep | None,
    ) -> tuple[Denoised, Call, Report]:
        """Attach attention, denoise, and leave the pipeline as it was."""
        pipe = self._pipe
        if pipe is None:
            raise UsageError("a generator must not be used after it was closed; load it again")
        check_sizes(pipe, args)
        call = prepare_call(pipe, self.index, args)
        if not is_main_rank():  # it writes nothing
            call = call.without_pixels()
        cache = None if args.cache is None else read_cache(args.cache)
        named = args.attention_backend if args.backend == "diffusers" else None
        with timings.phase("attach"):
            handle = attach(pipe)
        try:
            with (
                watching(check),
                told_of_run(pipe, given=as_typed(args), backend=named),
                given_sigmas(pipe, args.sigmas),
                cached(pipe, denoisers(pipe), cache, steps_of(self.index, args)) as skipped,
            ):
                if stream is None:
                    run = denoise(pipe, call, timings, _once_a_step(on_step))
                else:
                    run = stream.run(pipe, call, timings)
            if skipped is not None:
                run = replace(run, notes=(*run.notes, skipped.note()))
            return run, call, handle.report()
        finally:
            handle.remove()

    def _record(self, args: ServerArgs, facts: Mapping[str, Json]) -> dict[str, Json]:
        """Return what is known before anything is made."""
        mesh = _mesh()
        return {
            **facts,
            "versions": output.versions(self.device),
            "pipeline": self.index.name,
            "arguments": as_plain(args),
            "mesh": None if mesh is None else {**asdict(mesh), "ranks": mesh.world_size},
        }


def observe(
    args: ServerArgs,
    prompts: Iterable[str],
    attach: Attach,
    make: Callable[[], _RecorderT],
    watch: Callable[[_RecorderT], AbstractContextManager[object]],
) -> Generator[tuple[_RecorderT, float, tuple[int | str, int | str]], None, None]:
    """Generate prompts for what looks at their attention, which is all that is kept of them.

    `make` makes what looks at one generation, and `watch` lets it look in a `with` block. Yielded
    are that, the seconds that the generation took, and the width and height of its output.

    Raises:
        UsageError: an option, a size too, does not fit the pipeline or the device.
    """
    device = pick_device(args.device)
    index = PipelineIndex.read(args.model_path, args.pipeline_class_name)
    check_arguments(index, args)
    read_inputs(index, args)
    bare = without_weights(index)
    if bare is not None:
        check_sizes(bare, args)
    pipe = load_pipeline(index, args, device)
    check_sizes(pipe, args)
    handle = attach(pipe)
    try:
        for prompt in prompts:
            call = prepare_call(pipe, index, replace(args, prompt=prompt)).without_pixels()
            recorder, timings = make(), Timings(device)
            with watch(recorder), timings.phase("whole"), told_of_run(pipe):
                denoise(pipe, call, timings)
            made = call.generation
            yield recorder, timings.phases["whole"], (made.width, made.height)
    finally:
        handle.remove()


def _mesh() -> Mesh | None:
    groups = parallel_groups()
    return None if groups is None else groups.mesh


def _give(video: GrowingVideo | None, on_chunk: Give | None, chunk: StreamedChunk) -> None:
    """Write the frames of a chunk, and hand them on."""
    if video is not None:
        video.write(chunk.frames)
    if on_chunk is not None:
        with not_told():
            on_chunk(chunk)


def _once_a_step(on_step: OnStep | None) -> OnStep:
    """Return what calls a function of the caller's once for every step, if there is one."""
    called: set[int] = set()

    def stepped(step: int, latents: torch.Tensor) -> None:
        if on_step is not None and step not in called:
            called.add(step)
            with not_told():
                on_step(step, latents)

    return stepped


def _checked(index: PipelineIndex, args: ServerArgs) -> ServerArgs:
    """Check the arguments against the pipeline's class; return them with a seed."""
    check_arguments(index, args)
    check_stream(index, args)
    return replace(args, seed=secrets.randbelow(2**32)) if args.seed is None else args


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
        # Too long, a loop of links, in the home of no user, or with characters that no name has.
        raise UsageError(
            f"--output-path must be a file or folder that can be made, got {short(str(path))} "
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
    exists = require_file(Path(args.record_attention), "--record-attention")
    path = Path(args.record_attention).expanduser()
    is_folder = path.is_dir()
    if path.parent.resolve() / path.name in (f.parent.resolve() / f.name for f in names.all):
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
    target: OutputTarget,
    made: Generated,
    timings: Timings,
    mark: str,
    also: Mapping[Path, dict[str, Json]],
    streamed: OutputNames | None,
) -> Generated:
    """Write everything under names that are free, or nothing; return what was written.

    A video that was streamed has its names, and keeps its first record where no other fits.
    """
    while True:
        names = streamed or target.names(len(made.pixels))
        try:
            with ending_signals_raise():
                return _write(target, made, timings, mark, also, names)
        except FileExistsError as error:
            taken = Path(error.filename2 or error.filename)
            if not (taken in also or target.is_file or target.overwrite or streamed):
                continue  # Another run took the name in the folder while this one encoded.
            flag = "--record-attention" if taken in also else "--output-path"
            raise UsageError(
                f"{flag} must not exist yet, got {str(taken)!r}, which another program wrote "
                f"meanwhile; run again with another name, or --overwrite"
            ) from None
        except OSError as error:
            raise UsageError(
                f"the output could not be written to {target.path}: {error}"
            ) from error


def _write(
    target: OutputTarget,
    made: Generated,
    timings: Timings,
    mark: str,
    also: Mapping[Path, dict[str, Json]],
    names: OutputNames,
) -> Generated:
    """Write everything, or nothing; return what was made with its files.

    `also` are further records, by the files they go to.
    """
    with Staging(overwrite=target.overwrite, mark=mark) as staging:
        found = []
        with timings.phase("save"):
            # Without pixels the video was streamed, and is there already.
            for pixels, final in zip(made.pixels, names.media, strict=bool(made.pixels)):
                if made.fps is not None:
                    found.append(output.write_video(pixels, staging.path(final), made.fps))
                else:
                    output.write_image(pixels, staging.path(final))
            latents = None if made.interrupted else names.latents
            if latents is not None:
                output.write_latents(made.latents, staging.path(latents))
        notes = (*made.notes, *dict.fromkeys(note for note in found if note))
        record: dict[str, Json] = {
            **made.record,
            "outputs": [file.name for file in names.media],
            "timings_s": timings.as_dict(),
            "notes": list(notes),
        }
        # A video that was streamed has a record, that of one which is not done.
        output.write_record(record, staging.path(names.record, overwrite=not made.pixels))
        for path, each in also.items():
            output.write_record(each, staging.path(path))
    return replace(
        made,
        record=record,
        media=names.media,
        record_path=names.record,
        latents_path=latents,
        attention_path=next(iter(also), None),
        notes=notes,
    )


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
