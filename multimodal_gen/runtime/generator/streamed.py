"""How chunks are taken out of a running call of each pipeline that makes its video chunk by chunk.

    HeliosPipeline,         decode each chunk by itself: the result of the autoencoder is taken
    HeliosPyramidPipeline   away. They keep all latents and read the last few, so that a long video
                            is made in several calls, each of which is given those few
    AnyFlowFARPipeline      forwards all of the past once more after each chunk: before that the
                            chunk is decoded, with what the autoencoder knows of the frames before
    SkyReelsV2Diffusion-    makes a long video in parts that overlap: a part is decoded, likewise,
    ForcingPipeline         when the next one begins. A long video is made in several calls, each of
                            which is given the overlap
    HunyuanVideoFramepack-  decodes sections and blends their ends with those that follow: what is
    Pipeline                blended is taken away. A long video is made in several calls, each of
                            which is given the latents that the model reads

A later prompt takes over with the first chunk that begins at its time or after it. Helios and
SkyReels-V2 keep latents of the past, which have no prompt. AnyFlow-FAR encodes its past anew before
every chunk, from then on with the new prompt.

Shapes: B batch, C channels, T frames, H and W height and width, in pixels or latents.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any, Protocol

import torch
from typing_extensions import override

from multimodal_gen.runtime.generator.denoise import Denoised
from multimodal_gen.runtime.generator.overridden import overridden


class Stream(Protocol):
    """Takes the frames, and knows the prompts."""

    in_one_call: bool
    """Whether the pipeline must make the video in one call."""
    saves_latents: bool
    """Whether the latents that calls return are kept and saved."""

    @property
    def num_frames(self) -> int:
        """How many frames were handed on."""

    def prompt_at(self, frame: int) -> int:
        """Return which prompt holds for a chunk that begins at a frame; 0 is the first one."""

    def hand_on(self, frames: Any, prompt: int) -> None:
        """Hand on frames that are done, floats in [0, 1], [T, H, W, 3]."""


class Taken(ABC):
    """What a family of pipelines needs for its chunks to be taken from a running call.

    Args:
        pipe: the pipeline.
        stream: takes the frames.
        later: embeddings of the later prompts, [1, tokens, channels] each.
    """

    def __init__(self, pipe: Any, stream: Stream, later: Sequence[torch.Tensor]) -> None:
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

    def stepped(self, step: int, latents: torch.Tensor) -> None:
        """Look at the latents after a step; of the same step, what comes later holds."""
        del step, latents

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
        """Return which prompt holds from a latent frame on; see `Stream.prompt_at`."""
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


_CHUNKS_OF_A_CALL = 16  # whose latents a pipeline keeps until its call ends


class _Helios(Taken):
    """Chunks of a pipeline that decodes each of them by itself."""

    def __init__(self, pipe: Any, stream: Stream, later: Sequence[torch.Tensor]) -> None:
        super().__init__(pipe, stream, later)
        self._waiting: list[Any] = []  # frames that the pipeline may cut off at the end
        self._prompt = 0
        self._first: torch.Tensor | None = None  # latent frame that all chunks see, [1, C, 1, H, W]
        self._given = False  # whether that is one of an image or a video that was given
        self._last = torch.empty(0)  # latents that the next call is given
        self._added = 0  # latent frames that a call returns and did not make

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `Taken.parts`; what is given latents is made in one call."""
        of = self.with_defaults(arguments).__getitem__
        window = (of("num_latent_frames_per_chunk") - 1) * self.pipe.vae_scale_factor_temporal + 1
        chunks = max(1, -(-max(of("num_frames"), 1) // window))
        given = ("image_latents", "fake_image_latents", "video_latents")
        at_once = self.stream.in_one_call or any(of(name) is not None for name in given)
        at_once = at_once or of("is_skip_first_chunk")
        self._given = of("image") is not None or of("video") is not None
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
                    "image": None,
                    "video": None,
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
        """See `Taken.made`: the past that a call was given is in front."""
        latents = torch.stack(run.pixels)
        new = latents[:, :, self._added :]
        if self._first is None:
            self._first = new[:, :, :1].clone()
        self._last = latents
        return new

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `Taken.decoding`: the pipeline is given videos without a frame to keep."""
        vae = self.pipe.vae
        own = vae.decode

        def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
            kwargs["return_dict"] = False
            (video,) = own(latents, *args, **kwargs)
            self._take(self.pixels(video), latents.shape[2])
            return (video[:, :, :0],)

        with overridden(vae, decode=decode):
            yield

    @override
    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._prompt = self.prompt_from(self.num_latents)
        if self._given and self._first is None:  # as the model reads it, noise included
            self._first = arguments["latents_history_short"][:, :, :1].float()
        return self.text_from(arguments, self._prompt)

    def end(self, latents: torch.Tensor) -> None:
        """See `Taken.end`; all is decoded, and frames that still wait are cut off."""

    def prompt_from(self, latent_frame: int) -> int:
        """See `Taken.prompt_from`: chunks are decoded apart, each with a first frame."""
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


class Followed(Taken):
    """Chunks that are decoded here, with what the autoencoder knows of the frames before them."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `Taken.decoding`: frames follow on what was decoded before."""
        vae = self.pipe.vae
        vae.clear_cache()
        try:
            with overridden(vae, _decode=self._decode):
                yield
        finally:
            vae.clear_cache()

    def end(self, latents: torch.Tensor) -> None:
        """See `Taken.end`: nothing follows on the last chunk, which would have told of it."""
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


class _AnyFlowFAR(Followed):
    """Chunks of a pipeline that encodes the past anew after each of them."""

    @override
    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
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


class SkyReels(Followed):
    """Parts of a long video, of a pipeline that begins each with the end of the one before."""

    def __init__(self, pipe: Any, stream: Stream, later: Sequence[torch.Tensor]) -> None:
        super().__init__(pipe, stream, later)
        self._num_frames: int | None = None  # of the whole video, where a call makes some of it
        self._earlier = 0  # parts that earlier calls made
        self._last = torch.empty(0)  # latents with which a part begins, [1, C, T, H, W]
        self._overlap = 0  # how many frames of these there are
        self._added = 0  # latent frames in front of a call that it did not make
        self._seen = 0  # latent frames of a call that were taken

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `Taken.parts`; a call of some parts has the length at which the pipeline ends."""
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
        """See `Taken.made`: the overlap that a call was given is in front."""
        latents = torch.stack(run.pixels)
        with torch.no_grad():
            self._take_new(latents)
        return latents[:, :, self._added :]

    def end(self, latents: torch.Tensor) -> None:
        """See `Taken.end`; all is taken when its call is done."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `Taken.decoding`; the pipeline hands its latents on when a part begins."""
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

        with overridden(self.pipe, prepare_latents=prepare), super().decoding():
            yield

    def _take_new(self, latents: torch.Tensor) -> None:
        """Take what is new of the latents of a call, and keep what the next part begins with."""
        new = latents[:, :, self._seen :]
        self._seen = latents.shape[2]
        self.take(new)
        every = torch.cat([self._last, new], dim=2) if self._last.numel() else new
        self._last = every[:, :, max(0, every.shape[2] - self._overlap) :].clone()

    @override
    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.text_from(arguments, self.prompt_from(self.num_latents))


_HISTORY_OF_FRAMEPACK = 16 + 2 + 1  # latent frames, which the pipeline has in its code


class FramePack(Taken):
    """Sections of a pipeline that blends the end of each with the beginning of the next one."""

    def __init__(self, pipe: Any, stream: Stream, later: Sequence[torch.Tensor]) -> None:
        super().__init__(pipe, stream, later)
        self._window = 0  # latent frames of a section
        self._begins = True  # whether the next section is the first one of a call
        self._goes_on = False  # whether earlier calls made sections
        self._image = self._step = torch.empty(0)  # latents, [1, C, 1, H, W] and of a section
        self._past = torch.empty(0)  # the last latents of the video, [1, C, T, H, W]
        self._waiting = torch.empty(0)  # frames that the next section blends, [1, 3, T, H, W]
        self._last: Any = ()  # frames that a call returned, [T, H, W, 3]

    def parts(self, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """See `Taken.parts`: the pipeline decodes, as it does nowhere but for pixels."""
        every = {**self.with_defaults(arguments), "output_type": "np"}
        self._window = every["latent_window_size"]
        frames = (self._window - 1) * self.pipe.vae_scale_factor_temporal + 1
        sections = max(1, -(-every["num_frames"] // max(1, frames)))
        given = ("image_latents", "last_image")
        at_once = self.stream.in_one_call or self.stream.saves_latents
        at_once = at_once or any(every[name] is not None for name in given)
        calls = 1 if at_once else -(-sections // _CHUNKS_OF_A_CALL)
        for call in range(calls):
            share = (sections + call) // calls
            part = {**arguments, "output_type": "np"}
            self._begins = True
            yield part if calls == 1 else {**part, "num_frames": share * frames}
            if call < calls - 1:
                self._goes_on = True

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `Taken.decoding`: the pipeline is left with the frames that it goes on to blend."""
        pipe, vae = self.pipe, self.pipe.vae
        own = pipe.prepare_image_latents, pipe._soft_append, vae.decode

        def prepare(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._goes_on:
                return self._past  # behind which the pipeline puts what it makes
            self._image = self._past = own[0](*args, **kwargs)
            return self._image

        def append(history: torch.Tensor, current: torch.Tensor, overlap: int = 0) -> torch.Tensor:
            video = own[1](history, current, overlap)
            done = video.shape[2] - overlap
            self.stream.hand_on(self.pixels(video[:, :, :done]), 0)
            self._waiting = video[:, :, done:]
            return self._waiting

        def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._past = torch.cat([self._past, self._step], dim=2)
            first, self._begins = self._begins, False
            if not first or not self._goes_on:
                decoded = own[2](latents, *args, **kwargs)
                self._waiting = decoded[0] if first else self._waiting
                self._past = self._past[:, :, -self._kept() :]
                return decoded
            both = self._past[:, :, -2 * self._window :].to(vae.dtype) / vae.config.scaling_factor
            self._past = self._past[:, :, -self._kept() :]
            (video,) = own[2](both, *args, **kwargs)
            overlap = (self._window - 1) * pipe.vae_scale_factor_temporal + 1
            return (append(self._waiting, video, overlap),)

        taken = overridden(pipe, prepare_image_latents=prepare, _soft_append=append)
        with taken, overridden(vae, decode=decode):
            yield

    def stepped(self, step: int, latents: torch.Tensor) -> None:
        """See `Taken.stepped`: a section is what its last step leaves."""
        self._step = latents

    def before_forward(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Taken.before_forward`: the image is in front of the past, not the past itself."""
        if not self._goes_on:
            return {}
        clean = arguments["latents_clean"]
        return {"latents_clean": torch.cat([self._image.to(clean.dtype), clean[:, :, -1:]], dim=2)}

    def made(self, run: Denoised) -> torch.Tensor:
        """See `Taken.made`; what was left to blend is the end of the video, or waits."""
        self._last = run.pixels[0]
        return run.latents

    def end(self, latents: torch.Tensor) -> None:
        """See `Taken.end`: nothing is blended with the end of the last call."""
        self.stream.hand_on(self._last, 0)

    def _kept(self) -> int:
        """Return how many latent frames the model reads, or a section is decoded with."""
        return max(_HISTORY_OF_FRAMEPACK, self._window)


TAKEN: Mapping[str, type[Taken]] = MappingProxyType(
    {
        "HeliosPipeline": _Helios,
        "HeliosPyramidPipeline": _Helios,
        "AnyFlowFARPipeline": _AnyFlowFAR,
        "SkyReelsV2DiffusionForcingPipeline": SkyReels,
        "SkyReelsV2DiffusionForcingImageToVideoPipeline": SkyReels,
        "HunyuanVideoFramepackPipeline": FramePack,
    }
)
"""What takes chunks out of each pipeline that makes a video chunk by chunk, by its name."""
