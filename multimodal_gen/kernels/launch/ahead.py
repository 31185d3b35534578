"""Compiles kernels before they are needed, in processes, into Triton's cache or a folder to ship.

    make(noted)             compile what a rehearsal noted
    saved(folder, place)    into a folder, and not into Triton's cache
    use(folder, device)     put what a folder holds into Triton's cache

A folder holds what Triton keeps of each kernel that a launch needs, and `kernels.json`: which GPU
and releases it was made for, what it holds, and the digest of each file. Paths in it are those of
no machine.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from multimodal_gen._version import __version__
from multimodal_gen.errors import UsageError, first_line, short
from multimodal_gen.files import (
    MalformedError,
    nearest_existing,
    read_small_file,
    require_new,
    write_text,
)
from multimodal_gen.kernels.launch.rehearsal import Noted

MANIFEST = "kernels.json"
_FORMAT = 2
# What Triton keeps of a kernel and no launch reads: the steps between source and binary.
_NOT_KEPT = (".source", ".ttir", ".glir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What compiled kernels are for.

    Attributes:
        gpu: its name; another one of the same capability takes the same kernels.
        capability: compute capability, e.g. "9.0".
        machine: architecture of the host, e.g. "x86_64".
        multimodal_gen: release of this package.
        torch: release of torch.
        triton: release of Triton.
    """

    gpu: str
    capability: str
    machine: str
    multimodal_gen: str
    torch: str
    triton: str

    def __str__(self) -> str:
        return (
            f"{self.gpu} (compute capability {self.capability}), {self.machine}, torch "
            f"{self.torch}, triton {self.triton}, multimodal_gen {self.multimodal_gen}"
        )


def place_of_gpu(device: torch.device) -> Place:
    """Return what kernels for a GPU of this machine are for.

    Raises:
        UsageError: it is none of NVIDIA, or there is no Triton.
    """
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    if device.type != "cuda" or torch.version.hip is not None or not triton:
        raise UsageError(
            f"kernels must be compiled ahead for an NVIDIA GPU, with triton, got {device} and "
            f"triton {triton or 'not installed'}"
        )
    return Place(
        gpu=torch.cuda.get_device_name(device),
        capability="{}.{}".format(*torch.cuda.get_device_capability(device)),
        machine=platform.machine(),
        multimodal_gen=__version__,
        torch=torch.__version__,
        triton=triton,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A kernel that was compiled.

    Attributes:
        name: of its function.
        key: of its entry in Triton's cache.
        seconds: how long it took; next to nothing where it was there already.
    """

    name: str
    key: str
    seconds: float


class _Driver:
    """Answers for a GPU in processes that must not touch it."""

    def __init__(self, driver: Any, target: Any, index: int) -> None:
        self._driver, self._target, self._index = driver, target, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, device: int) -> int:
        return 0


def make(noted: Sequence[Noted], *, workers: int | None = None, index: int = 0) -> tuple[Made, ...]:
    """Compile kernels into Triton's cache, those that are there already excepted.

    Forks: it is for a process of its own, in which nothing runs on the GPU.

    Args:
        noted: what a rehearsal noted.
        workers: how many processes compile at a time; None for one per core.
        index: of the GPU.

    Returns:
        What was made, in the order of `noted`, each kernel once.

    Raises:
        UsageError: a kernel does not compile, or a process ended without a word.
    """
    from triton.runtime import driver

    active, started = driver.active, []
    driver.set_active(_Driver(active, active.get_current_target(), index))
    try:
        context = multiprocessing.get_context("fork")
        following, found = context.Value("i", 0), context.SimpleQueue()
        cores = len(os.sched_getaffinity(0))
        processes = [
            context.Process(target=_work, args=(noted, following, found), daemon=True)
            for _ in range(min(workers or cores, len(noted)))
        ]
        with warnings.catch_warnings():  # of other threads, none of which compiles
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in processes:
                process.start()
                started.append(process)
        made: dict[int, Made] = {}
        for _ in noted:
            while found.empty() and any(process.is_alive() for process in processes):
                time.sleep(0.01)
            if found.empty():
                raise UsageError("a process that compiled kernels ended without a word")
            number, kernel = found.get()
            if isinstance(kernel, str):
                raise UsageError(f"{noted[number].name} must compile, it did not: {kernel}")
            made[number] = kernel
    finally:
        driver.set_active(active)
        for process in started:  # what one of them still compiles is for nobody
            process.terminate()
            process.join()
    distinct = {made[number].key: made[number] for number in sorted(made, reverse=True)}
    return tuple(reversed(distinct.values()))


def _work(noted: Sequence[Noted], following: Any, found: Any) -> None:
    """Compile the next kernel that no other process has begun, until there is none."""
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(noted):
            return
        try:
            found.put((number, _compile(noted[number])))
        except Exception as error:  # compilers fail in any way
            found.put((number, first_line(error)))


def _compile(noted: Noted) -> Made:
    from triton.runtime import driver

    start = time.perf_counter()
    compiled = noted.kernel.warmup(*noted.arguments, grid=noted.grid, **noted.options)
    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:  # which some releases compile, too
        launcher(compiled.src, compiled.metadata)
    seconds = round(time.perf_counter() - start, 2)
    return Made(name=noted.name, key=_entry_of(compiled), seconds=seconds)


def _entry_of(compiled: Any) -> str:
    """Return the name of the folder in Triton's cache that a kernel lies in."""
    path = next(iter(compiled.metadata_group.values()))
    return Path(path).parent.name


@contextmanager
def _writing(folder: Path, what: str) -> Iterator[None]:
    """Say of which folder it is that writing it failed inside the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{what} must be a folder that can be written, got {str(folder)!r}: "
            f"{error.strerror or error}"
        ) from error


@contextmanager
def saved(folder: Path, place: Place) -> Iterator[None]:
    """Have what is compiled in the `with` block in a folder of its own.

    Args:
        folder: it must not exist yet.
        place: what it is made for.

    Raises:
        UsageError: it is there already, or cannot be written.
    """
    from triton import knobs

    require_new(folder, "--output")
    folder = folder.expanduser()
    # Where no folder has to be made for it, which would be left where nothing comes of it.
    staging = nearest_existing(folder.parent) / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        with _writing(folder, "--output"):
            staging.mkdir()
        with knobs.cache.scope():
            knobs.cache.dir = str(staging.resolve())
            yield
        with _writing(folder, "--output"):
            names = [_keep_binaries(entry) for entry in sorted(staging.iterdir())]
            manifest = {
                "format": _FORMAT,
                "place": asdict(place),
                "kernels": dict(sorted(Counter(name for name in names if name).items())),
                "files": _digests(staging),
            }
            write_text(staging / MANIFEST, json.dumps(manifest, indent=2) + "\n")
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def use(folder: Path, device: torch.device) -> int:
    """Put the kernels of a folder into Triton's cache, for this process and later ones.

    Args:
        folder: `saved` made it.
        device: where they are to run.

    Returns:
        How many entries were not there yet.

    Raises:
        UsageError: it is no such folder, was made for another GPU or other releases, or lacks a
            file, or has one that was changed.
    """
    name = "compiled_kernels (--compiled-kernels)"
    try:
        place = place_of_gpu(device)
    except UsageError as error:
        raise UsageError(f"{name}: {error}; leave it out here") from error
    manifest = folder / MANIFEST
    try:
        found = json.loads(read_small_file(manifest))
        if found.get("format") != _FORMAT:
            raise ValueError(f"it has format {short(found.get('format'))}, not {_FORMAT}")
        made_for, files = Place(**found["place"]), dict(found["files"])
        if not files:
            raise ValueError("it has no files")
    except (AttributeError, KeyError, MalformedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{name} must be a folder that `sglang attention warm --output` made, got "
            f"{short(str(folder))}: {first_line(error)}; "
            f"{'make it anew' if manifest.is_file() else 'check the path'}"
        ) from error
    if replace(made_for, gpu=place.gpu) != place:
        raise UsageError(
            f"{name} must hold kernels for {place}, {str(folder)!r} was made for {made_for}; run "
            f"`sglang attention warm` here, or leave it out"
        )
    try:
        digests = _digests(folder)
    except OSError as error:
        raise UsageError(f"{name} must be readable, {str(folder)!r} is not: {error}") from error
    for file, digest in files.items():
        if digests.get(file) != digest:
            raise UsageError(
                f"{name} must be as `sglang attention warm --output` made it, in {str(folder)!r} "
                f"{short(file)} is missing or was changed; copy it again"
            )
    from triton import knobs

    cache = Path(knobs.cache.dir)
    with _writing(cache, "Triton's cache"):
        cache.mkdir(parents=True, exist_ok=True)
        entries = sorted({file.partition("/")[0] for file in files})
        return sum(_put(folder / entry, cache / entry) for entry in entries)


def _digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file of the entries in a folder, by its path in it."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.glob("*/*"))
        if file.is_file()
    }


def _keep_binaries(entry: Path) -> str | None:
    """Remove from an entry of Triton's cache what no launch reads; return its kernel's name."""
    name = None
    for file in sorted(entry.iterdir()):
        if file.name.startswith(_GROUP):
            group = json.loads(file.read_text())
            kept = [each for each in group["child_paths"] if not each.endswith(_NOT_KEPT)]
            file.write_text(json.dumps({"child_paths": dict.fromkeys(kept, "")}))
            name = file.name.removeprefix(_GROUP).removesuffix(".json").strip("_")
        elif file.name.endswith(_NOT_KEPT):
            file.unlink()
    return name


def _put(entry: Path, final: Path) -> bool:
    """Put an entry into Triton's cache whole, or leave the one that is there."""
    groups = [file.name for file in entry.iterdir() if file.name.startswith(_GROUP)]
    if all((final / name).is_file() for name in groups) and final.is_dir():
        return False
    staging = final.with_name(f"tmp.{uuid.uuid4().hex}")
    try:
        shutil.copytree(entry, staging)
        for name in groups:
            children = json.loads((staging / name).read_text())["child_paths"]
            paths = {child: str(final / child) for child in children}
            (staging / name).write_text(json.dumps({"child_paths": paths}))
        try:
            staging.rename(final)
        except OSError:  # of a compilation that was interrupted, or another process was faster
            for file in sorted(staging.iterdir(), key=lambda each: each.name in groups):
                os.replace(file, final / file.name)  # groups last, which make the others count
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True
