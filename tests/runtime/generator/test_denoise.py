"""."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.models.attention_dispatch import dispatch_attention_fn

from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.generator.denoise import (
    Denoised,
    Timings,
    check_finite,
    denoise,
    differences,
    produced,
)
from multimodal_gen.runtime.generator.library_errors import (
    out_of_memory_explained,
    told_of_run,
)
from multimodal_gen.runtime.generator.sampling import Call
from multimodal_gen.runtime.managers.generation import Generation
from multimodal_gen.runtime.server_args import ServerArgs

STEPS = 4


class _Bar:
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class _Pipe:
    def __init__(self, scheduler=None):
        self.scheduler = scheduler or FlowMatchEulerDiscreteScheduler()
        self.components = {"scheduler": self.scheduler}

    def progress_bar(self, total):
        return _Bar()


class _WithSound(_Pipe):
    """Denoises sound beside the video, with a copy of the scheduler, as LTX-2 does."""

    def duplicate(self):
        return copy.deepcopy(self.scheduler)

    def __call__(self):
        self.scheduler.set_timesteps(STEPS)
        sound_scheduler = self.duplicate()
        video, sound = torch.ones(1, 4), torch.ones(1, 4)
        with self.progress_bar(total=STEPS):
            for t in self.scheduler.timesteps:
                video = self.scheduler.step(video * 0.1, t, video, return_dict=False)[0]
                sound = sound_scheduler.step(sound * 0.3, t, sound, return_dict=False)[0]
        return SimpleNamespace(frames=video, audio=sound)


class _WithPickledSound(_WithSound):
    def duplicate(self):
        return pickle.loads(pickle.dumps(self.scheduler))


class _Forcing(_Pipe):
    """Steps copies of the scheduler only, one per frame, as SkyReels-V2's forcing does."""

    _callback_tensor_inputs = ("latents",)

    def __call__(self, callback_on_step_end=None):
        self.scheduler.set_timesteps(STEPS)
        schedulers = [copy.deepcopy(self.scheduler) for _ in range(3)]
        latents = torch.arange(1.0, 4.0)[:, None, None].repeat(1, 1, 4)
        with self.progress_bar(total=STEPS):
            for i, t in enumerate(self.scheduler.timesteps):
                for k, scheduler in enumerate(schedulers):
                    velocity = latents[k] * 0.3 * (k + 1)
                    latents[k] = scheduler.step(velocity, t, latents[k], return_dict=False)[0]
                if callback_on_step_end is not None:
                    latents = callback_on_step_end(self, i, t, {"latents": latents})["latents"]
        return SimpleNamespace(frames=latents, sound=None)


class _Partial(_Pipe):
    """Steps all latents but the first, which is given, as LTX's image-to-video does."""

    _callback_tensor_inputs = ("latents",)

    def __call__(self, callback_on_step_end=None):
        self.scheduler.set_timesteps(STEPS)
        latents = torch.ones(3, 4)
        with self.progress_bar(total=STEPS):
            for i, t in enumerate(self.scheduler.timesteps):
                rest = self.scheduler.step(latents[1:] * 0.1, t, latents[1:]).prev_sample
                latents = torch.cat([latents[:1], rest])
                if callback_on_step_end is not None:
                    latents = callback_on_step_end(self, i, t, {"latents": latents})["latents"]
        return SimpleNamespace(frames=latents, sound=None)


class _RestoresState(_Pipe):
    """Gives the scheduler's attributes back to it between steps, as Panorama does."""

    def __call__(self):
        self.scheduler.set_timesteps(STEPS)
        latents = torch.ones(1, 4)
        with self.progress_bar(total=STEPS):
            for t in self.scheduler.timesteps:
                state = copy.deepcopy(self.scheduler.__dict__)
                latents = self.scheduler.step(latents * 0.1, t, latents, return_dict=False)[0]
                self.scheduler.__dict__.update({**state, "_step_index": self.scheduler.step_index})
        return SimpleNamespace(frames=latents, sound=None)


def _denoise(pipe):
    timings = Timings(torch.device("cpu"))
    made = Generation(prompt="a fox", width=96, height=64)
    return denoise(pipe, Call(arguments={}, fps=8, generation=made), timings), timings


def _unipc():
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


@pytest.mark.parametrize(
    "make",
    [
        _WithSound,
        _WithPickledSound,
        _RestoresState,
        _Partial,
        lambda: _Forcing(_unipc()),
        lambda: _WithSound(_unipc()),
    ],
    ids=["copied", "pickled", "restored", "partial", "forcing", "multistep"],
)
def test_watching_changes_no_result_and_counts_every_step_once(make) -> None:
    expected = make()().frames
    done, timings = _denoise(make())
    assert torch.equal(torch.stack(done.pixels), expected)
    assert torch.equal(done.latents, expected)
    assert len(timings.steps) == STEPS


def test_sound_that_is_made_and_lost_is_noted() -> None:
    done, _ = _denoise(_WithSound())
    assert done.notes == ("the sound that _WithSound made is not written, videos are silent",)
    assert _denoise(_Partial())[0].notes == ()


def test_a_copy_steps_itself_and_not_the_original() -> None:
    sounds = []

    class Listening(_WithSound):
        def __call__(self):
            result = super().__call__()
            sounds.append(result.audio)
            return result

    Listening()()
    _denoise(Listening())
    assert torch.equal(*sounds)


def test_the_signature_of_step_can_be_read_during_a_run() -> None:
    found = []

    class Asking(_WithSound):
        def __call__(self):
            found.append(inspect.signature(self.scheduler.step))
            return super().__call__()

    pipe = Asking()
    before = inspect.signature(pipe.scheduler.step)
    _denoise(pipe)
    assert found == [before]


def test_after_an_error_the_pipeline_is_as_before() -> None:
    class Failing(_WithSound):
        def __call__(self):
            super().__call__()
            raise ArithmeticError("no")

    pipe = Failing()
    with pytest.raises(ArithmeticError, match="no"):
        _denoise(pipe)
    assert "step" not in vars(pipe.scheduler)
    assert "progress_bar" not in vars(pipe)


def test_a_pipeline_without_a_step_is_refused() -> None:
    class Idle(_Pipe):
        def __call__(self):
            return SimpleNamespace(frames=torch.ones(1, 4))

    with pytest.raises(UsageError, match="Idle made no denoising step, so there is no result"):
        _denoise(Idle())


def _attend(backend: str = "native", heads: int = 2) -> None:
    query = torch.ones(1, 4, 2, 8)
    dispatch_attention_fn(query, torch.ones(1, 4, heads, 8), query, backend=backend)


def test_a_backend_that_fails_its_first_call_is_named_with_what_it_said() -> None:
    rule = r"must be one that diffusers can run here, got _native_cudnn, which failed: No .*native,"
    with pytest.raises(UsageError, match=rule), told_of_run(backend="_native_cudnn"):
        _attend("_native_cudnn")


def test_the_native_backend_is_not_its_own_remedy() -> None:
    rule = "got native, which failed: .*; use --backend sglang"
    with pytest.raises(UsageError, match=rule), told_of_run(backend="native"):
        _attend(heads=3)


def test_without_a_name_an_error_of_the_dispatch_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), told_of_run():
        _attend(heads=3)


@pytest.mark.parametrize(
    "error",
    [ArithmeticError("a defect"), UnsupportedBackendError("ours"), RuntimeError("a defect")],
)
def test_errors_from_elsewhere_stay_what_they_are(error: Exception) -> None:
    with (
        pytest.raises(type(error), match=str(error)) as caught,
        told_of_run(backend="flex"),
    ):
        raise error
    assert caught.value is error


def test_full_memory_inside_the_dispatch_is_told_as_such(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", full)
    with (
        pytest.raises(UsageError, match=r"the device ran out of memory .* try a smaller --height"),
        out_of_memory_explained(),
        told_of_run(backend="native"),
    ):
        _attend()


def test_a_refusal_by_a_scheduler_is_told_in_one_line() -> None:
    rule = "the pipeline refuses its arguments, change what it names: `num_inference_steps`: 1001"
    with pytest.raises(UsageError, match=rule), told_of_run():
        DDIMScheduler().set_timesteps(1001)


def test_a_value_error_from_below_a_pipeline_keeps_its_type() -> None:
    def defect(*args, **kwargs):
        raise ValueError("a defect")

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.time_shift = scheduler.stretch_shift_to_terminal = defect
    scheduler.register_to_config(use_dynamic_shifting=True)
    with pytest.raises(ValueError, match=r"^a defect$") as caught, told_of_run():
        scheduler.set_timesteps(4, mu=1.0)
    assert not isinstance(caught.value, UsageError)


def _run(*, latents=None, pixels=None) -> Denoised:
    return Denoised(
        pixels=(np.zeros((2, 4, 6, 3), np.float32) if pixels is None else pixels,),
        latents=torch.zeros(2, 4) if latents is None else latents,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_refused_with_their_number(value: float) -> None:
    latents = torch.zeros(2, 4)
    latents[0, 1:] = value
    rule = "the denoised latents must be finite, got 3 of 8 values .*; try --dtype bfloat16"
    with pytest.raises(UsageError, match=rule):
        check_finite(_run(latents=latents))


def test_pixels_without_a_finite_value_are_refused() -> None:
    pixels = np.full((4, 6, 3), np.nan, np.float32)
    with pytest.raises(UsageError, match=r"the decoded pixels must be finite, .* try --dtype bf"):
        check_finite(_run(pixels=pixels))
    pixels[0, 0, 0] = 0.5
    check_finite(_run(pixels=pixels))


def test_what_was_made_is_told_with_the_values_that_became_black() -> None:
    video = np.zeros((5, 32, 48, 3), np.float32)
    video[0, 0, 0] = np.nan
    assert produced([video, video]) == {
        "num_outputs": 2,
        "num_frames": 5,
        "height": 32,
        "width": 48,
        "non_finite_values": 6,
    }
    assert produced([np.zeros((16, 24, 3))])["num_frames"] is None


def test_only_sizes_that_were_asked_for_and_differ_are_noted() -> None:
    made = produced([np.zeros((5, 32, 48, 3))])
    assert differences(made, ServerArgs(model_path="m")) == ()
    assert differences(made, ServerArgs(model_path="m", height=32, num_frames=5)) == ()
    asked = ServerArgs(model_path="m", height=40, num_frames=4, num_outputs=2)
    assert differences(made, asked) == (
        "--num-outputs 2 was asked for, the pipeline made 1",
        "--num-frames 4 was asked for, the pipeline made 5",
        "--height 40 was asked for, the pipeline made 32",
    )
