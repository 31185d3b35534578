"""Frames of a video as its chunks finish, from pipelines that make it chunk by chunk.

Such pipelines return the whole video at the end of one call. Here every chunk is taken out of the
call when it is done, decoded if the pipeline did not do so, and handed on. The frames are those
that the call would have returned.

    HeliosPipeline,         decode each chunk by itself: the result of the autoencoder is taken
    HeliosPyramidPipeline   away. They keep all latents and read the last few, so that a long video
                            is made in several calls, each of which is given those few
    AnyFlowFARPipeline      forwards all of the past once more after each chunk: before that the
                            chunk is decoded, with what the autoencoder knows of the frames before
    SkyReelsV2Diffusion-    makes a long video in parts that overlap: a part is decoded, likewise,
    ForcingPipeline         when the next one begins. A long video is made in several calls, each of
                            which is given the overlap
    HunyuanVideoFramepack-  decodes sections and blends their ends with those that follow: what is
    Pipeline                blended is taken away

A later prompt takes over with the first chunk that begins at its time or after it. Helios and
SkyReels-V2 keep latents of the past, which have no prompt. AnyFlow-FAR encodes its past anew before
every chunk, from then on with the new prompt.

Shapes: B batch, C channels, T frames, H and W height and width, in pixels or latents.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator.denoise import Denoised, Timings, denoise
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.sampling import Call
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.plain_values import MalformedError, read_small_file, short
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.runtime.setting import expanded

__all__ = [
    "STREAMED",
    "Give",
    "StreamedChunk",
    "Streaming",
    "TimedPrompt",
    "check_stream",
    "read_timed_prompts",
]


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
    if index.name not in _TAKEN:
        raise UsageError(
            f"--stream must be left out for {index.name}, which makes a video as a whole; these "
            f"pipelines make it chunk by chunk: {', '.join(_TAKEN)}"
        )
    if args.last_image_path is not None and _TAKEN[index.name] is _SkyReels:
        raise UsageError(
            f"--last-image-path must be left out with --stream and {index.name}, whose last frames "
            "it cuts off when all are there"
        )
    if args.vae_tiling and issubclass(_TAKEN[index.name], _Followed):
        raise UsageError(
            f"--vae-tiling must be left out with --stream and {index.name}: tiles of the "
            "autoencoder know nothing of the frames of the chunk before"
        )
    if _TAKEN[index.name] is _FramePack:
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
    try:
        path = expanded(str(file), "--prompts-file")
        lines = read_small_file(path, encoding="utf-8-sig").splitlines()
    except MalformedError as error:
        raise ConfigError(
            f"--prompts-file must be a readable text file, got {str(file)!r}: {error}"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
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
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(self, args: ServerArgs, give: Give) -> None:
        self.later = read_timed_prompts(args.prompts_file)
        self.interrupted = False
        self._first = args.prompt or ""
        self._saves = args.save_latents
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
        taken = _TAKEN[type(pipe).__name__](pipe, self, self._embedded(pipe, arguments))
        try:
            with taken.hooked():
                latents, kept = torch.empty(0), []
                for part in taken.parts(arguments):
                    run = denoise(pipe, replace(call, arguments=part), timings)
                    latents = taken.made(run)
                    kept += [latents.cpu()] * self._saves
                with torch.no_grad():
                    taken.end(latents)
                latents = torch.cat(kept, dim=2) if len(kept) > 1 else latents
        except KeyboardInterrupt:
            if not self._made:
                raise
            self.interrupted = True
            latents = torch.empty(0)
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
        """Return when which frames were done, in seconds since the generation began."""
        chunks: list[Json] = [
            {"num_frames": frames, "seconds": round(seconds, 6), "prompt": prompt}
            for frames, seconds, prompt in self._made
        ]
        last = self._made[-1][1] if self._made else 0.0
        return {
            "time_to_first_frame_s": round(self._made[0][1], 6) if self._made else None,
            "frames_per_second": round(self.num_frames / last, 3) if last else None,
            "chunks": chunks,
        }

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


class _Taken(ABC):
    """What a family of pipelines needs for its chunks to be taken from a running call.

    Args:
        pipe: the pipeline.
        stream: takes the frames.
        later: embeddings of the later prompts, [1, tokens, channels] each.
    """

    def __init__(self, pipe: Any, stream: Streaming, later: Sequence[torch.Tensor]) -> None:
        self.pipe = pipe
        self.stream = stream
        self.later = later
        self.num_latents = 0  # latent frames of the chunks that are done
        self._text: torch.Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Take chunks, and pass the prompt of each, in the `with` block."""
        hook = self.pipe.transformer.register_forward_pre_hook(self._before, with_kwargs=True)
        try:
            with self.decoding():
                yield
        finally:
            hook.remove()

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the arguments of the calls that make the video, each when the last one is done."""
        yield arguments

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, and the pipeline's own values of the others."""
        known = signature(type(self.pipe).__call__).parameters
        return {**{name: x.default for name, x in known.items()}, **arguments}

    def made(self, run: Denoised) -> torch.Tensor:
        """Take what a call returned; returns the latents that it made, [1, C, T, H, W]."""
        return torch.stack(run.pixels)

    @abstractmethod
    def decoding(self) -> Any:
        """Return a context manager in which the autoencoder decodes chunk by chunk."""

    @abstractmethod
    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Look at a call of the denoiser, and return what differs in its arguments."""

    @abstractmethod
    def end(self, latents: torch.Tensor) -> None:
        """Hand on what is left; `latents` are [1, C, T, H, W], of the last call."""

    def prompt_from(self, latent_frame: int) -> int:
        """Return which prompt holds from a latent frame on; see `Streaming.prompt_at`."""
        factor = self.pipe.vae_scale_factor_temporal
        return self.stream.prompt_at(max(0, (latent_frame - 1) * factor + 1))

    def text_from(self, arguments: Mapping[str, Any], prompt: int) -> Mapping[str, Any]:
        """Return what differs in a call that has either the prompt or the negative one.

        Args:
            arguments: of the call.
            prompt: which prompt holds.
        """
        text = arguments["encoder_hidden_states"]
        if self._text is None:  # the first call is that of the prompt, not of the negative one
            self._text = text
        if text is not self._text or not prompt:
            return {}
        return {"encoder_hidden_states": self.later[prompt - 1]}

    def pixels(self, video: torch.Tensor) -> Any:
        """Return [1, 3, T, H, W] in [-1, 1] as floats in [0, 1], [T, H, W, 3]."""
        return self.pipe.video_processor.postprocess_video(video, output_type="np")[0]

    def _before(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, **self.before_forward(kwargs)}


_CHUNKS_OF_A_CALL = 16  # whose latents a pipeline keeps until it ends


class _Helios(_Taken):
    """Chunks of a pipeline that decodes each of them by itself."""

    def __init__(self, pipe: Any, stream: Streaming, later: Sequence[torch.Tensor]) -> None:
        super().__init__(pipe, stream, later)
        self._waiting: list[Any] = []  # frames that the pipeline may cut off at the end
        self._prompt = 0
        self._first: torch.Tensor | None = None  # latent frame of the video, [1, C, 1, H, W]
        self._last = torch.empty(0)  # latents that the next call is given
        self._added = 0  # latent frames that a call returns and did not make

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `_Taken.parts`; what begins with an image or a video is made in one call."""
        of = self.with_defaults(arguments).__getitem__
        window = (of("num_latent_frames_per_chunk") - 1) * self.pipe.vae_scale_factor_temporal + 1
        chunks = max(1, -(-max(of("num_frames"), 1) // window))
        given = ("image", "image_latents", "fake_image_latents", "video", "video_latents")
        at_once = self.stream.in_one_call or any(of(name) is not None for name in given)
        if chunks <= _CHUNKS_OF_A_CALL or at_once:
            yield arguments
            return
        history = sum(of("history_sizes"))
        for done in range(0, chunks, _CHUNKS_OF_A_CALL):
            frames = window * min(_CHUNKS_OF_A_CALL, chunks - done)
            part = {**arguments, "num_frames": frames}
            if done:
                past = self._last[:, :, -history:]
                self._added = past.shape[2]
                part |= {
                    "video_latents": past,
                    "image_latents": self._first if of("keep_first_frame") else None,
                    "add_noise_to_image_latents": False,
                    "add_noise_to_video_latents": False,
                }
                if "is_amplify_first_chunk" in self.with_defaults(arguments):
                    part["is_amplify_first_chunk"] = False
            self._text = None
            yield part

    def made(self, run: Denoised) -> torch.Tensor:
        """See `_Taken.made`: the past that a call was given is in front."""
        latents = torch.stack(run.pixels)
        new = latents[:, :, self._added :]
        if self._first is None:
            self._first = new[:, :, :1].clone()
        self._last = latents
        return new

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `_Taken.decoding`: the pipeline is given videos without a frame to keep."""
        vae = self.pipe.vae
        own = vae.decode

        def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
            kwargs["return_dict"] = False
            (video,) = own(latents, *args, **kwargs)
            self._take(self.pixels(video), latents.shape[2])
            return (video[:, :, :0],)

        vae.decode = decode
        try:
            yield
        finally:
            del vae.decode

    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `_Taken.before_forward`."""
        self._prompt = self.prompt_from(self.num_latents)
        return self.text_from(arguments, self._prompt)

    def end(self, latents: torch.Tensor) -> None:
        """See `_Taken.end`; all is decoded, and frames that still wait are cut off."""

    def prompt_from(self, latent_frame: int) -> int:
        """See `_Taken.prompt_from`: chunks are decoded apart, each with a first frame."""
        return self.stream.prompt_at(self.stream.num_frames + sum(map(len, self._waiting)))

    def _take(self, frames: Any, num_latents: int) -> None:
        """Hand on frames up to a whole number of latent frames, as the pipeline ends its video."""
        import numpy as np

        self.num_latents += num_latents
        every = np.concatenate([*self._waiting, frames]) if self._waiting else frames
        factor, before = self.pipe.vae_scale_factor_temporal, self.stream.num_frames
        end = (before + len(every) - 1) // factor * factor + 1
        self._waiting = [every[end - before :]] if len(every) > end - before else []
        self.stream.hand_on(every[: end - before], self._prompt)


class _Followed(_Taken):
    """Chunks that are decoded here, with what the autoencoder knows of the frames before them."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `_Taken.decoding`: frames follow on what was decoded before."""
        vae = self.pipe.vae
        vae.clear_cache()
        vae._decode = self._decode
        try:
            yield
        finally:
            del vae._decode
            vae.clear_cache()

    def end(self, latents: torch.Tensor) -> None:
        """See `_Taken.end`: nothing follows on the last chunk, which would have told of it."""
        self.take(latents[:, :, self.num_latents :])

    def take(self, latents: torch.Tensor) -> None:
        """Decode and hand on the latents of a chunk, [1, C, T, H, W]."""
        vae, prompt = self.pipe.vae, self.prompt_from(self.num_latents)
        latents = latents.to(vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        (video,) = vae.decode(latents / (1.0 / std) + mean, return_dict=False)
        self.stream.hand_on(self.pixels(video), prompt)
        self.num_latents += latents.shape[2]

    def _decode(self, latents: torch.Tensor, return_dict: bool = True) -> Any:
        """Stand for `AutoencoderKLWan._decode`, which forgets the frames before."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
        from diffusers.models.autoencoders.vae import DecoderOutput

        vae, frames = self.pipe.vae, []
        rows = vae.post_quant_conv(latents)
        for i in range(rows.shape[2]):
            vae._conv_idx = [0]
            is_first = {"first_chunk": True} if self.num_latents + i == 0 else {}
            frames.append(
                vae.decoder(
                    rows[:, :, i : i + 1],
                    feat_cache=vae._feat_map,
                    feat_idx=vae._conv_idx,
                    **is_first,
                )
            )
        video = torch.cat(frames, 2)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        video = video.clamp(min=-1.0, max=1.0)
        return DecoderOutput(sample=video) if return_dict else (video,)


class _AnyFlowFAR(_Followed):
    """Chunks of a pipeline that encodes the past anew after each of them."""

    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `_Taken.before_forward`."""
        chunks, text = arguments["chunk_partition"], arguments["encoder_hidden_states"]
        past = sum(chunks[:-1])
        if arguments["kv_cache_flag"]["is_cache_step"]:
            # [B, T, C, H, W], the unconditional branch first; all of it is past now.
            self.take(arguments["hidden_states"][-1:, past:].transpose(1, 2))
            past = sum(chunks)
        prompt = self.prompt_from(past)
        if not prompt:
            return {}
        return {"encoder_hidden_states": torch.cat([text[:-1], self.later[prompt - 1]])}


class _SkyReels(_Followed):
    """Parts of a long video, of a pipeline that begins each with the end of the one before."""

    def __init__(self, pipe: Any, stream: Streaming, later: Sequence[torch.Tensor]) -> None:
        super().__init__(pipe, stream, later)
        self._num_frames: int | None = None  # of the whole video, where a call makes some of it
        self._earlier = 0  # parts that earlier calls made
        self._last = torch.empty(0)  # latents with which a part begins, [1, C, T, H, W]
        self._overlap = 0  # how many frames of these there are
        self._added = 0  # latent frames in front of a call that it did not make
        self._seen = 0  # latent frames of a call that were taken

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `_Taken.parts`; a call of some parts has the length at which the pipeline ends."""
        of = self.with_defaults(arguments).__getitem__
        frames, base, overlap = of("num_frames"), of("base_num_frames"), of("overlap_history")
        if self.stream.in_one_call or overlap is None or of("latents") is not None:
            yield arguments
            return
        # As the pipeline counts, in latent frames behind the first one.
        factor = self.pipe.vae_scale_factor_temporal
        frames, base, overlap = frames // factor, (base - 1) // factor, (overlap - 1) // factor
        step = base - overlap
        parts = 1 if step < 1 else -(-(frames - base) // step) + 1
        # Of two parts at least: to the pipeline one alone is another kind of video.
        calls = min(-(-parts // _CHUNKS_OF_A_CALL), parts // 2)
        if calls < 2:
            yield arguments
            return
        self._num_frames = frames * factor + 1
        for call in range(calls):
            share = (parts + call) // calls
            self._seen = self._added = overlap + 1 if call else 0
            self._text = None
            yield {**arguments, "num_frames": (base + (share - 1) * step) * factor + 1}
            self._earlier += share

    def made(self, run: Denoised) -> torch.Tensor:
        """See `_Taken.made`: the overlap that a call was given is in front."""
        latents = torch.stack(run.pixels)
        with torch.no_grad():
            self._take_new(latents)
        return latents[:, :, self._added :]

    def end(self, latents: torch.Tensor) -> None:
        """See `_Taken.end`; all is taken when its call is done."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `_Taken.decoding`; the pipeline hands its latents on when a part begins."""
        own = self.pipe.prepare_latents

        def prepare(*args: Any, **kwargs: Any) -> Any:
            given = signature(own).bind(*args, **kwargs).arguments
            self._overlap = given["overlap_history_latent_frames"] or 0
            if given["video_latents"] is not None:
                self._take_new(given["video_latents"])
            if self._num_frames is not None:
                given["num_frames"] = self._num_frames
            if self.num_latents:
                given["video_latents"] = self._last
                given["long_video_iter"] += self._earlier
                given |= {"image": None} if "image" in given else {}
            return own(**given)

        self.pipe.prepare_latents = prepare
        try:
            with super().decoding():
                yield
        finally:
            del self.pipe.prepare_latents

    def _take_new(self, latents: torch.Tensor) -> None:
        """Take what is new of the latents of a call, and keep what the next part begins with."""
        new = latents[:, :, self._seen :]
        self._seen = latents.shape[2]
        self.take(new)
        every = torch.cat([self._last, new], dim=2) if self._last.numel() else new
        self._last = every[:, :, max(0, every.shape[2] - self._overlap) :].clone()

    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `_Taken.before_forward`."""
        return self.text_from(arguments, self.prompt_from(self.num_latents))


class _FramePack(_Taken):
    """Sections of a pipeline that blends the end of each with the beginning of the next one."""

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `_Taken.parts`: the pipeline decodes, as it does nowhere but for pixels."""
        yield {**arguments, "output_type": "np"}

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `_Taken.decoding`: the pipeline is left with the frames that it goes on to blend."""
        own = self.pipe._soft_append

        def append(history: torch.Tensor, current: torch.Tensor, overlap: int = 0) -> torch.Tensor:
            video = own(history, current, overlap)
            done = video.shape[2] - overlap
            self.stream.hand_on(self.pixels(video[:, :, :done]), 0)
            return video[:, :, done:]

        self.pipe._soft_append = append
        try:
            yield
        finally:
            del self.pipe._soft_append

    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `_Taken.before_forward`: nothing differs."""
        del arguments
        return {}

    def made(self, run: Denoised) -> torch.Tensor:
        """See `_Taken.made`; what was left to blend is the end of the video."""
        self.stream.hand_on(run.pixels[0], 0)
        return run.latents

    def end(self, latents: torch.Tensor) -> None:
        """See `_Taken.end`; all is handed on."""


_TAKEN: Mapping[str, type[_Taken]] = MappingProxyType(
    {
        "HeliosPipeline": _Helios,
        "HeliosPyramidPipeline": _Helios,
        "AnyFlowFARPipeline": _AnyFlowFAR,
        "SkyReelsV2DiffusionForcingPipeline": _SkyReels,
        "SkyReelsV2DiffusionForcingImageToVideoPipeline": _SkyReels,
        "HunyuanVideoFramepackPipeline": _FramePack,
    }
)

STREAMED = tuple(_TAKEN)
"""Pipelines that make a video chunk by chunk, by their names."""
