"""`sglang generate` on several GPUs: starting the ranks, or being one of them."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multimodal_gen.cli.generate import Job

__all__ = ["be_one", "join_and_run", "start"]

_Run = Callable[["Job"], None]


def start(job: "Job", run: _Run, num_ranks: int) -> int:
    """Do a job on ranks of this host; return the exit status.

    Args:
        job: what to do.
        run: does it, on every rank.
        num_ranks: how many processes.

    Raises:
        UsageError: an option does not fit the pipeline or the disk; no rank was started.
        RankError: a rank ended without a word.
        KeyboardInterrupt: Ctrl-C; all ranks are gone.
    """
    from multimodal_gen.runtime.distributed.launch import start_ranks
    from multimodal_gen.runtime.generator import prepare
    from multimodal_gen.runtime.generator.output import sweep

    args, target = prepare(job.args)
    job = replace(job, args=args, mark=f"{uuid.uuid4().hex}-")
    try:
        return start_ranks(_started_rank, job, run, num_ranks=num_ranks)
    finally:
        sweep(target.folder, job.mark)


def be_one(job: Callable[[], "Job"], run: _Run, *, timeout: float) -> None:
    """Do a job as one rank of several; a rank that fails ends this process.

    Args:
        job: returns what to do.
        run: does it.
        timeout: seconds the ranks wait for each other.
    """
    from multimodal_gen.runtime.distributed.launch import be_rank

    be_rank(lambda num_ranks: join_and_run(job(), run, num_ranks), timeout=timeout)


def join_and_run(job: "Job", run: _Run, num_ranks: int) -> None:
    """Join the ranks that were started, and do a job with them."""
    import torch

    from multimodal_gen.runtime.distributed.joining import ranks_per_host
    from multimodal_gen.runtime.generator import join_ranks

    args = join_ranks(job.args, num_ranks)
    if num_ranks > 1:  # the ranks of a host share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // (ranks_per_host() or 1)))
    run(replace(job, args=args))


def _started_rank(job: "Job", run: _Run) -> None:
    """Be a rank that `start` started."""
    be_one(lambda: job, run, timeout=job.args.rank_timeout)
