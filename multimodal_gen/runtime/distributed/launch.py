"""Starting ranks on this host, being one of them, and ending all of them when one fails.

torch's own elastic agent starts, watches and ends them, as under torchrun: no process is controlled
here.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from multimodal_gen.errors import MultimodalGenError, RankError
from multimodal_gen.runtime.distributed.faults import FailureStore, follows_from_another
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.distributed.handshake import pending_error

_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MONITOR_INTERVAL_S = 0.1
# A rank that does not end by itself, e.g. because it was stopped, is killed after this time.
_SHUTDOWN_S = 10


def launch_ranks(function: Callable[..., None], *args: Any, num_ranks: int) -> int:
    """Run `function(*args)` in `num_ranks` processes of this host, and wait for them.

    The first that fails ends all.

    Args:
        function: importable by name; it does its work in `run_rank`.
        *args: picklable.
        num_ranks: how many processes.

    Returns:
        0, or the exit status of the rank that failed.

    Raises:
        RankError: a rank ended without a word: killed, or crashed.
        KeyboardInterrupt: Ctrl-C; all ranks are gone.
        SystemExit: another signal that ends processes came; all ranks are gone.
    """
    with tempfile.TemporaryDirectory() as logs, _quiet(), _signals_restored():
        try:
            elastic_launch(_config(num_ranks, logs), _started)(os.getpid(), function, *args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _status(rank, failure)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    return 0


def _started(parent: int, function: Callable[..., None], *args: Any) -> None:
    # Torch lets a process end with its parent from here on; what happened before is not noticed.
    if os.getppid() != parent:
        _exit(1)
    function(*args)


def is_launched_rank() -> bool:
    """Tell whether torchrun, or `launch_ranks`, started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run_rank(work: Callable[[int], None], *, timeout: float) -> None:
    """Do `work(number of ranks)` as one of several; the process of a rank that fails ends here.

    What ended the run is said on the standard error, in one line that names the rank, and once on
    every host. Ranks other than 0 keep warnings to themselves, and wait until rank 0 is done.

    Args:
        work: joins the others, and does what there is to do.
        timeout: seconds the ranks wait for each other.

    Raises:
        RankError: the other ranks cannot be reached.
    """
    failures = FailureStore.connect(timeout)
    _be_easy_to_end()
    if failures.rank:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    try:
        with failures.watching(_end_stuck, _pending_error, _num_sent):
            work(failures.num_ranks)
            failures.finish()
    except Exception as error:
        _end(failures, error)
    if dist.is_initialized():
        dist.destroy_process_group()


def _pending_error() -> MultimodalGenError | None:
    groups = parallel_groups()
    return None if groups is None else pending_error(groups)


def _num_sent() -> int:
    groups = parallel_groups()
    return 0 if groups is None else groups.handshakes.num_sent


def _end(failures: FailureStore, error: Exception) -> NoReturn:
    """Report what ended the run, unless another rank of this host does, and end this process."""
    if isinstance(error, BrokenPipeError):
        get_error_handler().record_exception(error)
        _exit(1)  # what is printed is not read any more
    report = failures.report(error)
    if report.text is not None:
        defect = not isinstance(error, MultimodalGenError) and not follows_from_another(error)
        trace = traceback.format_exception(error) if report.is_own and defect else []
        _print_error(report.text, trace)
    time.sleep(report.linger_s)
    get_error_handler().record_exception(error)
    usage = isinstance(error, MultimodalGenError) and not isinstance(error, RankError)
    _exit(2 if usage else 1)


def _end_stuck(text: str | None) -> None:
    """End this process, which does not notice that the run is over."""
    if text is not None:
        _print_error(text)
    get_error_handler().record_exception(RankError("another rank ended the run"))
    _exit(1)


def _print_error(text: str, trace: Sequence[str] = ()) -> None:
    lines = (line.rstrip() for line in (f"error: {text}", *trace))
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _exit(status: int) -> NoReturn:
    """End this process without the interpreter's end, which would wait for broken exchanges."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _be_easy_to_end() -> None:
    """Let the launcher's signals end this process at once, even while it waits for an exchange."""
    with contextlib.suppress(ImportError):
        import tqdm

        # By default bars share a semaphore between processes, which would be left behind.
        tqdm.tqdm.set_lock(threading.RLock())
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def _config(num_ranks: int, logs: str) -> LaunchConfig:
    known = {field.name for field in fields(LaunchConfig)}
    # Older releases always wait for 30 seconds.
    patience: dict[str, Any] = (
        {"shutdown_timeout": _SHUTDOWN_S} if "shutdown_timeout" in known else {}
    )
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        **patience,
    )


def _status(rank: int, failure: ProcessFailure) -> int:
    """Return the exit status of a rank that said why it failed.

    Raises:
        KeyboardInterrupt: Ctrl-C reached the rank before this process.
        RankError: it said nothing.
    """
    code = failure.exitcode
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code > 0 and isinstance(failure.error_file_data.get("message"), dict):
        return code
    how = f"ended with exit status {code}"
    if code < 0:
        how = f"was ended by signal {-code} ({failure.signal_name()})"
    if code == -signal.SIGKILL:
        how += ", which is also how a host whose memory is full ends processes"
    name = f"rank {rank} (pid {failure.pid} on {socket.gethostname()})"
    raise RankError(f"{name} {how}; the other ranks were stopped")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's launcher logs of ranks that fail to itself: it is told in one line."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before, nothing = [logger.propagate for logger in loggers], logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(nothing)
            logger.propagate = propagate


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Put back the signal handlers that torch's launcher replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
