"""What tests of several packages share, made once per session: tiny pipelines, and processes.

Tests that need ranks all run in the same process of pytest-xdist, so that no ranks are started
twice, and before the others; then come kernel tests that take a process and a minute each, so that
none of them is left for the end.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from multimodal_gen.testing.processes import World

TinyPipeline = Callable[[str], Path]
MakeWorld = Callable[[int], World]

RANKS = ("two_ranks", "four_ranks")
# Importing it imports most of what pipelines need.
A_PIPELINE = "diffusers.pipelines.wan.pipeline_wan"


def needs_ranks(file: Path) -> bool:
    """Tell whether tests in a file use the ranks that all share."""
    text = file.read_text(encoding="utf-8")
    return any(name in text for name in RANKS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files whose tests need ranks to the same process of pytest-xdist."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if needs_ranks(config.rootpath / file) else file

    config.option.loadscopereorder = False  # keep our order
    return RanksTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first: files that need ranks, then those that start a process."""
    with_ranks = {path for path in {item.path for item in items} if needs_ranks(path)}

    def turn(item: pytest.Item) -> int:
        return 0 if item.path in with_ranks else 1 if "run_with_triton" in fixtures(item) else 2

    items.sort(key=turn)


def fixtures(item: pytest.Item) -> Sequence[str]:
    """Return the names of the fixtures that a test needs."""
    return getattr(item, "fixturenames", ())


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
def make_world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MakeWorld:
    """Return a function that starts processes, which know pipelines where tests need them."""
    pipelines = any("tiny_pipeline" in fixtures(item) for item in request.session.items)
    preload = [A_PIPELINE] if pipelines else []
    return lambda num: World(num, tmp_path_factory.mktemp(f"ranks-{num}"), preload=preload)


@pytest.fixture(scope="session")
def two_ranks(make_world: MakeWorld) -> Iterator[World]:
    """Two processes, for tests that leave them usable."""
    with make_world(2) as world:
        yield world


@pytest.fixture(scope="session")
def four_ranks(make_world: MakeWorld) -> Iterator[World]:
    """Four processes, for tests that leave them usable."""
    with make_world(4) as world:
        yield world
