"""Whether kernels do what they should with a release of a package that is new to them.

A kernel that is declared with a check computes small calls once per process and device, before it
is chosen for the first time; what it got wrong, or raised, becomes the reason for which another one
runs.
"""

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock

import torch

from multimodal_gen.errors import UsageError, first_line, is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What came of a check.

    Attributes:
        kernels: what was checked, e.g. "kernel gluon (block_sparse)".
        release: what it has not been tried with, e.g. "triton 3.10.0".
        device: index of the GPU.
        fault: what is wrong, or None.
    """

    kernels: str
    release: str
    device: int
    fault: str | None

    @property
    def reason(self) -> str | None:
        """Why the kernels cannot be taken, or None."""
        if self.fault is None:
            return None
        return f"failed its self-check with {self.release}: {self.fault}"

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
        torch.OutOfMemoryError: the check found no memory; the next call checks again.
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
            try:
                fault = _run(path, index)
            except Exception as error:  # an unknown release may fail in any way
                if is_out_of_memory(error):  # which says nothing of the release
                    raise torch.OutOfMemoryError(
                        f"the self-check of {kernels} must have some MiB of memory on GPU {index}, "
                        f"found none ({first_line(error)}); free memory and call again"
                    ) from error
                fault = _said(error)
            found = SelfCheck(kernels=kernels, release=release, device=index, fault=fault)
            _warn_once(found)
            _FOUND[path, index] = found
    return found


def self_checks() -> tuple[SelfCheck, ...]:
    """Return what all checks of this process said, in the order in which they ran."""
    return tuple(_FOUND.values())


def forget_self_checks() -> None:
    """Check anew from here on, which tests need that change what is installed."""
    _FOUND.clear()


def _run(path: str, index: int) -> str | None:
    module, _, function = path.partition(":")
    check = getattr(importlib.import_module(module), function)

    def run() -> str | None:
        _RUNNING.set(path)
        found: str | None = check(torch.device("cuda", index))
        return found

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def _said(error: BaseException) -> str:
    while error.__cause__ is not None:  # in a function that a kernel calls, Triton wraps its own
        error = error.__cause__
    name, said = type(error).__name__, first_line(error)
    lines = str(error).strip().splitlines()
    if lines and "CompilationError" in {each.__name__ for each in type(error).__mro__}:
        # It begins with the place and the source, and ends with what is wrong.
        said = lines[-1].strip()
    return name if said == name else f"{name}: {said}"


def _warn_once(found: SelfCheck) -> None:
    """Warn of what is wrong, unless the same kernel failed on another GPU."""
    if found.fault is None:
        return
    known = (each.kernels for each in _FOUND.values() if each.fault is not None)
    if found.kernels in known:
        return
    logger.warning(
        "%s does not work with %s, so other kernels run: %s",
        found.kernels,
        found.release,
        found.fault,
    )
