"""Whether kernels do what they should with a release of a package that nobody has tried them with.

A kernel that is declared with a check computes small calls once per process and device, before it
is chosen for the first time; what it got wrong, or raised, becomes the reason for which another one
runs.
"""

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch

from multimodal_gen.errors import UsageError

__all__ = ["SelfCheck", "forget_self_checks", "self_check", "self_checks"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What came of a check.

    Attributes:
        kernels: what was checked, e.g. "kernel gluon (block_sparse)".
        release: what nobody has tried it with, e.g. "triton 3.10.0".
        device: index of the GPU.
        fault: what is wrong, or None.
    """

    kernels: str
    release: str
    device: int
    fault: str | None

    def __str__(self) -> str:
        found = "passed" if self.fault is None else f"failed: {self.fault}"
        return (
            f"{self.kernels} has not been tried with {self.release}; its self-check on GPU "
            f"{self.device} {found}"
        )


# What a check found holds for the process: compiled kernels are loaded once.
_FOUND: dict[tuple[str, int], SelfCheck] = {}
_LOCK = Lock()
# The check that runs in this thread. It must launch what it checks by itself: to choose a kernel
# would wait for its own result.
_RUNNING: ContextVar[str] = ContextVar("multimodal_gen_self_check", default="")


def self_check(path: str, kernels: str, release: str, device: int | None = None) -> SelfCheck:
    """Return what a check says; runs it where it has not run yet.

    Args:
        path: "module:function" of the check, which takes a device, and returns what is wrong or
            None. It runs in a thread of its own, where no mode of the caller's is in force.
        kernels: what it checks, for messages.
        release: what is installed, for messages.
        device: index of the GPU; the current one when None.

    Raises:
        UsageError: a CUDA graph is being captured, which a check would break.
        RuntimeError: a check asks, instead of launching what it checks.
    """
    if _RUNNING.get():
        raise RuntimeError(f"the self-check {_RUNNING.get()} chose a kernel that needs {path}")
    index = torch.cuda.current_device() if device is None else device
    kernels = f"{kernels} ({path.rpartition(':')[2]})"
    with _LOCK:
        found = _FOUND.get((path, index))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    f"{kernels} must be checked before a CUDA graph is captured, because it has "
                    f"not been tried with {release}; run the call once before the capture"
                )
            fault = _run(path, index)
            found = SelfCheck(kernels=kernels, release=release, device=index, fault=fault)
            _FOUND[path, index] = found
    if found.fault is not None:
        _warn(f"{kernels} does not work with {release}, so other kernels run: {found.fault}")
    return found


def self_checks() -> tuple[SelfCheck, ...]:
    """Return what all checks of this process said, in the order in which they ran."""
    return tuple(_FOUND.values())


def forget_self_checks() -> None:
    """Check anew from here on, which tests need that change what is installed."""
    _FOUND.clear()
    _warn.cache_clear()


def _run(path: str, index: int) -> str | None:
    module, _, function = path.partition(":")
    check = getattr(importlib.import_module(module), function)

    def run() -> str | None:
        _RUNNING.set(path)
        found: str | None = check(torch.device("cuda", index))
        return found

    with ThreadPoolExecutor(1) as executor:
        try:
            fault = executor.submit(run).result()
        except Exception as error:  # a release nobody knows may fail in any way
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return fault


@cache
def _warn(message: str) -> None:
    logger.warning("%s", message)
