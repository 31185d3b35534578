import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.denoise import denoise
from multimodal_gen.runtime.generator.record import Timings
from multimodal_gen.runtime.generator.sampling import Call

STEPS = 4


class _Bar:
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class _Pipe:
    def __init__(self, scheduler=None):
        self.scheduler = scheduler or FlowMatchEulerDiscreteScheduler()

    def set_progress_bar_config(self, **config):
        self.config = config

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
        return SimpleNamespace(frames=video, sound=sound)


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
    return denoise(pipe, Call(arguments={}, fps=8), timings), timings


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


def test_a_copy_steps_itself_and_not_the_original() -> None:
    sounds = []

    class Listening(_WithSound):
        def __call__(self):
            result = super().__call__()
            sounds.append(result.sound)
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
