"""`sglang generate` on several GPUs: starting the ranks, or being one of them."""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import uuid
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from multimodal_gen.errors import MultimodalGenError, RankError

if TYPE_CHECKING:
    from multimodal_gen.cli.generate import Job
    from multimodal_gen.runtime.distributed.faults import FaultBoard
    from multimodal_gen.runtime.server_args import ServerArgs

__all__ = ["be_one", "needed", "start", "started"]

_Run = Callable[["Job"], None]


def started() -> bool:
    """Tell whether torchrun started this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_torchelastic_launched()


def needed(args: "ServerArgs") -> int:
    """Return how many ranks this host is asked for.

    Raises:
        UsageError: they do not fit the degrees, the heads or the GPUs.
    """
    from multimodal_gen.runtime.generator import plan_ranks

    return plan_ranks(args).world_size


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
    import torch.distributed as dist

    from multimodal_gen.runtime.distributed.faults import FaultBoard

    board = FaultBoard.meet(timeout)
    _be_easy_to_end()
    try:
        if board.rank == 0:
            with board.leading():
                _join_and(run, job())
        else:
            _be_quiet()
            _join_and(run, job())
            board.follow()
    except Exception as error:
        _end(board, error)
    dist.destroy_process_group()


def _started_rank(job: "Job", run: _Run) -> None:
    """Be a rank that `start` started."""
    be_one(lambda: job, run, timeout=job.args.rank_timeout)


def _join_and(run: _Run, job: "Job") -> None:
    import torch

    from multimodal_gen.runtime.distributed.joining import ranks_per_host
    from multimodal_gen.runtime.generator import join_ranks

    args, _ = join_ranks(job.args)
    # The ranks of a host share its cores.
    share = torch.get_num_threads() // (ranks_per_host() or 1)
    torch.set_num_threads(max(1, share))
    run(replace(job, args=args))


def _end(board: "FaultBoard", error: Exception) -> NoReturn:
    """Say what ended the run, unless another rank does, and end this process."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    told = board.verdict(error)
    if told is not None:
        lines = [f"error: {told}"]
        if not isinstance(error, MultimodalGenError):
            lines += traceback.format_exception(error)
        sys.stderr.write("\n".join(line.rstrip() for line in lines) + "\n")
    get_error_handler().record_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    usage = isinstance(error, MultimodalGenError) and not isinstance(error, RankError)
    # Not by way of the interpreter's end, which would wait for exchanges that never finish.
    os._exit(2 if usage else 1)


def _be_easy_to_end() -> None:
    """Let the launcher's signals end this process at once, even while it waits for an exchange."""
    with contextlib.suppress(ImportError):
        import tqdm

        # By default bars share a semaphore between processes, which would be left behind.
        tqdm.tqdm.set_lock(threading.RLock())
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def _be_quiet() -> None:
    """Leave warnings and notices, which are the same on every rank, to rank 0."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
