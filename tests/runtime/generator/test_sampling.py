"""What a pipeline is called with, and what it is refused before it is called."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.sampling import (
    check_arguments,
    check_components,
    check_outputs,
    check_sizes,
    prepare_call,
    token_size,
)
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


def _pipe(attributes=None, **config) -> SimpleNamespace:
    return SimpleNamespace(components={"transformer": _Model(**config)}, **(attributes or {}))


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
    call, arguments = _call("HunyuanVideo15Pipeline", pipe, guidance_scale=2.5)
    assert "guidance_scale" not in arguments
    assert call.changed["guider"].guidance_scale == 2.5
    assert pipe.guider.guidance_scale == 6.0


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


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("WanImageToVideoPipeline", "needs image, got none; give --image-path$"),
        ("WanVideoToVideoPipeline", "needs video, got none; give --video-path"),
        (
            "FluxControlImg2ImgPipeline",
            "control_image, got none; give .*-path; --pipeline-arg control",
        ),
    ],
)
def test_an_argument_that_the_pipeline_needs_is_named_with_its_flag(pipeline, message) -> None:
    values = {"num_frames": 9} if pipeline.startswith("Wan") else {}  # which one does not take
    with pytest.raises(UsageError, match=f"{pipeline} .*{message}"):
        check_arguments(_index(pipeline), _args(**values))


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


@pytest.mark.parametrize(
    ("pipeline", "name", "value", "rule"),
    [
        ("WanPipeline", "max_sequence_length", 10**13, "at most 65536, got 10000000000000; WanPip"),
        ("WanPipeline", "max_sequence_length", -1, "at least 1, got -1; WanPipeline has 512"),
        ("FluxImg2ImgPipeline", "strength", "x", "of type float, as FluxImg2ImgPipeline has it"),
        ("WanPipeline", "attention_kwargs", 3, r"of type dict\[str, Any\] or null, as WanPipel"),
        ("WanPipeline", "latents", [1, 2], r"of type Tensor or null, .* \[1, 2\]; no text spells"),
        ("FluxPipeline", "prompt_2", [1], r"of type str or list\[str\] or null, as FluxPipeline"),
        ("FluxInpaintPipeline", "padding_mask_crop", True, "of type int or null, .* got True"),
        ("LTXPipeline", "decode_timestep", ["x"], r"type float or list\[float\], as LTXPipeline"),
        ("HunyuanImagePipeline", "latents", 3, "must be of type Tensor or null"),
        ("HunyuanVideoFramepackPipeline", "sampling_type", "x", "type FramepackSamplingType, as"),
        ("StableDiffusionXLPipeline", "original_size", [1, 2, 3], r"type tuple\[int, int\] or nul"),
        ("WanPipeline", "num_chunks", 10**400, "must name an argument of WanPipeline"),
        ("SkyReelsV2DiffusionForcingPipeline", "ar_step", 10**30, "must be at most 2147483647"),
        ("SkyReelsV2DiffusionForcingPipeline", "addnoise_condition", "1", "must be of type float"),
    ],
)
def test_values_that_the_signature_excludes_are_refused(pipeline, name, value, rule) -> None:
    with pytest.raises(UsageError, match=f"--pipeline-arg .*{rule}"):
        check_arguments(_index(pipeline), _args(pipeline_arg={name: value}))


@pytest.mark.parametrize(
    ("pipeline", "given"),
    [
        ("WanPipeline", {"attention_kwargs": {"scale": 1}, "max_sequence_length": 226}),
        ("WanPipeline", {"attention_kwargs": None, "latents": torch.zeros(1)}),
        ("FluxPipeline", {"prompt_2": ["a", "b"], "negative_prompt_2": "c"}),
        ("LTXPipeline", {"decode_timestep": 1, "decode_noise_scale": [0, 0.5]}),
        ("SkyReelsV2DiffusionForcingPipeline", {"ar_step": 5, "overlap_history": 3}),
        ("StableDiffusionXLPipeline", {"original_size": [512, 512]}),
        ("HunyuanVideo15Pipeline", {}),
    ],
)
def test_values_that_the_signature_allows_are_taken(pipeline, given) -> None:
    check_arguments(_index(pipeline), _args(pipeline_arg=given))


def test_a_guider_in_the_index_accepts_guidance() -> None:
    index = _index("HunyuanVideo15Pipeline", guider=("diffusers", "ClassifierFreeGuidance"))
    check_arguments(index, _args(guidance_scale=2.0))
    assert torch.is_grad_enabled()  # checking touched no global state


TOKEN = {
    "wan": 16,
    "wan22": 16,
    "hunyuan_video": 16,
    "hunyuan_video_15": 16,
    "ltx": 32,
    "flux": 16,
    "flux2_klein": 16,
    "qwen_image": 16,
    "cogvideox": 16,
}


@pytest.fixture(params=list(TOKEN))
def loaded(request, tiny_pipeline):
    """A family's token in pixels, and its tiny pipeline."""
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline(request.param))
    return TOKEN[request.param], pipe


@pytest.mark.slow_cases("flux2_klein")
def test_a_size_below_one_token_is_refused_in_every_family(loaded) -> None:
    token, pipe = loaded
    assert token_size(pipe) == (token, token)
    for size in (1, 8, token - 1):
        for option in ("height", "width"):
            message = f"--{option} must be at least {token} for {type(pipe).__name__}, got {size}: "
            with pytest.raises(UsageError, match=message):
                check_sizes(pipe, _args(**{option: size}))


@pytest.mark.slow_cases("flux2_klein")
def test_one_token_is_enough_in_every_family(loaded) -> None:
    token, pipe = loaded
    check_sizes(pipe, _args(height=token, width=token, num_inference_steps=2))
    check_sizes(pipe, _args())


@pytest.mark.parametrize(
    ("patch_size", "attributes", "expected"),
    [
        (2, {"vae_scale_factor": 8}, (16, 16)),
        ([1, 2, 4], {"vae_scale_factor_spatial": 8}, (16, 32)),
        ((1, 1), {"vae_spatial_compression_ratio": 32}, (32, 32)),
        (None, {"vae_scale_factor": 8}, (8, 8)),
        (None, {}, (1, 1)),
        (2, {"vae_scale_factor": None}, (2, 2)),
        (
            1,
            {
                "vae_scale_factor": 8,
                "image_processor": SimpleNamespace(config=SimpleNamespace(vae_scale_factor=16)),
            },
            (16, 16),
        ),
    ],
)
def test_a_token_is_the_scale_times_the_patch(patch_size, attributes, expected) -> None:
    assert token_size(_pipe(attributes, patch_size=patch_size)) == expected


@pytest.mark.parametrize("size", [24, 40])
def test_a_pipeline_that_does_not_round_needs_whole_tokens(size: int, tiny_pipeline) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline("cogvideox"))
    lower = size // 16 * 16
    rule = f"--height must be a multiple of 16 for CogVideoXPipeline, got {size}: .*; try {lower} "
    with pytest.raises(UsageError, match=rule):
        check_sizes(pipe, _args(height=size))


@pytest.mark.parametrize(("size", "advice"), [(127, "112 or 128"), (120, "112 or 128"), (8, "16")])
def test_sizes_are_of_the_multiple_that_the_pipeline_asks_for(
    size: int, advice: str, tiny_pipeline
) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline("wan"))
    pipe.transformer.register_to_config(patch_size=(1, 1, 1))
    assert token_size(pipe) == (8, 8)
    why = f"got {size}: the pipeline asks for multiples of 16; try {advice}$"
    with pytest.raises(UsageError, match=f"--width must be .* 16 for WanPipeline, {why}"):
        check_sizes(pipe, _args(height=128, width=size))
    check_sizes(pipe, _args(height=128, width=112))


@pytest.mark.parametrize("family", ["ltx", "qwen_image"])
def test_one_step_is_refused_where_the_scheduler_stretches_to_an_end(
    family: str, tiny_pipeline
) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline(family))
    rule = "--num-inference-steps must be at least 2 for this .*, got 1: .* shift_terminal 0"
    with pytest.raises(UsageError, match=rule):
        check_sizes(pipe, _args(num_inference_steps=1))
    pipe.scheduler.register_to_config(shift_terminal=None)
    check_sizes(pipe, _args(num_inference_steps=1))


@pytest.mark.parametrize("pipeline", ["CogVideoXPipeline", "HunyuanVideo15Pipeline"])
def test_several_outputs_are_refused_where_the_pipeline_makes_one(pipeline: str) -> None:
    rule = f"--num-outputs must be 1 for {pipeline}, which .*, got 2; run the command again"
    with pytest.raises(UsageError, match=rule):
        check_outputs(_index(pipeline), _args(num_outputs=2))
    check_outputs(_index(pipeline), _args(num_outputs=1))
    check_outputs(_index("HunyuanVideoPipeline"), _args(num_outputs=2))


def _parts() -> PipelineIndex:
    part = ("diffusers", "WanTransformer3DModel")
    return _index("WanPipeline", transformer=part, vae=part, text_encoder_2=part)


@pytest.mark.parametrize("key", ["transfomer", "transfomer.cross"])
def test_a_backend_for_a_component_there_is_none_of_is_refused_before_loading(key: str) -> None:
    rule = (
        r"--component-attention-backends must name components of WanPipeline \(text_encoder_2, "
        rf"transformer, vae\), got '{key}', did you mean 'transformer'\?$"
    )
    with pytest.raises(ComponentAttentionBackendNotAppliedError, match=rule):
        check_components(_parts(), _args(component_attention_backends={key: "fa"}))


@pytest.mark.parametrize("key", ["transformer", "transformer.cross", "text_encoder", "vae"])
def test_components_may_be_named_without_their_number_and_with_a_role(key: str) -> None:
    args = _args(component_attention_backends={key: "fa"})
    assert check_components(_parts(), args) is None
    with pytest.raises(ComponentAttentionBackendNotAppliedError, match="must name components"):
        check_components(_index("FluxPipeline"), args)
