"""What tests of several packages share, made once per session: tiny pipelines, and processes.

A file's tests run in one process of pytest-xdist. Those that need ranks run in two, those of layers
in one and those of pipelines in the other, so that few ranks are started twice, and before the
others; then come kernel tests that take a process and a minute each, so that none of them is left
for the end.
"""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:  # the process that only hands tests to others needs no torch
    from tests.helpers.processes import World

TinyPipeline = Callable[[str], Path]

HERE = Path(__file__).parent
RANKS = "ranks"
# Each of its tests takes a process of its own, whichever runs the others.
CHILDREN = HERE / "kernels" / "test_children.py"
PROCESSES = "tests.helpers.processes"
# Importing it imports most of what pipelines need.
A_PIPELINE = "diffusers.pipelines.wan.pipeline_wan"
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests of the node run in a real ComfyUI, which no registry has as a package."""
    parser.addoption("--comfyui", metavar="CHECKOUT", help="a clone of ComfyUI to run nodes in")
    parser.addoption("--comfyui-python", metavar="PYTHON", help="one with its requirements")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` and pytest-xdist look
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, give each test the group that runs in one process, and the longest go first.

    Those are files that need ranks, then those that start a process.
    """
    mark_slow_cases(items, whole=not any("::" in argument for argument in config.args))
    with_ranks = {item.path for item in items if "worlds" in fixtures(item)}
    for item in items:
        if item.path in with_ranks:
            of = "layers" if item.nodeid.startswith("tests/runtime") else "pipelines"
            item.add_marker(pytest.mark.xdist_group(f"{RANKS} of {of}"))
        elif item.path != CHILDREN:
            name = item.path.relative_to(HERE).with_suffix("").as_posix()
            item.add_marker(pytest.mark.xdist_group(name))

    def turn(item: pytest.Item) -> int:
        return 0 if item.path in with_ranks else 1 if "run_with_triton" in fixtures(item) else 2

    items.sort(key=turn)


def mark_slow_cases(items: Sequence[pytest.Item], *, whole: bool) -> None:
    """Mark the cases as slow that a test's mark `slow_cases` names by their ids.

    Args:
        items: what was collected.
        whole: whether files were collected as a whole, so that a name that is not found is wrong.
    """
    named, found = set(), set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        for case in chain.from_iterable(mark.args for mark in item.iter_markers("slow_cases")):
            named.add(f"{test}[{case}]")
            if item.nodeid == f"{test}[{case}]":
                item.add_marker(pytest.mark.slow)
                found.add(item.nodeid)
    if whole and named != found:
        raise pytest.UsageError(
            f"slow_cases must name cases there are, not {sorted(named - found)}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what has been imported, and let it come less often after.

    It would go through hundreds of thousands of objects again and again: a tenth of the time.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let it take everything again: extension modules report what is left at the end."""
    gc.unfreeze()


def fixtures(item: pytest.Item) -> Sequence[str]:
    """Return the names of the fixtures that a test needs."""
    return getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True, scope="session")
def no_traces() -> None:
    """Keep pytest from listening to torch's traces: with a listener, compiling writes them."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `sage_attn` run on the CPU, by the definition of its 8-bit kernels."""
    from tests.helpers.eight_bits import allow_on_cpus

    allow_on_cpus(monkeypatch)


@pytest.fixture(scope="session")
def tiny_pipeline(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TinyPipeline:
    """Return the folder of a family's tiny pipeline; tests must not write to it.

    Each is made once, by the first process of pytest-xdist that needs it.
    """
    from multimodal_gen.testing.tiny_models import make_tiny_model

    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent
    folder = root / "tiny-pipelines"
    folder.mkdir(exist_ok=True)

    @cache
    def make(family: str) -> Path:
        with FileLock(folder / f"{family}.lock"):
            made = folder / family
            return made if made.exists() else make_tiny_model(family, made)

    return make


@pytest.fixture
def black_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Wan decode nothing, which takes longest: for tests of latents and reports."""
    from diffusers import AutoencoderKLWan

    def decode(vae: Any, latents: Any, return_dict: bool = True) -> tuple[Any]:
        assert not return_dict
        batch, _, frames, height, width = latents.shape
        return (latents.new_zeros(batch, 3, 4 * frames - 3, 8 * height, 8 * width),)

    monkeypatch.setattr(AutoencoderKLWan, "decode", decode)


@dataclass
class Worlds:
    """Processes that tests share, started when one needs them."""

    folder: Path
    preload: list[str]
    started: dict[int, "World"] = field(default_factory=dict)

    def of(self, num_ranks: int) -> "World":
        from tests.helpers.processes import World

        if num_ranks not in self.started:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            self.started[num_ranks] = World(num_ranks, folder, preload=self.preload)
        return self.started[num_ranks]

    def close(self) -> None:
        while self.started:
            self.started.popitem()[1].close()


WORLDS = pytest.StashKey[Worlds]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Close what the next test does not need: threads of groups that wait cost time."""
    yield
    if WORLDS in item.session.stash and not shares_ranks(nextitem):
        item.session.stash[WORLDS].close()


def shares_ranks(item: pytest.Item | None) -> bool:
    """Tell whether a test belongs to a group whose files share processes."""
    mark = item.get_closest_marker("xdist_group") if item else None
    return mark is not None and mark.args[0].startswith(RANKS)


@pytest.fixture(scope="session")
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worlds]:
    """Processes by their number; they know pipelines where a test of this run needs any."""
    pipelines = any("tiny_pipeline" in fixtures(item) for item in request.session.items)
    shared = Worlds(tmp_path_factory.mktemp("ranks"), [A_PIPELINE] if pipelines else [])
    request.session.stash[WORLDS] = shared
    yield shared
    shared.close()


@pytest.fixture
def two_ranks(worlds: Worlds) -> "World":
    """Two processes, for tests that leave them usable."""
    return worlds.of(2)


@pytest.fixture
def four_ranks(worlds: Worlds) -> "World":
    """Four processes, for tests that leave them usable."""
    return worlds.of(4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Give a headless browser; where there is none, fail in CI and skip elsewhere."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing(f"needs one of {', '.join(names)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=BROWSER_FLAGS)
        yield opened
        opened.close()
