import numpy as np
import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.denoise import Denoised
from multimodal_gen.runtime.generator.result import check_finite, differences, produced
from multimodal_gen.runtime.server_args import ServerArgs


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
