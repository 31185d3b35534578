"""Child processes for the kernel tests that need a certain release of triton.

test_*triton.py and test_*compile.py of the operations are run by test_children.py, and collected
only where they are named.
"""

import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.kernels.children import PRELOAD, run_pytest
from tests.kernels.compiling import REPOSITORY, compiler, installed_release

__all__ = ["TIMEOUT", "RunWithTriton", "compiler"]

# Seconds. The longest child takes 80 on an idle core.
TIMEOUT = 570

RunWithTriton = Callable[..., None]

collect_ignore_glob = ["*/test_*triton.py", "*/test_*compile.py"]


def python_path(release: str, environment: Path, installed: str | None) -> list[str]:
    """Return what a child's path needs in front to import triton `release`.

    Skips the test where there is neither a folder of it in `environment`, as scripts/test makes,
    nor one of the same minor release among the installed packages.
    """
    folder = environment / "kernels" / f"triton-{release}"
    if folder.is_dir():
        return [str(folder)]
    series = release.rpartition(".")[0]
    if installed is None or not installed.startswith(f"{series}."):
        pytest.skip(
            f"needs triton {series}, which is neither in {folder}, where scripts/test puts it, "
            f"nor installed ({installed or 'none'} is)"
        )
    return []


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out of Triton's interpreter what takes half of its time and changes no result.

    It replaces the functions of Triton's language at every call of a function: once is enough. It
    makes a table of dtypes whenever it looks one up. And it computes every sum and product of whole
    numbers a second time in 64 bits, to see whether they fit into 32: only where slow tests run.
    """
    triton = sys.modules.get("triton")
    if triton is None or not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    numpy_dtype = interpreter._get_np_dtype
    known = cache(numpy_dtype)

    def patch_once(function: FunctionType) -> object:
        tl = interpreter.tl
        languages = frozenset(
            id(value) for value in function.__globals__.values() if value is tl or value is tl.core
        )
        if languages not in patched:
            patched.add(languages)
            patch(function)
        return interpreter._LangPatchScope()  # which has nothing to restore

    def look_up(dtype: Any) -> object:
        return numpy_dtype(dtype) if dtype.scalar.is_ptr() else known(dtype.scalar)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", look_up)
        if request.config.getoption("markexpr") == "not slow":
            options = interpreter.interpreter_builder.options
            assert options.sanitize_overflow
            monkeypatch.setattr(
                interpreter.interpreter_builder,
                "options",
                dataclasses.replace(options, sanitize_overflow=False),
            )
        yield


@pytest.fixture
def run_with_triton(tmp_path: Path) -> RunWithTriton:
    """Run files of tests in a process with a release of triton."""

    def run(release: str, tests: Sequence[Path], *arguments: str, **variables: str) -> None:
        path = python_path(release, Path(sys.prefix), installed_release())
        words = ("-q", "-p", "no:cacheprovider", *arguments, *map(str, tests))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        output = tmp_path / "output"
        # A triton that came with torch may have been imported where others fork from.
        method = "forkserver" if installed_release() is None else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        process = context.Process(
            target=run_pytest, args=(REPOSITORY, words, path, environment, output)
        )
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        # At its end a process of its own is told what the compiler's bindings leave behind.
        said = output.read_text(errors="replace").partition("\nnanobind:")[0]
        assert process.exitcode == 0, said[-10000:]
        assert " passed" in said
        assert "skipped" not in said, said[-8000:]

    return run
