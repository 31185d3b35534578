"""Runs benchmarks in this process: importing what they need takes longer than their tiny cases."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@dataclass(frozen=True)
class Outcome:
    """How a script ended: what it left with, if it did, and what it printed."""

    code: object
    out: str
    err: str


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a benchmark as on a machine without a GPU, wherever the tests run."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCH))
        found = importlib.import_module(name)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if file and Path(file).parent == BENCH and hasattr(module, "DEVICE"):
                monkeypatch.setattr(module, "DEVICE", "cpu")
        return found

    return load


@pytest.fixture
def bench_of(bench: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., object]:
    """Return a run of a benchmark that writes one round into a folder of the test."""

    def make(name: str, **options: object) -> object:
        known = {"commit": "c0ffee", "rounds": 1, "out": tmp_path, "smoke": True}
        return bench("_harness").Bench(name, SimpleNamespace(**known, **options))

    return make


@pytest.fixture
def run_bench(
    bench: Callable[[str], ModuleType],
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Outcome]:
    """Run the command line of a benchmark; what it changes in torch is as before."""

    def run(name: str, *arguments: object) -> Outcome:
        bench("layers" if name in bench("run").LAYERS else name)
        words = [name, "--commit", "c0ffee", *map(str, arguments)]
        tf32 = torch.backends.cuda.matmul.allow_tf32
        capfd.readouterr()
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                code = bench("run").main(words)
            except SystemExit as error:
                code = error.code
            finally:
                torch.backends.cuda.matmul.allow_tf32 = tf32
        return Outcome(code or 0, *capfd.readouterr())

    return run
