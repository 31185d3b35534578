"""Runs a comparison: one loaded pipeline, one backend after the other, the reference first.

    warm-up       a short generation of the reference, whose calls all backends get a few of
    reference     every prompt with every seed; calls of the first one are replayed (`layers.py`)
    floor         the same on other exact kernels: what differs there means nothing
    candidates    the same on each of the backends asked for
    metrics       clips against the reference's, verdicts, the report

A backend that cannot serve the model, fails or runs out of memory is a row with a message; only the
reference must run. Whatever finished is kept, and found again by `resume`.
"""

import datetime
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.comparison.configurations import (
    EXACT_KERNELS,
    Configuration,
    read_configuration,
)
from multimodal_gen.runtime.comparison.cost import Meter, cost_of
from multimodal_gen.runtime.comparison.frames import measure_frames, summarise
from multimodal_gen.runtime.comparison.layers import Measured, Replay, WarmUp
from multimodal_gen.runtime.comparison.record import (
    Environment,
    Generation,
    Model,
    Report,
    Run,
    write_record,
)
from multimodal_gen.runtime.comparison.store import (
    Store,
    StoredGeneration,
    StoredMetrics,
    StoredReplay,
    clip_writers,
    weights_digest,
)
from multimodal_gen.runtime.comparison.verdict import judged
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator import output
from multimodal_gen.runtime.generator.denoise import Denoised, denoise, out_of_memory_explained
from multimodal_gen.runtime.generator.index import PipelineIndex, first_line, is_out_of_memory
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.generator.sampling import (
    check_arguments,
    check_loaded,
    output_size,
    prepare_call,
)
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.report import AttentionReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import SelectionScope
from multimodal_gen.runtime.managers.generation import Generation as Described
from multimodal_gen.runtime.managers.generation import describe_generation
from multimodal_gen.runtime.server_args import CALL_SETTINGS, ServerArgs

__all__ = ["AttachScope", "Attached", "Comparison", "Plan"]

_SETTINGS = (*CALL_SETTINGS, "fps")
_FLOORS = 2  # exact kernels beside the reference, where there are as many
_LATENT_VALUES = 1 << 18  # of the latents of a step, at most
_WARM_UP_STEPS = 2


class Attached(Protocol):
    """Attention backends attached to a pipeline, until it is removed."""

    def report(self) -> AttentionReport:
        """Return what ran so far."""

    def remove(self) -> None:
        """Restore the pipeline."""


AttachScope: TypeAlias = Callable[[Any, SelectionScope], Attached]
"""Attaches what a scope asks for to a pipeline; layers above the runtime pass it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        prompts: what is generated, each once.
        seeds: of every prompt.
        reference: what the others are compared with; a dense backend.
        candidates: what is compared with it.
        floor: exact kernels for the noise; None for up to two that this machine has.
        folder: where everything goes.
        resume: go on with what the folder holds.
        replayed_steps: denoising steps whose calls are replayed; 0 for none.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: Configuration
    candidates: tuple[Configuration, ...]
    floor: tuple[Configuration, ...] | None = None
    folder: Path
    resume: bool = False
    replayed_steps: int = 3

    def __post_init__(self) -> None:
        if not self.prompts or not self.seeds:
            raise UsageError("a comparison must have at least one prompt and one seed, got none")
        asked = self.reference.scope.default
        assert asked is not None, "a configuration names a backend"
        assert asked.backend is not None, "a configuration names a backend"
        if asked.backend.is_sparse:
            raise UsageError(
                f"--reference must be a dense backend, got {self.reference.text!r}, which leaves "
                f"pairs out; try torch_sdpa"
            )


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
        UsageError: an option does not fit the pipeline, the folder is in use, or ranks share the
            work of this process.
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
            raise UsageError(
                "a comparison must run on one GPU, got one of several ranks: layers are replayed "
                "on whole q, k and v, which no rank has; call leave_parallel first"
            )
        args = replace(args, num_outputs=1, prompt=plan.prompts[0], seed=plan.seeds[0])
        check_arguments(index, args)
        check_loaded(pipe, args)
        if index.kind == "video":
            output.require_encoder()
        self._pipe, self._index, self._args, self._plan = pipe, index, args, plan
        self._attach, self._say = attach, say
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
        }
        self._store = Store(plan.folder, depends, resume=plan.resume)
        self._warm_up_seconds: dict[str, float] = {}
        self._unserved: dict[str, str] = {}
        self._highest = 0
        self._fps = 1
        self._progress: _Progress | None = None
        # Beside a GPU that generates the next clip; a CPU has nothing to spare.
        self._beside = ThreadPoolExecutor(1) if self._device.type != "cpu" else None
        self._notes: list[str] = []

    def run(self) -> Report:
        """Run what is not done yet, and return the report, which is written, too.

        Raises:
            UsageError: the reference cannot run, or runs out of memory.
        """
        start = time.perf_counter()
        plan = self._plan
        with _left_as_found(self._pipe), out_of_memory_explained():
            self._fps = prepare_call(self._pipe, self._index, self._args).fps
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
                self._run_reference(others)
                failures = {each.name: self._run(each) for each in others}
            finally:
                if self._beside is not None:
                    self._beside.shutdown()
        runs = [self._record_of(plan.reference, "")]
        runs += [self._record_of(each, failures[each.name]) for each in others]
        report = Report(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            environment=self._environment,
            model=self._model,
            settings={
                **self._settings,
                **({"fps": self._fps} if self._index.kind == "video" else {}),
            },
            prompts=plan.prompts,
            seeds=plan.seeds,
            reference=runs[0],
            floor=tuple(runs[1 : 1 + len(floor)]),
            candidates=tuple(runs[1 + len(floor) :]),
            seconds=time.perf_counter() - start,
            peak_memory=self._highest or None,
            notes=tuple(dict.fromkeys(self._notes)),
        )
        report = judged(report)
        write_record(report, plan.folder / "report.json")
        return report

    # What can run

    def _floor(self) -> tuple[Configuration, ...]:
        """Return exact kernels other than the reference that this machine has."""
        found: list[Configuration] = []
        taken = [self._plan.reference.name, *(each.name for each in self._plan.candidates)]
        for text in EXACT_KERNELS:
            configuration = read_configuration(text, name="--floor", taken=taken)
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
        scope = replace(configuration.scope, strict=True)
        try:
            handle = self._attach(self._pipe, scope)
        except UnsupportedBackendError:
            return False
        try:
            layers = [x for x in handle.report().layers if x.role is AttentionRole.SELF]
        finally:
            handle.remove()
        ran = {str(entry.selection.backend) for layer in layers for entry in layer.entries}
        return ran == {configuration.backend}

    def _check_served(self, configuration: Configuration) -> None:
        """Attach a backend once, so that what it cannot serve is known before anything runs.

        What would stand in for it is no answer to how it does.
        """
        try:
            handle = self._attach(self._pipe, configuration.scope)
        except UsageError as error:
            self._unserved[configuration.name] = first_line(error)
            return
        try:
            layers = [x for x in handle.report().layers if x.role is AttentionRole.SELF]
        finally:
            handle.remove()
        for selection in (entry.selection for layer in layers for entry in layer.entries):
            if selection.fallback:
                reasons = (reason for each in selection.rejected for reason in each.reasons)
                self._unserved[configuration.name] = (
                    f"{configuration.backend} cannot serve the model here: {'; '.join(reasons)}"
                )
                return

    # Runs

    def _run_reference(self, others: Sequence[Configuration]) -> None:
        """Run the reference, and replay calls of its first generation on the others."""
        plan = self._plan
        served = [each for each in others if each.name not in self._unserved]
        replayed = [
            each
            for each in (plan.reference, *served)
            if plan.replayed_steps
            and self._store.find(StoredReplay, self._replay_key(each)) is None
        ]
        missing = {each.name: self._missing(each) for each in (plan.reference, *served)}
        first = (0, plan.seeds[0])
        if replayed and first not in missing[plan.reference.name]:
            missing[plan.reference.name].insert(0, first)
        total = sum(map(len, missing.values()))
        self._progress = _Progress(total, self._say)
        if not total:
            return
        self._warm_up((plan.reference, *served))
        for prompt, seed in missing[plan.reference.name]:
            replay = None
            if (prompt, seed) == first and replayed:
                scopes = {x.name: x.scope for x in replayed if x is not plan.reference}
                replay = partial(Replay, plan.reference.name, scopes, plan.replayed_steps)
            found = self._generate(plan.reference, prompt, seed, replay)
            for each in replayed if found else ():
                self._store.write(self._replay_key(each), _stored(found[each.name]))

    def _run(self, configuration: Configuration) -> str:
        """Run what is missing of a configuration; return why it failed, or nothing."""
        if configuration.name in self._unserved:
            return self._unserved[configuration.name]
        failure = ""
        try:
            for prompt, seed in self._missing(configuration):
                self._generate(configuration, prompt, seed)
        except Exception as error:
            failure = _described(error)
        if failure:
            self._say(f"{configuration.name}: {failure}")
            _free_memory(self._device)
            if self._progress is not None:
                self._progress.skip(len(self._missing(configuration)))
        return failure

    def _missing(self, configuration: Configuration) -> list[tuple[int, int]]:
        """Return the prompts' indices and seeds that are not done yet."""
        return [
            (prompt, seed)
            for prompt in range(len(self._plan.prompts))
            for seed in self._plan.seeds
            if self._stored_generation(configuration, prompt, seed) is None
        ]

    def _replay_is_missing(self, configuration: Configuration) -> bool:
        key = self._replay_key(configuration)
        return self._plan.replayed_steps > 0 and self._store.find(StoredReplay, key) is None

    def _warm_up(self, configurations: Sequence[Configuration]) -> None:
        """Make a short generation of the reference, so that no kernel is compiled later on."""
        default = self._index.parameters.get("num_inference_steps")
        steps = self._args.num_inference_steps or getattr(default, "default", None)
        num_steps = steps if isinstance(steps, int) else _WARM_UP_STEPS
        reference, meter = configurations[0], Meter(self._device)
        others = {each.name: each.scope for each in configurations[1:]}
        watch = WarmUp(others, num_steps, meter.timings.now)
        args = self._args
        if default is not None:
            args = replace(args, num_inference_steps=min(_WARM_UP_STEPS, num_steps))
        self._say("warming up")
        start = meter.timings.now()
        handle = self._attach(self._pipe, reference.scope)
        try:
            with watching(watch):
                self._denoise(args, meter)
        finally:
            handle.remove()
        whole = meter.timings.now() - start
        self._warm_up_seconds = {
            **watch.seconds,
            reference.name: whole - sum(watch.seconds.values()),
        }
        self._highest = max(self._highest, meter.highest)

    def _generate(
        self,
        configuration: Configuration,
        prompt: int,
        seed: int,
        replay: Callable[[Any], Replay] | None = None,
    ) -> dict[str, Measured]:
        """Make one generation and keep it; return what replaying its calls found."""
        plan, meter = self._plan, Meter(self._device)
        args = replace(self._args, prompt=plan.prompts[prompt], seed=seed)
        replaying = None if replay is None else replay(meter.apart)

        def watch(layer: Any, call: Any, serve: Any) -> torch.Tensor:
            timed = partial(meter.attend, layer, serve=serve)
            return timed(call) if replaying is None else replaying(layer, call, timed)

        is_reference = configuration is plan.reference
        steps = _Steps(None if is_reference else self._reference_latents(prompt, seed))
        handle = self._attach(self._pipe, configuration.scope)
        try:
            with watching(watch):
                run = self._denoise(args, meter, steps)
            report = handle.report()
        finally:
            handle.remove()
        generation = self._keep(configuration, prompt, seed, run, meter, report, steps)
        if self._beside is not None and not is_reference:
            self._beside.submit(self._measured, configuration, generation)
        self._highest = max(self._highest, meter.highest)
        if self._progress is not None:
            self._progress.done(f"{configuration.name}, prompt {prompt + 1}, seed {seed}")
        return {} if replaying is None else replaying.found

    def _denoise(
        self,
        args: ServerArgs,
        meter: Meter,
        steps: Callable[[int, torch.Tensor], None] = lambda step, latents: None,
    ) -> Denoised:
        width, height = output_size(self._pipe, self._index, args)
        shown = Described(prompt=args.prompt or "", width=width, height=height)
        call = prepare_call(self._pipe, self._index, args)
        with describe_generation(shown):
            return denoise(self._pipe, call, meter.timings, steps)

    def _keep(
        self,
        configuration: Configuration,
        prompt: int,
        seed: int,
        run: Denoised,
        meter: Meter,
        report: AttentionReport,
        steps: "_Steps",
    ) -> Generation:
        """Write a generation with its clip, and the reference's latents; return its record."""
        import numpy as np

        key = self._generation_key(configuration, prompt, seed)
        (pixels,) = run.pixels
        stem = f"{configuration.name}-p{prompt}-s{seed}-{key[:8]}"
        frames, preview, files = clip_writers(stem, pixels, self._fps)
        spent = meter.spent(report)
        bad = run.latents.numel() - int(torch.isfinite(run.latents).sum())
        generation = Generation(
            prompt=prompt,
            seed=seed,
            frames_path=frames,
            preview_path=preview,
            seconds=spent.seconds,
            step_seconds=spent.step_seconds,
            latents=steps.distances(),
            non_finite=bad + int(pixels.size - np.isfinite(pixels).sum()),
        )
        if configuration is self._plan.reference:
            latents = steps.latents()
            files[f"latents/{key}.npy"] = lambda path: np.save(path, latents, allow_pickle=False)
        stored = StoredGeneration(
            generation=generation,
            spent=spent,
            attention=tuple(report.summary().splitlines()),
            warm_up_seconds=self._warm_up_seconds.get(configuration.name, 0.0),
        )
        self._store.write(key, stored, files)
        return generation

    def _reference_latents(self, prompt: int, seed: int) -> Any:
        key = self._generation_key(self._plan.reference, prompt, seed)
        return self._store.read_array(f"latents/{key}.npy")

    # What was found

    def _record_of(self, configuration: Configuration, failure: str) -> Run:
        plan = self._plan
        found = [
            stored
            for prompt in range(len(plan.prompts))
            for seed in plan.seeds
            if (stored := self._stored_generation(configuration, prompt, seed)) is not None
        ]
        replayed = self._store.find(StoredReplay, self._replay_key(configuration))
        replayed = replayed or StoredReplay()
        if replayed.failure and not failure:
            self._notes.append(f"{configuration.name}: replaying failed: {replayed.failure}")
        generations = [each.generation for each in found]
        if configuration is not plan.reference:
            generations = [self._measured(configuration, each) for each in generations]
        metrics = [each.frames for each in generations if each.frames is not None]
        mean, spread = summarise(metrics) if metrics else (None, None)
        out_of_memory = failure.startswith("out of memory")
        return Run(
            name=configuration.name,
            configuration=configuration.text,
            backend=configuration.backend,
            parameters=configuration.parameters,
            status="out of memory" if out_of_memory else "failed" if failure else "done",
            message=failure,
            attention=found[0].attention if found else (),
            generations=tuple(generations),
            cost=cost_of(
                [each.spent for each in found], found[0].warm_up_seconds if found else 0.0
            ),
            layers=replayed.layers,
            masks=replayed.masks,
            frames_mean=mean,
            frames_spread=spread,
        )

    def _measured(self, configuration: Configuration, generation: Generation) -> Generation:
        """Return a generation with the metrics of its frames, which are kept, too."""
        prompt, seed = generation.prompt, generation.seed
        reference = self._stored_generation(self._plan.reference, prompt, seed)
        assert reference is not None, "the reference runs first"
        key = self._store.key(metrics=self._generation_key(configuration, prompt, seed))
        stored = self._store.find(StoredMetrics, key)
        if stored is None:
            paths = (generation.frames_path, reference.generation.frames_path)
            clips = [self._store.read_array(path) for path in paths if path is not None]
            try:
                metrics, notes = measure_frames(clips[0], clips[1], fps=self._fps)
            except UsageError as error:
                self._notes.append(f"{configuration.name}: no metrics of frames: {error}")
                return generation
            metrics = replace(metrics, non_finite=generation.non_finite)
            stored = StoredMetrics(frames=metrics, notes=notes)
            self._store.write(key, stored)
        self._notes.extend(stored.notes)
        return replace(generation, frames=stored.frames)

    def _stored_generation(
        self, configuration: Configuration, prompt: int, seed: int
    ) -> StoredGeneration | None:
        return self._store.find(StoredGeneration, self._generation_key(configuration, prompt, seed))

    def _generation_key(self, configuration: Configuration, prompt: int, seed: int) -> str:
        reference = self._plan.reference
        return self._store.key(
            backend=(configuration.backend, configuration.settings),
            reference=(reference.backend, reference.settings),
            is_reference=configuration is reference,
            prompt=self._plan.prompts[prompt],
            seed=seed,
        )

    def _replay_key(self, configuration: Configuration) -> str:
        steps = self._plan.replayed_steps
        first = self._generation_key(configuration, 0, self._plan.seeds[0])
        return self._store.key(replay=first, steps=steps)


class _Steps:
    """Keeps some values of the latents after every step, or compares them with kept ones.

    Args:
        reference: fp32 [steps, values], what they are compared with; None to keep them.
    """

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._kept: dict[int, torch.Tensor] = {}
        self._distances: dict[int, float] = {}

    def __call__(self, step: int, latents: torch.Tensor) -> None:
        """Take the latents after a step; of a step that is told of twice, the second ones hold."""
        flat = latents.detach().reshape(-1)
        values = flat[:: -(-flat.numel() // _LATENT_VALUES)].float().cpu()
        if self._reference is None:
            self._kept[step] = values
            return
        truth = torch.from_numpy(self._reference[step].copy())
        distance = (values - truth).norm() / truth.norm()
        self._distances[step] = float(distance)

    def distances(self) -> tuple[float, ...]:
        """Return the relative L2 distances, by step."""
        return tuple(self._distances[step] for step in sorted(self._distances))

    def latents(self) -> Any:
        """Return what was kept, by step."""
        return torch.stack([self._kept[step] for step in sorted(self._kept)]).numpy()


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


@contextmanager
def _left_as_found(pipe: Any) -> Iterator[None]:
    """Put back what preparing and watching a call changes on a pipeline."""
    names = ("guider", "_progress_bar_config")
    before: Mapping[str, Any] = {name: getattr(pipe, name) for name in names if hasattr(pipe, name)}
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(pipe, name, before[name])
            elif hasattr(pipe, name):
                delattr(pipe, name)


def _stored(measured: Measured) -> StoredReplay:
    return StoredReplay(
        layers=tuple(measured.layers), masks=tuple(measured.masks), failure=measured.failure
    )


def _described(error: BaseException) -> str:
    """Return why a run failed, in a line."""
    line = first_line(error)
    if is_out_of_memory(error):
        return f"out of memory: {line}"
    return line if isinstance(error, UsageError) else f"{type(error).__name__}: {line}"


def _free_memory(device: torch.device) -> None:
    """Give back what a run that failed has left."""
    import gc

    gc.collect()
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()


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
