"""What a child process does: runs tests with a triton of its own."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What takes longest to import; children are forks of a process that has imported it.
PRELOAD = ["tests.helpers.processes", "torch.distributed.tensor", "numpy", "pytest", "hypothesis"]


def run_pytest(
    folder: Path,
    arguments: Sequence[str],
    path: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
) -> None:
    """Run pytest in `folder`, and leave with its status; what it prints is in `output`.

    Modules are looked for in `path` first: triton has not been imported yet.
    """
    assert "triton" not in sys.modules
    with output.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    import pytest
    import torch

    torch.set_num_threads(1)
    # Modules with plugins may have been imported for other tests: no reason to fail.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    sys.exit(pytest.main([*quiet, *arguments]))
