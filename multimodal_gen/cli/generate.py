"""`sglang generate`: a prompt in, an image or a video out; on one GPU, or as ranks on several."""

import uuid
from dataclasses import MISSING, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from multimodal_gen import __version__
from multimodal_gen.cli.options import Settings, takes
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs

if TYPE_CHECKING:
    from multimodal_gen.runtime.generator import Attach, Generated

__all__ = ["generate"]

_PROMPT = replace(SETTINGS["prompt"], default=MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one process is to do; it can be sent to another one.

    Attributes:
        args: the arguments, with `backend` decided.
        reason: why it was decided so.
        explicit: whether the user named it.
        mark: what the names of half-written files start with.
    """

    args: ServerArgs
    reason: str
    explicit: bool
    mark: str = ""


@takes(*({**SETTINGS, _PROMPT.name: _PROMPT}.values()))
def generate(settings: Settings) -> None:
    """Generate an image or a video with a diffusers pipeline.

    Writes a PNG or an MP4, with a JSON file beside it: versions, arguments, timings, and the
    backend of every attention layer with the reason for it. Nothing is overwritten unless asked
    for, and an interrupted run leaves no file.
    """
    from multimodal_gen.runtime.distributed.launch import is_launched_rank, run_rank
    from multimodal_gen.runtime.generator import plan_ranks

    try:
        if is_launched_rank():
            run_rank(
                lambda num_ranks: _join_and_run(_job(settings), num_ranks),
                timeout=settings["rank_timeout"],
            )
            return
        job = _job(settings)
        num_ranks = plan_ranks(job.args).world_size
        if num_ranks == 1:
            _run(job)
            return
        status = _launch(job, num_ranks)
    except KeyboardInterrupt:
        typer.echo("interrupted; no file was written", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(status)


def _job(settings: Settings) -> _Job:
    """Decide whose attention runs, and check what was typed."""
    from multimodal_gen.runtime.generator import choose_backend

    name = settings["attention_backend"]
    if name is not None and name.strip().lower() in ("", "auto"):
        name = None
    backend, reason = choose_backend(settings["backend"], name)
    args = ServerArgs(**{**settings, "attention_backend": name, "backend": backend})
    return _Job(args=args, reason=reason, explicit=settings["backend"] != "auto")


def _launch(job: _Job, num_ranks: int) -> int:
    """Do a job on ranks of this host; return the exit status.

    Raises:
        UsageError: an option does not fit the pipeline or the disk; no rank was started.
        RankError: a rank ended without a word.
        KeyboardInterrupt: Ctrl-C; all ranks are gone.
    """
    from multimodal_gen.runtime.distributed.launch import launch_ranks
    from multimodal_gen.runtime.generator import prepare
    from multimodal_gen.runtime.generator.output import sweep

    args, target = prepare(job.args)
    job = replace(job, args=args, mark=f"{uuid.uuid4().hex}-")
    try:
        return launch_ranks(_launched, job, num_ranks=num_ranks)
    finally:
        sweep(target.folder, job.mark)


def _launched(job: _Job) -> None:
    """Be a rank that `_launch` started."""
    from multimodal_gen.runtime.distributed.launch import run_rank

    run_rank(lambda num_ranks: _join_and_run(job, num_ranks), timeout=job.args.rank_timeout)


def _join_and_run(job: _Job, num_ranks: int) -> None:
    """Join the ranks that were started, and do a job with them."""
    import torch

    from multimodal_gen.runtime.distributed.groups import ranks_per_host
    from multimodal_gen.runtime.generator import join_ranks

    args = join_ranks(job.args, num_ranks)
    if num_ranks > 1:  # the ranks of a host share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // (ranks_per_host() or 1)))
    _run(replace(job, args=args))


def _run(job: _Job) -> None:
    """Generate, and print what was made; on all ranks but the first, without a word."""
    from multimodal_gen.runtime import generator

    generated = generator.generate(
        job.args,
        attach=_attach(job.args, explicit=job.explicit),
        facts={
            "multimodal_gen": __version__,
            "backend": job.args.backend,
            "backend_reason": job.reason,
        },
        mark=job.mark,
    )
    if generated is not None:
        _print(generated, job)


def _attach(args: ServerArgs, *, explicit: bool) -> "Attach":
    """Return what attaches attention to the loaded pipeline."""
    from multimodal_gen.errors import NothingAppliedError
    from multimodal_gen.runtime.generator import DiffusersAttention, Handle

    if args.backend == "diffusers":
        name = None if args.attention_backend is None else str(args.attention_backend)
        return lambda pipe: DiffusersAttention(pipe, name)

    from multimodal_gen.integrations.diffusers import apply
    from multimodal_gen.runtime.distributed.groups import parallel_groups
    from multimodal_gen.runtime.layers.attention.rules import scope_from_args

    scope = scope_from_args(args)
    # On several ranks, all of them would compute all of what diffusers ships.
    nothing_asked = not (explicit or scope.default or scope.components or scope.rules)
    as_shipped = nothing_asked and parallel_groups() is None

    def attach(pipe: Any) -> Handle:
        try:
            return apply(pipe, scope=scope)
        except NothingAppliedError as error:
            if not as_shipped:
                raise
            return DiffusersAttention(pipe, notes=(f"runs as diffusers ships it: {error}",))

    return attach


def _print(generated: "Generated", job: _Job) -> None:
    for path in generated.media:
        typer.echo(path)
    typer.echo(f"record: {generated.record}")
    if generated.latents:
        typer.echo(f"latents: {generated.latents}")
    if generated.attention:
        typer.echo(f"attention record: {generated.attention}")
    typer.echo(f"seed: {generated.seed}")
    typer.echo(f"time: {generated.seconds:.1f} s in all")
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
