from types import SimpleNamespace

import diffusers
import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.load import PipelineIndex
from multimodal_gen.runtime.generator.sampling import check_arguments, prepare_call
from multimodal_gen.runtime.server_args import ServerArgs


def _index(name: str, **components) -> PipelineIndex:
    return PipelineIndex(
        model_path="m", pipeline_class=getattr(diffusers, name), components=components
    )


def _args(**values) -> ServerArgs:
    return ServerArgs(model_path="m", **{"prompt": "a fox", "seed": 0, **values})


class _Model:
    def __init__(self, **config) -> None:
        self.config = SimpleNamespace(**config)

    def set_attention_backend(self, name: str) -> None: ...


def _pipe(**config) -> SimpleNamespace:
    return SimpleNamespace(components={"transformer": _Model(**config)})


def _call(name: str, pipe=None, **values):
    call = prepare_call(pipe or _pipe(), _index(name), _args(**values))
    arguments = dict(call.arguments)
    arguments.pop("generator")
    return call, arguments


def test_only_what_the_user_gave_is_passed() -> None:
    call, arguments = _call("WanPipeline")
    assert arguments == {"prompt": "a fox", "output_type": "np"}
    generator = call.arguments["generator"]
    assert generator.device.type == "cpu"
    assert generator.initial_seed() == 0


def test_every_given_option_is_passed_by_the_pipelines_name() -> None:
    _, arguments = _call(
        "WanPipeline",
        negative_prompt="blur",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        num_outputs=3,
    )
    assert arguments == {
        "prompt": "a fox",
        "negative_prompt": "blur",
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 2,
        "num_videos_per_prompt": 3,
        "output_type": "np",
    }
    _, arguments = _call("FluxPipeline", num_outputs=2)
    assert arguments["num_images_per_prompt"] == 2


@pytest.mark.parametrize(
    ("pipeline", "config", "argument"),
    [
        ("WanPipeline", {}, "guidance_scale"),
        ("CogVideoXPipeline", {}, "guidance_scale"),
        ("FluxPipeline", {"guidance_embeds": True}, "guidance_scale"),
        ("FluxPipeline", {"guidance_embeds": False}, "true_cfg_scale"),
        ("HunyuanVideoPipeline", {"guidance_embeds": True}, "guidance_scale"),
        ("QwenImagePipeline", {"guidance_embeds": False}, "true_cfg_scale"),
        ("QwenImagePipeline", {"guidance_embeds": True}, "guidance_scale"),
    ],
)
def test_guidance_is_of_the_kind_the_model_has(pipeline: str, config, argument: str) -> None:
    _, arguments = _call(pipeline, _pipe(**config), guidance_scale=3.5)
    scales = {key: value for key, value in arguments.items() if key.endswith("_scale")}
    assert scales == {argument: 3.5}


def test_both_kinds_of_guidance_can_be_given() -> None:
    _, arguments = _call(
        "FluxPipeline", _pipe(guidance_embeds=True), guidance_scale=3.5, true_cfg_scale=2.0
    )
    assert (arguments["guidance_scale"], arguments["true_cfg_scale"]) == (3.5, 2.0)


def test_a_guider_takes_the_guidance_of_a_pipeline_without_the_argument() -> None:
    pipe = _pipe()
    pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=6.0)
    _, arguments = _call("HunyuanVideo15Pipeline", pipe, guidance_scale=2.5)
    assert "guidance_scale" not in arguments
    assert pipe.guider.guidance_scale == 2.5


def test_a_negative_prompt_without_effect_is_noted() -> None:
    call, _ = _call("FluxPipeline", _pipe(guidance_embeds=True), negative_prompt="blur")
    assert call.notes == (
        "the negative prompt has no effect at a true_cfg_scale of 1.0; raise it with "
        "--true-cfg-scale",
    )
    for values in ({"true_cfg_scale": 2.0, "negative_prompt": "blur"}, {}):
        assert _call("FluxPipeline", _pipe(guidance_embeds=True), **values)[0].notes == ()
    assert _call("WanPipeline", negative_prompt="blur")[0].notes == ()


@pytest.mark.parametrize(
    ("pipeline", "given", "fps", "passed"),
    [
        ("WanPipeline", None, 16, None),
        ("CogVideoXPipeline", None, 8, None),
        ("HunyuanVideo15Pipeline", None, 24, None),
        ("MochiPipeline", None, 16, None),
        ("LTXPipeline", None, 25, None),
        ("LTXPipeline", 30, 30, 30),
        ("WanPipeline", 30, 30, None),
    ],
)
def test_the_frame_rate_is_the_models_unless_given(pipeline, given, fps, passed) -> None:
    call, arguments = _call(pipeline, fps=given)
    assert call.fps == fps
    assert arguments.get("frame_rate") == passed


def test_an_argument_there_is_no_option_for_is_named() -> None:
    with pytest.raises(UsageError, match=r"WanImageToVideoPipeline needs image, which `sglang gen"):
        check_arguments(_index("WanImageToVideoPipeline"), _args())


@pytest.mark.parametrize(
    ("pipeline", "values", "flag"),
    [
        ("FluxPipeline", {"num_frames": 9}, "--num-frames"),
        ("FluxPipeline", {"fps": 9}, "--fps"),
        ("WanPipeline", {"true_cfg_scale": 2.0}, "--true-cfg-scale"),
        ("HunyuanVideo15Pipeline", {"guidance_scale": 2.0}, "--guidance-scale"),
        ("FluxKontextPipeline", {"num_frames": 2}, "--num-frames"),
    ],
)
def test_an_option_the_pipeline_does_not_take_is_named(pipeline: str, values, flag: str) -> None:
    rule = f"{flag} must be left out for {pipeline}, which has no such argument, got"
    with pytest.raises(UsageError, match=rule):
        check_arguments(_index(pipeline), _args(**values))


def test_a_guider_in_the_index_accepts_guidance() -> None:
    index = _index("HunyuanVideo15Pipeline", guider=("diffusers", "ClassifierFreeGuidance"))
    check_arguments(index, _args(guidance_scale=2.0))
    assert torch.is_grad_enabled()  # checking touched no global state
