"""What the folder of a comparison holds of its plan: what is done, what is left, what was found.

Shapes: T steps.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.comparison.configurations import Clip, Configuration, Plan
from multimodal_gen.runtime.comparison.cost import Spent, cost_of
from multimodal_gen.runtime.comparison.frames import measure_frames, summarise
from multimodal_gen.runtime.comparison.layers import Measured, averaged
from multimodal_gen.runtime.comparison.perceptual import available
from multimodal_gen.runtime.comparison.record import Generation, Run
from multimodal_gen.runtime.comparison.store import (
    Store,
    StoredGeneration,
    StoredMetrics,
    StoredRepeat,
    clip_writers,
)
from multimodal_gen.runtime.generator.denoise import Denoised

_REPEATS = 4  # clips that the reference makes twice, at most
_LATENT_VALUES = 1 << 18  # of the latents of a step, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """What is not done yet.

    Attributes:
        missing: clips of each configuration that can run, by its name.
        replays: names of what the reference's calls are to be replayed on, by clip.
        repeats: what the reference makes once more, for the noise of times.
    """

    missing: Mapping[str, Sequence[Clip]]
    replays: Mapping[Clip, Sequence[str]]
    repeats: Sequence[Clip]


class Results:
    """What there is of a plan.

    Args:
        store: the folder.
        plan: what is compared.
        fps: frames per second of the clips.

    Attributes:
        notes: what a reader of the report should know.
    """

    def __init__(self, store: Store, plan: Plan, fps: int) -> None:
        self.fps = fps
        self.notes: list[str] = []
        self._store, self._plan = store, plan
        self._scores: dict[str, float] = {}
        self._scoring = threading.Lock()  # a function of the user's is called once at a time

    def todo(self, served: Sequence[Configuration]) -> Todo:
        """Return what is left to do for the reference and those of the others that can run."""
        runs = (self._plan.reference, *served)
        replays = {
            clip: [each.name for each in runs if self._replay(each, clip) is None]
            for clip in self._plan.replayed_clips
        }
        return Todo(
            missing={each.name: self._missing(each) for each in runs},
            replays={clip: names for clip, names in replays.items() if names},
            repeats=[
                clip for clip in self._plan.clips[:_REPEATS] if self._repeat_seconds(clip) is None
            ],
        )

    def reference_latents(self, clip: Clip) -> Any:
        """Return what was kept of the reference's latents, fp32 [T, values]."""
        return self._store.read_array(self._latents_path(clip))

    def keep(
        self,
        configuration: Configuration,
        clip: Clip,
        run: Denoised,
        steps: "LatentSteps",
        *,
        spent: Spent,
        attention: tuple[str, ...],
        warm_up_seconds: float,
    ) -> Generation:
        """Write a generation with its clip, and the reference's latents; return its record.

        Args:
            configuration: what it ran on.
            clip: which clip it is.
            run: what it gave.
            steps: its latents along the steps.
            spent: see `StoredGeneration`, as for the others.
            attention: what its layers ran.
            warm_up_seconds: of the backend.
        """
        import numpy as np

        key = self._generation_key(configuration, clip)
        (pixels,) = run.pixels
        stem = f"{configuration.name}-p{clip[0]}-s{clip[1]}-{key[:8]}"
        frames, preview, files = clip_writers(stem, pixels, self.fps)
        bad = run.latents.numel() - int(torch.isfinite(run.latents).sum())
        generation = Generation(
            prompt=clip[0],
            seed=clip[1],
            frames_path=frames,
            preview_path=preview,
            seconds=spent.seconds,
            step_seconds=spent.step_seconds,
            latents=steps.distances(),
            non_finite=bad + int(pixels.size - np.isfinite(pixels).sum()),
        )
        if configuration is self._plan.reference:
            latents = steps.latents()
            path = self._latents_path(clip)
            files[path] = lambda path: np.save(path, latents, allow_pickle=False)
        stored = StoredGeneration(
            generation=generation,
            spent=spent,
            attention=attention,
            warm_up_seconds=warm_up_seconds,
        )
        self._store.write(key, stored, files)
        return generation

    def keep_replay(self, configuration: Configuration, clip: Clip, measured: Measured) -> None:
        """Write what replaying the reference's calls of a clip found."""
        self._store.write(self._replay_key(configuration, clip), measured)

    def keep_repeat(self, clip: Clip, seconds: float) -> None:
        """Write how long the reference took for a clip the second time."""
        self._store.write(self._repeat_key(clip), StoredRepeat(seconds=seconds))

    def run_of(self, configuration: Configuration, failure: str) -> Run:
        """Return the record of a configuration, its clips measured.

        Args:
            configuration: the configuration.
            failure: why it did not run to its end, or "".
        """
        plan = self._plan
        found = [
            stored
            for clip in plan.clips
            if (stored := self._stored_generation(configuration, clip)) is not None
        ]
        replays = [
            replay
            for clip in plan.replayed_clips
            if (replay := self._replay(configuration, clip)) is not None
        ]
        for each in replays if not failure else ():
            if each.failure:
                self.notes.append(f"{configuration.name}: replaying failed: {each.failure}")
        if projected := sum(each.projected for each in replays):
            self.notes.append(
                f"{configuration.name}: {projected} calls of layers have no errors, a trained "
                f"proj_l adds to attention there"
            )
        generations = [each.generation for each in found]
        if configuration is not plan.reference:
            generations = [self.measured(configuration, each) for each in generations]
        else:
            generations = [
                replace(each, repeat_seconds=self._repeat_seconds((each.prompt, each.seed)))
                for each in generations
            ]
        generations = list(map(self.scored, generations))
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
            layers=averaged([each.layers for each in replays]),
            masks=next((each.masks for each in replays if each.masks), ()),
            frames_mean=mean,
            frames_spread=spread,
        )

    def measured(self, configuration: Configuration, generation: Generation) -> Generation:
        """Return a generation with the metrics of its frames, which are kept, too."""
        clip = generation.prompt, generation.seed
        reference = self._stored_generation(self._plan.reference, clip)
        assert reference is not None, "the reference runs first"
        made = self._generation_key(configuration, clip)
        perceptual = self._plan.perceptual
        key = self._store.key(metrics=made, packages=available() if perceptual else ())
        stored = self._store.find(StoredMetrics, key)
        if stored is None:
            paths = (generation.frames_path, reference.generation.frames_path)
            clips = [self._store.read_array(path) for path in paths if path is not None]
            try:
                metrics, notes = measure_frames(*clips, fps=self.fps, perceptual=perceptual)
            except UsageError as error:
                self.notes.append(f"{configuration.name}: no metrics of frames: {error}")
                return generation
            metrics = replace(metrics, non_finite=generation.non_finite)
            stored = StoredMetrics(frames=metrics, notes=notes)
            self._store.write(key, stored)
        self.notes.extend(stored.notes)
        return replace(generation, frames=stored.frames)

    def scored(self, generation: Generation) -> Generation:
        """Return a generation with its score, which is not kept, as the function may change."""
        score, path = self._plan.score, generation.frames_path
        if score is None or path is None:
            return generation
        with self._scoring:
            if path not in self._scores:
                prompt = self._plan.prompts[generation.prompt]
                self._scores[path] = score.of(self._store.read_array(path), prompt)
        return replace(generation, score=self._scores[path])

    def _missing(self, configuration: Configuration) -> list[Clip]:
        """Return the clips that are not done yet."""
        is_reference = configuration is self._plan.reference
        return [
            clip
            for clip in self._plan.clips
            if self._stored_generation(configuration, clip) is None
            or (is_reference and not self._store.has_array(self._latents_path(clip)))
        ]

    def _latents_path(self, clip: Clip) -> str:
        return f"latents/{self._generation_key(self._plan.reference, clip)}.npy"

    def _repeat_seconds(self, clip: Clip) -> float | None:
        found = self._store.find(StoredRepeat, self._repeat_key(clip))
        return None if found is None else found.seconds

    def _repeat_key(self, clip: Clip) -> str:
        return self._store.key(repeat=self._generation_key(self._plan.reference, clip))

    def _replay(self, configuration: Configuration, clip: Clip) -> Measured | None:
        return self._store.find(Measured, self._replay_key(configuration, clip))

    def _stored_generation(
        self, configuration: Configuration, clip: Clip
    ) -> StoredGeneration | None:
        found = self._store.find(StoredGeneration, self._generation_key(configuration, clip))
        if found is None:
            return None
        # A comparison that goes on may have its prompts at other places.
        return replace(found, generation=replace(found.generation, prompt=clip[0]))

    def _generation_key(self, configuration: Configuration, clip: Clip) -> str:
        return self._store.key(
            backend=configuration.asked,
            reference=self._plan.reference.asked,
            is_reference=configuration is self._plan.reference,
            prompt=self._plan.prompts[clip[0]],
            seed=clip[1],
        )

    def _replay_key(self, configuration: Configuration, clip: Clip) -> str:
        return self._store.key(
            replay=self._generation_key(configuration, clip),
            steps=self._plan.replayed_steps,
            pictures=clip == self._plan.clips[0],
        )


class LatentSteps:
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
