"""Frames of a video as its chunks finish, from pipelines that make it chunk by chunk.

Such pipelines return the whole video at the end of one call. Here every chunk is taken out of the
call when it is done, decoded if the pipeline did not do so, and handed on. The frames are those
that the call would have returned.

Which pipelines these are, and how a chunk is taken out of each, is in `streamed`.

Shapes: B batch, C channels, T frames, H and W height and width, in pixels or latents.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator.denoise import Denoised, Timings, denoise
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.sampling import Call
from multimodal_gen.runtime.generator.streamed import TAKEN, Followed, FramePack, SkyReels
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import lines_of

logger = logging.getLogger(__name__)


class TimedPrompt(NamedTuple):
    """A prompt, and the second of the video from which on it holds."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedChunk:
    """Frames that are done.

    Attributes:
        frames: floats in [0, 1], [T, H, W, 3].
        first_frame: the number of the first of them in the video.
        prompt: what the chunk was made from.
        seconds: since the generation began, when they were done.
    """

    frames: Any
    first_frame: int
    prompt: str
    seconds: float

    @property
    def num_frames(self) -> int:
        """How many frames there are."""
        return int(self.frames.shape[0])


Give: TypeAlias = Callable[[StreamedChunk], None]
"""Takes frames as they are done."""


def check_stream(index: PipelineIndex, args: ServerArgs) -> None:
    """Check what a stream needs, before weights are loaded.

    Raises:
        ConfigError: the file of prompts cannot be read, or is none.
        UsageError: the pipeline does not make its video chunk by chunk, or decodes in tiles; or
            several ranks run it.
    """
    if not args.stream:
        return
    groups = parallel_groups()
    if groups is not None:
        raise UsageError(
            f"--stream must be left out on several ranks, which write one video at its end, got "
            f"{groups.mesh.world_size} ranks; run it on one GPU"
        )
    if index.name not in TAKEN:
        raise UsageError(
            f"--stream must be left out for {index.name}, which makes a video as a whole; these "
            f"pipelines make it chunk by chunk: {', '.join(TAKEN)}"
        )
    if args.last_image_path is not None and TAKEN[index.name] is SkyReels:
        raise UsageError(
            f"--last-image-path must be left out with --stream and {index.name}, whose last frames "
            "it cuts off when all are there"
        )
    if args.vae_tiling and issubclass(TAKEN[index.name], Followed):
        raise UsageError(
            f"--vae-tiling must be left out with --stream and {index.name}: tiles of the "
            "autoencoder know nothing of the frames of the chunk before"
        )
    if TAKEN[index.name] is FramePack:
        _check_framepack(index, args)
    read_timed_prompts(args.prompts_file)


def _check_framepack(index: PipelineIndex, args: ServerArgs) -> None:
    given = args.pipeline_arg if isinstance(args.pipeline_arg, Mapping) else {}
    order = given.get("sampling_type")
    if order != "vanilla":
        raise UsageError(
            f"--stream with {index.name} must have --pipeline-arg sampling_type=vanilla, got "
            f"{order or 'none'}: by default it makes the end of a video first"
        )
    if args.prompts_file is not None:
        raise UsageError(
            f"--prompts-file must be left out with {index.name}, whose prompt holds for all of a "
            "video"
        )


def read_timed_prompts(file: Path | str | None) -> tuple[TimedPrompt, ...]:
    """Return the prompts of a file, in the order of their times.

    Args:
        file: text with a prompt per line, its start in seconds first, then spaces or tabs; empty
            lines, and those that begin with `#`, count for nothing. None has no prompts.

    Raises:
        ConfigError: it cannot be read, or a line is something else.
    """
    if file is None:
        return ()
    found = []
    for number, line in lines_of(file, "--prompts-file"):
        if line.startswith("#"):
            continue
        start, text = (*line.split(maxsplit=1), "")[:2]
        try:
            seconds = float(start)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf") or not text.strip():
            raise ConfigError(
                f"--prompts-file {str(file)!r}, line {number}, must be a start in seconds above 0 "
                f"and a prompt, such as `4.5 the fox jumps`, got {short(line)}"
            )
        found.append(TimedPrompt(seconds, text.strip()))
    if not found or any(a.seconds >= b.seconds for a, b in pairwise(found)):
        times = ", ".join(f"{prompt.seconds:g}" for prompt in found)
        raise ConfigError(
            f"--prompts-file {str(file)!r} must have prompts whose starts rise, got "
            f"{times or 'none'}"
        )
    return tuple(found)


class Streaming:
    """One generation whose chunks are handed on as they finish.

    Args:
        args: what is generated.
        give: takes the frames.

    Attributes:
        later: the prompts that take over.
        in_one_call: whether the pipeline must make the video in one call.
        saves_latents: whether the latents that calls return are kept and saved.
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(self, args: ServerArgs, give: Give) -> None:
        self.later = read_timed_prompts(args.prompts_file)
        self.interrupted = False
        self._first = args.prompt or ""
        self.saves_latents = args.save_latents
        # What a step cache knows would end with each call.
        self.in_one_call = args.cache is not None
        self._give = give
        self._started = time.perf_counter()
        self._fps = 1
        self._shape = (0, 0)
        self._non_finite = 0
        self._made: list[tuple[int, float, str]] = []

    @property
    def num_frames(self) -> int:
        """How many frames were handed on."""
        return sum(frames for frames, _, _ in self._made)

    def run(self, pipe: Any, call: Call, timings: Timings) -> Denoised:
        """Run the pipeline; the result has latents and no pixels.

        They are of the whole video where the pipeline keeps them itself, or where they are to be
        saved; else of the last call that was made of it. Ctrl-C, once frames were handed on, ends
        it with what is done, and without latents.

        Raises:
            UsageError: the pipeline refuses its arguments, or decodes what is not finite.
        """
        self._fps = call.fps
        arguments: Mapping[str, Any] = {**call.arguments, "output_type": "latent"}
        taken = TAKEN[type(pipe).__name__](pipe, self, self._embedded(pipe, arguments))
        try:
            with taken.hooked():
                latents, kept = torch.empty(0), []
                for part in taken.parts(arguments):
                    run = denoise(pipe, replace(call, arguments=part), timings, taken.stepped)
                    latents = taken.made(run)
                    kept += [latents.cpu()] * self.saves_latents
                with torch.no_grad():
                    taken.end(latents)
                latents = torch.cat(kept, dim=2) if len(kept) > 1 else latents
        except KeyboardInterrupt:
            if not self._made:
                raise
            self.interrupted = True
            latents = torch.empty(0)
        held = {text for _, _, text in self._made}
        late = [f"{x.seconds:g}" for x in self.later if x.text not in held]
        if late and not self.interrupted:
            length = self.num_frames / self._fps
            logger.warning(
                "no chunk was made from the prompts of --prompts-file from %s s on: the video has "
                "%.1f s, and a prompt holds for chunks that begin then",
                ", ".join(late), length,
            )  # fmt: skip
        return Denoised(pixels=(), latents=latents)

    def prompt_at(self, frame: int) -> int:
        """Return which prompt holds for a chunk that begins at a frame; 0 is the first one."""
        return sum(later.seconds <= frame / self._fps for later in self.later)

    def hand_on(self, frames: Any, prompt: int) -> None:
        """Hand on frames that are done.

        Args:
            frames: floats in [0, 1], [T, H, W, 3].
            prompt: which prompt they were made from.

        Raises:
            UsageError: there is nothing finite among them.
        """
        import numpy as np

        if not len(frames):
            return
        finite = int(np.isfinite(frames).sum())
        if not finite:
            raise UsageError(
                f"the decoded frames must be finite, got nothing but nan or infinite values from "
                f"frame {self.num_frames} on; the autoencoder overflows, or the denoiser before "
                f"it: try --dtype bfloat16 or float32, or another --attention-backend"
            )
        text = self.later[prompt - 1].text if prompt else self._first
        seconds = time.perf_counter() - self._started
        chunk = StreamedChunk(
            frames=frames, first_frame=self.num_frames, prompt=text, seconds=seconds
        )
        self._shape = (int(frames.shape[1]), int(frames.shape[2]))
        self._made.append((chunk.num_frames, seconds, text))
        self._non_finite += int(frames.size) - finite
        self._give(chunk)

    def produced(self) -> dict[str, Json]:
        """Return sizes and number of what was handed on, as `denoise.produced` does."""
        height, width = self._shape
        return {
            "num_outputs": 1,
            "num_frames": self.num_frames,
            "height": height,
            "width": width,
            "non_finite_values": self._non_finite,
        }

    def as_dict(self) -> dict[str, Json]:
        """Return when which frames were done, in seconds since it began, and whether all were."""
        chunks: list[Json] = [
            {"num_frames": frames, "seconds": round(seconds, 6), "prompt": prompt}
            for frames, seconds, prompt in self._made
        ]
        last = self._made[-1][1] if self._made else 0.0
        stream: dict[str, Json] = {
            "time_to_first_frame_s": round(self._made[0][1], 6) if self._made else None,
            "frames_per_second": round(self.num_frames / last, 3) if last else None,
            "chunks": chunks,
        }
        return {"stream": stream, "interrupted": self.interrupted}

    def _embedded(self, pipe: Any, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the embeddings of the later prompts, made before the first step."""
        default = signature(type(pipe).__call__).parameters["max_sequence_length"].default
        length = arguments.get("max_sequence_length", default)
        with torch.no_grad():
            found = [
                pipe.encode_prompt(
                    prompt=later.text, do_classifier_free_guidance=False, max_sequence_length=length
                )[0]
                for later in self.later
            ]
        return [embeds.to(pipe.transformer.dtype) for embeds in found]
