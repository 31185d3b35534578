"""`sglang generate`: prompts in, images or videos out; on one GPU, or as ranks on several."""

import sys
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from multimodal_gen.cli.batch import BATCH, Asked, as_config, asked_for, jobs_of
from multimodal_gen.cli.options import Settings, takes
from multimodal_gen.runtime.server_args import SETTINGS

if TYPE_CHECKING:
    from multimodal_gen.integrations.generator import DiffGenerator, Job
    from multimodal_gen.runtime.generator import Generated, StreamedChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one process is to do; it can be sent to another one.

    Attributes:
        jobs: the generations that are left.
        done: how many were there before.
        resume: leave out what is done; False once that was looked at.
        mark: what the names of half-written files start with.
    """

    jobs: tuple["Job", ...]
    done: int = 0
    resume: bool = False
    mark: str = ""

    @property
    def total(self) -> int:
        """How many generations there are, those that were there before included."""
        return self.done + len(self.jobs)


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C, with how many generations were written before, or what of a stream was."""


@takes(
    *BATCH,
    *(setting for name, setting in SETTINGS.items() if name != "prompt"),
    given_only=True,
)
def generate(settings: Settings) -> None:
    """Generate images or videos with a diffusers pipeline.

    Writes a PNG or an MP4, with a JSON file next to it: versions, arguments, timings, and the
    backend of every attention layer with the reason for it. Nothing is overwritten unless asked
    for, and an interrupted run leaves no half-written file; with --stream it leaves the video as
    far as it is made.
    """
    asked = asked_for(settings)
    try:
        if settings.get("print_config"):
            jobs_of(asked)
            typer.echo(as_config(asked), nl=False)
            return
        status = _start(asked)
        if sys.stdout is not None:  # it is None where it was closed
            sys.stdout.flush()  # that a pipe is closed shows only now
    except BrokenPipeError:
        typer.echo("the output is not read any more; files that are written stay", err=True)
        raise
    except _Interrupted as interrupt:
        typer.echo(f"interrupted; {interrupt}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; no file was written", err=True)
        raise typer.Exit(130) from None
    if status:
        raise typer.Exit(status)


def _start(asked: Asked) -> int:
    """Generate here, on ranks of this host, or as one of the ranks that were started."""
    from multimodal_gen.runtime.distributed.launch import is_launched_rank, run_rank
    from multimodal_gen.runtime.generator import plan_ranks

    if is_launched_rank():
        timeout = asked.settings.get("rank_timeout", SETTINGS["rank_timeout"].default)
        run_rank(
            lambda num_ranks: _join_and_run(
                _Work(jobs=jobs_of(asked), resume=asked.resume), num_ranks
            ),
            timeout=timeout,
        )
        return 0
    work = _Work(jobs=jobs_of(asked), resume=asked.resume)
    num_ranks = plan_ranks(work.jobs[0].args).world_size
    work = _pending(work)
    if not work.jobs:
        return 0
    if num_ranks == 1:
        _run(work)
        return 0
    return _launch(work, num_ranks)


def _pending(work: _Work) -> _Work:
    """Leave out the generations that are done, where that is asked for."""
    from multimodal_gen.runtime.generator import find_done

    if not work.resume:
        return work
    done = find_done([job.args for job in work.jobs])
    left = tuple(job for job, file in zip(work.jobs, done, strict=True) if file is None)
    num_done = len(work.jobs) - len(left)
    if num_done:
        typer.echo(f"{num_done} of {len(work.jobs)} generations are done already")
    return replace(work, jobs=left, done=num_done, resume=False)


def _launch(work: _Work, num_ranks: int) -> int:
    """Do the work on ranks of this host; return the exit status.

    Raises:
        UsageError: an option does not fit the pipeline or the disk; no rank was started.
        RankError: a rank ended without a word.
        KeyboardInterrupt: Ctrl-C; all ranks are gone.
    """
    from multimodal_gen.files import sweep
    from multimodal_gen.runtime.distributed.launch import launch_ranks
    from multimodal_gen.runtime.generator import prepare

    settled, targets = prepare([job.args for job in work.jobs])
    jobs = tuple(replace(job, args=args) for job, args in zip(work.jobs, settled, strict=True))
    work = replace(work, jobs=jobs, mark=f"{uuid.uuid4().hex}-")
    try:
        return launch_ranks(_launched, work, num_ranks=num_ranks)
    finally:
        for folder in {target.folder for target in targets}:
            sweep(folder, work.mark)


def _launched(work: _Work) -> None:
    """Be a rank that `_launch` started."""
    from multimodal_gen.runtime.distributed.launch import run_rank

    timeout = work.jobs[0].args.rank_timeout
    run_rank(lambda num_ranks: _join_and_run(work, num_ranks), timeout=timeout)


def _join_and_run(work: _Work, num_ranks: int) -> None:
    """Join the ranks that were started, and do the work with them."""
    import torch

    from multimodal_gen.runtime.distributed.groups import (
        broadcast_object,
        is_main_rank,
        ranks_per_host,
    )
    from multimodal_gen.runtime.generator import join_ranks

    settled = join_ranks([job.args for job in work.jobs], num_ranks)
    jobs = tuple(replace(job, args=args) for job, args in zip(work.jobs, settled, strict=True))
    work = replace(work, jobs=jobs)
    if num_ranks > 1:  # the ranks of a host share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // (ranks_per_host() or 1)))
    if work.resume:  # rank 0's disk is what counts
        work = _pending(work) if is_main_rank() else work
        work = broadcast_object(work) if num_ranks > 1 else work
    if work.jobs:
        _run(work)


def _run(work: _Work) -> None:
    """Generate, and print what was made; on all ranks but the first, without a word."""
    from multimodal_gen.integrations.generator import DiffGenerator
    from multimodal_gen.runtime.generator import prepare

    started = time.perf_counter()
    written = 0
    try:
        settled, _ = prepare([job.args for job in work.jobs])
        jobs = [replace(job, args=args) for job, args in zip(work.jobs, settled, strict=True)]
        with DiffGenerator(jobs[0].args) as generator:
            for number, job in enumerate(jobs, work.done + 1):
                written += _run_one(generator, job, number, work)
    except KeyboardInterrupt:
        if not written:
            raise
        raise _Interrupted(_so_far(work, written)) from None
    except BaseException:
        if written:
            typer.echo(_so_far(work, written), err=True)
        raise
    if written and work.total > 1:
        typer.echo(f"time: {time.perf_counter() - started:.1f} s in all, {written} generations")


def _run_one(generator: "DiffGenerator", job: "Job", number: int, work: _Work) -> bool:
    """Generate once; return whether something was made, which it is on the first rank alone.

    Raises:
        KeyboardInterrupt: Ctrl-C; what a stream had made by then is written.
    """
    generated = generator.run(job, mark=work.mark, on_chunk=_show if job.args.stream else None)
    if generated is None:
        return False
    if work.total > 1:
        typer.echo(f"[{number}/{work.total}] {job.args.prompt}")
    seconds = generated.seconds + (generator.load_seconds if work.total == 1 else 0)
    _print(generated, job, f"{seconds:.1f} s" + " in all" * (work.total == 1))
    if generated.interrupted:
        raise _Interrupted("the video ends with the frames that were done")
    return True


def _show(chunk: "StreamedChunk") -> None:
    """Print which frames are done, when, and at which rate so far."""
    from tqdm.auto import tqdm

    done = chunk.first_frame + chunk.num_frames
    with tqdm.external_write_mode():  # bars are taken away, and shown again below the line
        typer.echo(
            f"frames {chunk.first_frame + 1}-{done} after {chunk.seconds:.1f} s, "
            f"{done / chunk.seconds:.1f} frames/s"
        )


def _so_far(work: _Work, written: int) -> str:
    return (
        f"{work.done + written} of {work.total} generations are written; the same command with "
        f"--resume makes the others"
    )


def _print(generated: "Generated", job: "Job", seconds: str) -> None:
    for path in generated.media:
        typer.echo(path)
    typer.echo(f"record: {generated.record_path}")
    if generated.latents_path:
        typer.echo(f"latents: {generated.latents_path}")
    if generated.attention_path:
        typer.echo(f"attention record: {generated.attention_path}")
    typer.echo(f"seed: {generated.seed}")
    timings = generated.record["timings_s"]
    if isinstance(timings, dict) and "compile" in timings:
        seconds += f", {timings['compile']:.1f} s of it compiling"
    typer.echo(f"time: {seconds}")
    stream = generated.record.get("stream")
    if isinstance(stream, dict):
        typer.echo(
            f"stream: first frames after {stream['time_to_first_frame_s']:.1f} s, "
            f"{stream['frames_per_second']:.1f} frames/s"
        )
    if generated.mesh is not None:
        mesh = generated.mesh
        typer.echo(
            f"ranks: {mesh.world_size} ({mesh.cfg} CFG x {mesh.ring} ring x {mesh.ulysses} Ulysses)"
        )
    typer.echo(f"attention: {job.args.backend} ({job.reason})")
    for line in generated.report.summary().splitlines():
        typer.echo(f"  {line}")
    for note in generated.notes:
        typer.echo(f"note: {note}", err=True)
