"""Starting ranks on this host, and ending all of them when one fails.

torch's own elastic agent does it, as under torchrun: no process is controlled here.
"""

import contextlib
import logging
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from multimodal_gen.errors import RankError

__all__ = ["start_ranks"]

_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MONITOR_INTERVAL_S = 0.1
# A rank that does not end by itself, e.g. because it was stopped, is killed after this time.
_SHUTDOWN_S = 10


def start_ranks(function: Callable[..., None], *args: Any, num_ranks: int) -> int:
    """Run `function(*args)` in `num_ranks` processes of this host, and wait for them.

    They are spawned as torchrun's are: `init_world` and `FaultBoard.meet` need no argument there.
    The first that fails ends all.

    Args:
        function: importable by name. One that fails says why, calls `record_exception` of the
            error handler of torch's elastic launcher, and exits with a status.
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
            elastic_launch(_config(num_ranks, logs), function)(*args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _status(rank, failure)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    return 0


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
    raise RankError(f"rank {rank} (pid {failure.pid}) {how}; the other ranks were stopped")


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
