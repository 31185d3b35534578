"""Runs the real command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from multimodal_gen.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit status and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def pipeline_libraries() -> None:
    """Import them before output is captured: their log handlers keep the stderr they find."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401


@pytest.fixture
def sglang(pipeline_libraries: None, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs `sglang` with its arguments."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run
