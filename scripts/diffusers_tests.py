#!/usr/bin/env python3
"""Run tests of diffusers' own with `apply` on; nothing is fetched.

    python3 scripts/diffusers_tests.py --source ~/diffusers tests/models/transformers

Wheels of diffusers hold no tests: they come from a checkout, of the installed release. Every model
that a test calls is attached before its first call and stays so; every pipeline is attached while
it is called. Tests that fail are run once more without `apply`, and what fails then too is counted
apart. Printed are the classes that were attached, and why others were not.

Further arguments are pytest's. Exits with status 1 where a test fails with `apply` alone, and with
status 2 where nothing was run.
"""

import argparse
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

# A checkout works without being installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from multimodal_gen.errors import NothingAppliedError
from multimodal_gen.integrations.components import find_components
from multimodal_gen.integrations.denoiser_context import current_denoiser_context
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.hooks import StandIn

_FAILED = "failed: "


class AppliedEverywhere:
    """A pytest plug-in that attaches what tests call, between `begin` and `end`.

    Attributes:
        attached: calls with attached models, by class of the model or pipeline.
        left: why a class was not attached.
        failed: names of the tests that failed, in order.
        outcomes: how many tests had which outcome.
    """

    def __init__(self) -> None:
        self.attached: Counter[str] = Counter()
        self.left: dict[str, str] = {}
        self.failed: dict[str, None] = {}
        self.outcomes: Counter[str] = Counter()
        self._on = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's outcome, or that of its set-up where that was all there was."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            if report.failed:
                self.failed[report.nodeid] = None

    def begin(self) -> None:
        """Attach models and pipelines of classes that are imported from now on."""
        from diffusers import DiffusionPipeline, ModelMixin

        plugin = self

        def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and current_denoiser_context() is None:
                plugin.attach(model)
            return nn.Module.__call__(model, *args, **kwargs)

        def begin_class(cls: Any, /, **options: Any) -> None:
            super(DiffusionPipeline, cls).__init_subclass__(**options)
            if "__call__" in vars(cls):
                cls.__call__ = plugin.while_attached(vars(cls)["__call__"])

        ModelMixin.__call__ = call
        DiffusionPipeline.__init_subclass__ = classmethod(begin_class)
        self._on = True

    def end(self) -> None:
        """Attach nothing any more."""
        from diffusers import DiffusionPipeline, ModelMixin

        del ModelMixin.__call__, DiffusionPipeline.__init_subclass__
        self._on = False

    def while_attached(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pipeline's `__call__` that attaches it, and leaves it as it was."""

        @functools.wraps(own)
        def call(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            models = [component.model for component in find_components(pipeline)]
            free = self._on and not any(is_attached(model) for model in models)
            handle = self.attach(pipeline) if free else None
            try:
                return own(pipeline, *args, **kwargs)
            finally:
                if handle is not None:
                    handle.remove()

        return call

    def attach(self, target: Any) -> Any:
        """Attach a model or pipeline if that can be; return the handle, or None."""
        name, handle = type(target).__name__, None
        try:
            if not (isinstance(target, nn.Module) and is_attached(target)):
                handle = apply(target)
        except NothingAppliedError as error:
            self.left[name] = str(error)
            return None
        self.attached[name] += 1
        return handle


def is_attached(model: nn.Module) -> bool:
    """Return whether `apply` has taken over an attention module of a model."""
    return any(isinstance(getattr(m, "processor", None), StandIn) for m in model.modules())


def find_source(given: Path | None) -> Path | None:
    """Return the folder that holds diffusers' tests: the one given, or that of the installation."""
    spec = find_spec("diffusers")
    installed = None if spec is None or spec.origin is None else Path(spec.origin).parents[2]
    folder = given or installed
    return folder if folder is not None and (folder / "tests" / "models").is_dir() else None


def run(source: Path, names: Sequence[str], plugin: AppliedEverywhere) -> None:
    """Run tests, by their names in the folder `source`, with a plug-in."""
    os.chdir(source)
    pytest.main(["-p", "no:cacheprovider", "--rootdir", ".", *names], [plugin])


def failing_stock(source: Path, names: Sequence[str]) -> set[str]:
    """Return which tests fail without `apply` too, in a process of their own."""
    command = [sys.executable, __file__, "--source", str(source), "--stock", *names]
    out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {line.removeprefix(_FAILED) for line in out.splitlines() if line.startswith(_FAILED)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print what was attached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder that holds diffusers' tests folder")
    parser.add_argument("--stock", action="store_true", help="run them without apply")
    options, names = parser.parse_known_args(arguments)
    source = find_source(options.source)
    if source is None:
        print("error: the installed diffusers has no tests; name a checkout by --source")
        return 2
    plugin = AppliedEverywhere()
    if not options.stock:
        plugin.begin()
    run(source, names, plugin)
    if not options.stock:
        plugin.end()
    stock = failing_stock(source, [*plugin.failed]) if plugin.failed and plugin.attached else set()
    for name, calls in sorted(plugin.attached.items()):
        print(f"attached: {name}, {calls} calls")
    for name, reason in sorted(plugin.left.items()):
        print(f"left alone: {name}: {reason}")
    for name in plugin.failed:
        print(f"failed without apply too: {name}" if name in stock else f"{_FAILED}{name}")
    alone = len(plugin.failed.keys() - stock)
    print(f"tests: {dict(plugin.outcomes)}; {alone} of them failed as they do not without apply")
    return 2 if not plugin.outcomes else 1 if alone else 0


if __name__ == "__main__":
    sys.exit(main())
