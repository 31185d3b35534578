"""Runs a comparison: one loaded pipeline, every clip on all backends before the next clip.

    warm-up       a short generation of the reference, whose calls all backends get a few of
    clip          each prompt with each seed:
      reference     some of its calls are replayed (`layers.py`)
      others        exact kernels, whose difference means nothing, and the candidates; who starts
                    changes from clip to clip, so that what drifts favours none
      reference     of some clips once more: what differs in time there means nothing
    metrics       clips against the reference's, verdicts, the report

A backend that cannot serve the model, fails or runs out of memory is a row with a message; only the
reference must run. Whatever finished is kept, and found again by `resume`.
"""

import datetime
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError, first_line
from multimodal_gen.files import naming_file
from multimodal_gen.records import write_record
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.comparison.configurations import (
    EXACT_KERNELS,
    ONE_DEVICE,
    Clip,
    Configuration,
    Plan,
    read_configuration,
)
from multimodal_gen.runtime.comparison.cost import Meter
from multimodal_gen.runtime.comparison.layers import Measured, Replay, WarmUp, failure_line
from multimodal_gen.runtime.comparison.perceptual import available
from multimodal_gen.runtime.comparison.record import (
    VERSION,
    Environment,
    Generation,
    Model,
    Report,
)
from multimodal_gen.runtime.comparison.results import LatentSteps, Results, Todo
from multimodal_gen.runtime.comparison.store import Store, weights_digest
from multimodal_gen.runtime.comparison.verdict import judged
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator import output
from multimodal_gen.runtime.generator.cache import cached
from multimodal_gen.runtime.generator.denoise import Denoised, denoise
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.library_errors import out_of_memory_explained, told_of_run
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.quiet import without
from multimodal_gen.runtime.generator.sampling import (
    check_arguments,
    check_sizes,
    default_fps,
    prepare_call,
    steps_of,
)
from multimodal_gen.runtime.layers.attention.backends.registry import (
    current_environment,
    find_backend,
)
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.layers.attention.selector import Selection
from multimodal_gen.runtime.layers.attention.warn_once import logger as layer_warnings
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import CALL_SETTINGS, ServerArgs

_SETTINGS = (*CALL_SETTINGS, "fps")
# What changes how long a generation takes, or its pixels, and is not in the model's identity.
_LOADING = ("enable_torch_compile", "offload", "vae_tiling")
_FLOORS = 2  # exact kernels other than the reference, where there are as many
_WARM_UP_STEPS = 2


class Attached(AbstractContextManager["Attached"], Protocol):
    """Attention backends attached to a pipeline, until a `with` block of it ends."""

    def report(self) -> AttentionReport:
        """Return what ran so far."""


AttachScope: TypeAlias = Callable[[Any, SelectionScope], Attached]
"""Attaches what a scope asks for to a pipeline; layers above the runtime pass it in."""


class Comparison:
    """One comparison on a loaded pipeline.

    Args:
        pipe: the pipeline, where it is to run; it is left as it was found.
        index: what it is.
        args: settings of every generation; its prompt, seed and attention arguments do not matter.
        plan: what is compared.
        attach: attaches backends to the pipeline.
        version: of this package.
        say: takes a line about progress.

    Raises:
        UsageError: an option does not fit the pipeline, the folder is in use, or this is one of
            several ranks.
    """

    def __init__(
        self,
        pipe: Any,
        index: PipelineIndex,
        args: ServerArgs,
        plan: Plan,
        attach: AttachScope,
        version: str,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        if parallel_groups() is not None:
            raise UsageError(ONE_DEVICE)
        args = replace(args, num_outputs=1, prompt=plan.prompts[0], seed=plan.seeds[0])
        check_arguments(index, args)
        check_sizes(pipe, args)
        if index.kind == "video":
            output.require_encoder()
        self._pipe, self._index, self._args, self._plan = pipe, index, args, plan
        self._attach = attach
        self._say = say
        self._device = torch.device(pipe._execution_device)
        versions = output.versions(self._device)
        self._environment = Environment(
            device=str(versions.pop("device")),
            versions={name: None if it is None else str(it) for name, it in versions.items()},
            multimodal_gen=version,
            commit=_commit(),
        )
        model = next(iter(denoisers(pipe).values()))
        self._model = Model(
            path=index.model_path,
            pipeline=index.name,
            kind=index.kind,
            dtype=str(model.dtype).removeprefix("torch."),
            identity=weights_digest(pipe),
        )
        given = {name: getattr(args, name) for name in _SETTINGS}
        self._settings = {name: value for name, value in given.items() if value is not None}
        depends = {
            "environment": self._environment,
            "model": replace(self._model, path=""),
            "settings": self._settings,
            "loading": {name: str(getattr(args, name)) for name in _LOADING},
            "version": VERSION,
        }
        store = Store(plan.folder, depends, resume=plan.resume)
        self._results = Results(store, plan, args.fps or default_fps(index))
        self._warm_up_seconds: dict[str, float] = {}
        self._unserved: dict[str, str] = {}
        self._highest = 0
        self._progress = _Progress(0, say)
        # While a GPU generates the next clip; a CPU has nothing to spare.
        self._writer = _Writer(in_background=self._device.type != "cpu")
        self._latents: dict[Clip, Any] = {}
        self._references: dict[Clip, Future[None]] = {}
        self._notes: list[str] = []

    def run(self) -> Report:
        """Run what is not done yet, and return the report, which is written, too.

        Raises:
            UsageError: the reference cannot run, or runs out of memory.
        """
        start = time.perf_counter()
        plan = self._plan
        with _warned_once(), out_of_memory_explained():
            floor = self._floor() if plan.floor is None else plan.floor
            others = (*floor, *plan.candidates)
            for configuration in (plan.reference, *others):
                self._check_served(configuration)
            if plan.reference.name in self._unserved:
                raise UsageError(
                    f"--reference must be a backend that serves the model, got "
                    f"{plan.reference.text!r}: {self._unserved[plan.reference.name]}"
                )
            try:
                served = [each for each in others if each.name not in self._unserved]
                failures = self._run_clips(self._results.todo(served), served)
            finally:
                self._writer.finish()
            self._writer.check(plan.reference.name)
            unwritten = {name: failure_line(e) for name, e in self._writer.errors.items()}
            failures = {**self._unserved, **unwritten, **failures}
        return self._report(floor, failures, start)

    def _report(
        self, floor: tuple[Configuration, ...], failures: Mapping[str, str], start: float
    ) -> Report:
        """Measure, judge, and write the report."""
        plan, results = self._plan, self._results
        others = (*floor, *plan.candidates)
        runs = [results.run_of(plan.reference, "")]
        runs += [results.run_of(each, failures.get(each.name, "")) for each in others]
        report = Report(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            environment=self._environment,
            model=self._model,
            settings={
                **self._settings,
                **({"fps": results.fps} if self._index.kind == "video" else {}),
            },
            prompts=plan.prompts,
            seeds=plan.seeds,
            score=None if plan.score is None else plan.score.name,
            reference=runs[0],
            floor=tuple(runs[1 : 1 + len(floor)]),
            candidates=tuple(runs[1 + len(floor) :]),
            seconds=time.perf_counter() - start,
            peak_memory=self._highest or None,
            notes=tuple(dict.fromkeys((*self._notes, *results.notes))),
        )
        report = judged(report)
        path = plan.folder / "report.json"
        with naming_file(path, "the report"):
            write_record(report, path)
        return report

    # What can run

    def _floor(self) -> tuple[Configuration, ...]:
        """Return exact kernels other than the reference that this machine has."""
        found: list[Configuration] = []
        taken = [self._plan.reference.name, *(each.name for each in self._plan.candidates)]
        for text in EXACT_KERNELS:
            configuration = read_configuration(text, name="--floor", taken=taken, is_noise=True)
            if len(found) == _FLOORS or configuration.backend == self._plan.reference.backend:
                continue
            if self._runs_itself(configuration):
                found.append(configuration)
                taken.append(configuration.name)
        if not found:
            self._notes.append("no other exact kernel runs here, so the noise is not known")
        return tuple(found)

    def _runs_itself(self, configuration: Configuration) -> bool:
        """Whether all self-attention of the denoisers runs the backend, and no fallback."""
        try:
            selections = self._selections(replace(configuration.scope, strict=True))
        except UnsupportedBackendError:
            return False
        return {str(selection.backend) for selection in selections} == {configuration.backend}

    def _check_served(self, configuration: Configuration) -> None:
        """Attach a backend once, so that what it cannot serve is known before anything runs.

        What would stand in for it is no answer to how it does.
        """
        try:
            with self._cached(configuration):
                selections = self._selections(configuration.scope)
        except UsageError as error:
            self._unserved[configuration.name] = first_line(error)
            return
        for selection in selections:
            if selection.fallback:
                reasons = (reason for each in selection.rejected for reason in each.reasons)
                self._unserved[configuration.name] = (
                    f"{configuration.backend} cannot serve the model here: {'; '.join(reasons)}"
                )
                return

    def _selections(self, scope: SelectionScope) -> list[Selection]:
        """Return what self-attention of the denoisers would run."""
        with self._attach(self._pipe, scope) as handle:
            layers = [x for x in handle.report().layers if x.role is AttentionRole.SELF]
        return [entry.selection for layer in layers for entry in layer.entries]

    # Runs

    def _run_clips(self, todo: Todo, served: Sequence[Configuration]) -> dict[str, str]:
        """Make what is missing, clip by clip; return why backends failed, by name."""
        reference, failures = self._plan.reference, dict[str, str]()
        first = {*todo.missing[reference.name], *todo.replays}
        left = {each.name: {*todo.missing[each.name]} for each in served}
        total = len(first) + len(todo.repeats) + sum(map(len, left.values()))
        self._progress = _Progress(total, self._say)
        if not total:
            return failures
        self._warm_up((reference, *served))
        by_name = {each.name: each for each in (reference, *served)}
        for number, clip in enumerate(self._plan.clips):
            if clip in first:
                replayed = [by_name[name] for name in todo.replays.get(clip, ())]
                found = self._generate(reference, clip, replayed)
                for each in replayed:
                    self._results.keep_replay(each, clip, found[each.name])
            start = number % max(1, len(served))
            for each in (*served[start:], *served[:start]):
                if clip not in left[each.name]:
                    continue
                self._writer.check(reference.name)  # nothing can be compared without it
                if failure := self._try(each, clip):
                    failures[each.name] = failure
                    self._progress.skip(len(left.pop(each.name)))
                    left[each.name] = set()
                left[each.name].discard(clip)
            if clip in todo.repeats:
                self._repeat(clip)
        return failures

    def _try(self, configuration: Configuration, clip: Clip) -> str:
        """Make one generation; return why it failed, or nothing."""
        try:
            self._generate(configuration, clip)
        except Exception as error:
            failure = failure_line(error)
            self._say(f"{configuration.name}: {failure}")
            _free_memory(self._device)
            return failure
        return ""

    def _repeat(self, clip: Clip) -> None:
        """Make a clip of the reference once more, and keep how long it took."""
        meter = Meter(self._device)
        _, report = self._made(self._plan.reference, self._plan.reference.scope, clip, meter)
        self._results.keep_repeat(clip, meter.spent(report).seconds)
        self._progress.done(f"{self._plan.reference.name} again, {_named(clip)}")

    def _cached(self, configuration: Configuration) -> AbstractContextManager[object]:
        """Enable the cache of a configuration on the denoisers in a `with` block."""
        steps = steps_of(self._index, self._args)
        return cached(self._pipe, denoisers(self._pipe), configuration.cache, steps)

    def _warm_up(self, configurations: Sequence[Configuration]) -> None:
        """Make a short generation of the reference, so that no kernel is compiled later on."""
        num_steps = steps_of(self._index, self._args) or _WARM_UP_STEPS
        reference, meter = configurations[0], Meter(self._device)
        others = {each.name: each.scope for each in configurations[1:]}
        watch = WarmUp(others, num_steps, meter.timings.now)
        args = self._args
        if "num_inference_steps" in self._index.parameters:
            args = replace(args, num_inference_steps=min(_WARM_UP_STEPS, num_steps))
        self._say("warming up")
        start = meter.timings.now()
        with self._attach(self._pipe, self._reference_scope(configurations[1:])), watching(watch):
            self._denoise(args, meter)
        whole = meter.timings.now() - start
        self._warm_up_seconds = {
            **watch.seconds,
            reference.name: whole - sum(watch.seconds.values()),
        }
        self._highest = max(self._highest, meter.highest)

    def _reference_scope(self, replayed: Sequence[Configuration]) -> SelectionScope:
        """Return what the reference asks for, and what others take: trained parts, noise levels."""
        spare = frozenset(chain(["sigmas"], *map(_takes, replayed)))
        return replace(self._plan.reference.scope, spare=spare)

    def _generate(
        self,
        configuration: Configuration,
        clip: Clip,
        replayed: Sequence[Configuration] = (),
    ) -> dict[str, Measured]:
        """Make one generation and keep it; return what replaying its calls found."""
        meter = Meter(self._device)
        is_reference = configuration is self._plan.reference
        scope = self._reference_scope(replayed) if is_reference else configuration.scope
        replay = None
        if replayed:
            replay = Replay(
                self._plan.reference.name,
                {each.name: each.scope for each in replayed if each is not self._plan.reference},
                self._plan.replayed_steps,
                meter.excluded,
                pictures=clip == self._plan.clips[0],
            )
        steps = LatentSteps(None if is_reference else self._truth(clip))
        run, report = self._made(configuration, scope, clip, meter, steps, replay)
        keep = partial(
            self._results.keep,
            configuration,
            clip,
            run,
            steps,
            spent=meter.spent(report),
            attention=tuple(report.summary().splitlines()),
            warm_up_seconds=self._warm_up_seconds.get(configuration.name, 0.0),
        )
        finish = partial(self._finish, configuration, clip, keep)
        if is_reference:
            self._latents[clip] = steps.latents()
        written = self._writer.submit(configuration.name, finish)
        if is_reference:
            self._references[clip] = written
        self._highest = max(self._highest, meter.highest)
        self._progress.done(f"{configuration.name}, {_named(clip)}")
        return {} if replay is None else replay.found

    def _made(
        self,
        configuration: Configuration,
        scope: SelectionScope,
        clip: Clip,
        meter: Meter,
        steps: LatentSteps | None = None,
        replay: Replay | None = None,
    ) -> tuple[Denoised, AttentionReport]:
        """Return a generation, and what its layers ran."""
        args = replace(self._args, prompt=self._plan.prompts[clip[0]], seed=clip[1])

        def watch(layer: Any, call: Any, serve: Any) -> torch.Tensor:
            timed = partial(meter.attend, layer, serve=serve)
            return timed(call) if replay is None else replay(layer, call, timed)

        with self._attach(self._pipe, scope) as handle:
            with watching(watch), self._cached(configuration):
                run = self._denoise(args, meter, steps)
            return run, handle.report()

    def _truth(self, clip: Clip) -> Any:
        """Return the reference's latents, which may still be on their way to the disk."""
        kept = self._latents.get(clip)
        return self._results.reference_latents(clip) if kept is None else kept

    def _finish(
        self, configuration: Configuration, clip: Clip, keep: Callable[[], Generation]
    ) -> None:
        """Write a generation; measure its frames too where that takes no time from the next."""
        generation = keep()
        if configuration is self._plan.reference:
            self._latents.pop(clip, None)
            self._results.scored(generation)  # a function that fails is known with the first clip
            return
        if not self._writer.in_background:
            return
        if clip in self._references:  # in an earlier thread, if it was made in this run
            self._references[clip].result()
        # Networks on the CPU would take time from the next clip, and its clock would run on.
        if not (self._plan.perceptual and available()):
            self._results.measured(configuration, generation)
            self._results.scored(generation)

    def _denoise(
        self, args: ServerArgs, meter: Meter, steps: LatentSteps | None = None
    ) -> Denoised:
        call = prepare_call(self._pipe, self._index, args)
        with told_of_run(self._pipe):
            return denoise(self._pipe, call, meter.timings, *([] if steps is None else [steps]))


class _Writer:
    """Writes clips; they are begun in the order in which they are given.

    Args:
        in_background: measure them too, in threads, while the next ones are made.

    Attributes:
        in_background: the same.
        errors: the first that each configuration met, by name; complete once all is done.
    """

    _THREADS = 3
    _MOST = 4  # clips in memory

    def __init__(self, *, in_background: bool) -> None:
        self.in_background = in_background
        self.errors: dict[str, Exception] = {}
        self._pool = ThreadPoolExecutor(self._THREADS)
        self._room = threading.BoundedSemaphore(self._MOST)

    def submit(self, name: str, work: Callable[[], None]) -> "Future[None]":
        """Do something, or have it done once few other things are still to be done."""
        if not self.in_background:
            done: Future[None] = Future()
            work()
            done.set_result(None)
            return done
        self._room.acquire()
        return self._pool.submit(self._do, name, work)

    def check(self, name: str) -> None:
        """Raise what a configuration met, if it met anything."""
        if name in self.errors:
            raise self.errors[name]

    def finish(self) -> None:
        """Wait until all is done."""
        self._pool.shutdown()

    def _do(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.errors.setdefault(name, error)
        finally:
            self._room.release()


class _Progress:
    """Says what is done, and how long the rest will take."""

    def __init__(self, total: int, say: Callable[[str], object]) -> None:
        self._total, self._say = total, say
        self._done = 0
        self._made = 0
        self._start = self._last = time.perf_counter()

    def done(self, what: str) -> None:
        """Say that a generation is done."""
        now = time.perf_counter()
        self._done += 1
        self._made += 1
        left = (now - self._start) / self._made * (self._total - self._done)
        rest = f"; about {_duration(left)} left" if self._done < self._total else ""
        seconds = now - self._last
        self._last = now
        self._say(f"[{self._done}/{self._total}] {what}: {seconds:.1f} s{rest}")

    def skip(self, count: int) -> None:
        """Count generations that will not be made."""
        self._done += count


def _warned_once() -> AbstractContextManager[None]:
    """Log a warning of attention layers once, however often their backend is attached."""
    logged: set[str] = set()

    def was_logged(message: str) -> bool:
        known = message in logged
        logged.add(message)
        return known

    return without(layer_warnings.name, was_logged)


def _takes(configuration: Configuration) -> tuple[str, ...]:
    """Return what the layers of a backend take, such as gates of a checkpoint."""
    backend = AttentionBackendEnum.parse(configuration.backend)
    impl = find_backend(backend, current_environment().platform).get_impl_cls()
    return impl.takes


def _free_memory(device: torch.device) -> None:
    """Give back what a run that failed has left."""
    import gc

    gc.collect()
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()


def _named(clip: Clip) -> str:
    return f"prompt {clip[0] + 1}, seed {clip[1]}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _commit() -> str | None:
    """Return the git commit of this package's checkout, or None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
