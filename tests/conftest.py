"""What tests of several packages share, made once per session: tiny pipelines, and processes."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from multimodal_gen.testing.processes import World

TinyPipeline = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> TinyPipeline:
    """Return the folder of a family's tiny pipeline; tests must not write to it."""
    from multimodal_gen.testing.tiny_models import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny-pipelines")

    @cache
    def make(family: str) -> Path:
        return make_tiny_model(family, folder / family)

    return make


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two processes, for tests that leave them usable."""
    with World(2, tmp_path_factory.mktemp("two")) as world:
        yield world


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes, for tests that leave them usable."""
    with World(4, tmp_path_factory.mktemp("four")) as world:
        yield world
