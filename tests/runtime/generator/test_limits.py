from types import SimpleNamespace

import diffusers
import pytest
from diffusers import DiffusionPipeline

from multimodal_gen.errors import ComponentAttentionBackendNotAppliedError, UsageError
from multimodal_gen.runtime.generator.load import PipelineIndex
from multimodal_gen.runtime.generator.sampling import (
    check_components,
    check_loaded,
    check_outputs,
    token_size,
)
from multimodal_gen.runtime.server_args import ServerArgs

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


def _index(name: str) -> PipelineIndex:
    return PipelineIndex(model_path="m", pipeline_class=getattr(diffusers, name), components={})


def _args(**values) -> ServerArgs:
    return ServerArgs(model_path="m", **{"prompt": "a fox", "seed": 0, **values})


class _Model:
    def __init__(self, patch_size) -> None:
        self.config = SimpleNamespace(patch_size=patch_size)

    def set_attention_backend(self, name: str) -> None: ...


def _pipe(patch_size, **attributes) -> SimpleNamespace:
    scheduler = SimpleNamespace(config=SimpleNamespace(shift_terminal=None))
    return SimpleNamespace(
        components={"transformer": _Model(patch_size)}, scheduler=scheduler, **attributes
    )


@pytest.fixture(params=list(TOKEN))
def loaded(request, tiny_pipeline):
    """A family's token in pixels, and its tiny pipeline."""
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline(request.param))
    return TOKEN[request.param], pipe


def test_a_size_below_one_token_is_refused_in_every_family(loaded) -> None:
    token, pipe = loaded
    assert token_size(pipe) == (token, token)
    for size in (1, 8, token - 1):
        for option in ("height", "width"):
            message = f"--{option} must be at least {token} for {type(pipe).__name__}, got {size}: "
            with pytest.raises(UsageError, match=message):
                check_loaded(pipe, _args(**{option: size}))


def test_one_token_is_enough_in_every_family(loaded) -> None:
    token, pipe = loaded
    check_loaded(pipe, _args(height=token, width=token, num_inference_steps=2))
    check_loaded(pipe, _args())


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
    assert token_size(_pipe(patch_size, **attributes)) == expected


@pytest.mark.parametrize("size", [24, 40])
def test_a_pipeline_that_does_not_round_needs_whole_tokens(size: int, tiny_pipeline) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline("cogvideox"))
    lower = size // 16 * 16
    rule = f"--height must be a multiple of 16 for CogVideoXPipeline, got {size}: .*; try {lower} "
    with pytest.raises(UsageError, match=rule):
        check_loaded(pipe, _args(height=size))


@pytest.mark.parametrize("family", ["ltx", "qwen_image"])
def test_one_step_is_refused_where_the_scheduler_stretches_to_an_end(
    family: str, tiny_pipeline
) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_pipeline(family))
    rule = "--num-inference-steps must be at least 2 for this .*, got 1: .* shift_terminal 0"
    with pytest.raises(UsageError, match=rule):
        check_loaded(pipe, _args(num_inference_steps=1))
    pipe.scheduler.register_to_config(shift_terminal=None)
    check_loaded(pipe, _args(num_inference_steps=1))


@pytest.mark.parametrize("pipeline", ["CogVideoXPipeline", "HunyuanVideo15Pipeline"])
def test_several_outputs_are_refused_where_the_pipeline_makes_one(pipeline: str) -> None:
    rule = f"--num-outputs must be 1 for {pipeline}, which .*, got 2; run the command again"
    with pytest.raises(UsageError, match=rule):
        check_outputs(_index(pipeline), _args(num_outputs=2))
    check_outputs(_index(pipeline), _args(num_outputs=1))
    check_outputs(_index("HunyuanVideoPipeline"), _args(num_outputs=2))


def _parts() -> PipelineIndex:
    library = ("diffusers", "WanTransformer3DModel")
    return PipelineIndex(
        model_path="m",
        pipeline_class=diffusers.WanPipeline,
        components={"transformer": library, "vae": library, "text_encoder_2": library},
    )


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
