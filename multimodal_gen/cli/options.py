"""The options of the commands: one dataclass field declares a flag, its type, default and help."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

__all__ = [
    "AttentionOptions",
    "BackendChoice",
    "DtypeChoice",
    "ExplainOptions",
    "GenerateOptions",
    "ListOptions",
    "OffloadChoice",
    "RoleChoice",
    "takes",
]

OptionsT = TypeVar("OptionsT")


class BackendChoice(str, Enum):
    """What runs the pipeline's attention."""

    AUTO = "auto"
    SGLANG = "sglang"
    DIFFUSERS = "diffusers"


class DtypeChoice(str, Enum):
    """Dtype of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class OffloadChoice(str, Enum):
    """What stays in CPU memory while it does not run."""

    NONE = "none"
    MODEL = "model"
    SEQUENTIAL = "sequential"


class RoleChoice(str, Enum):
    """What a layer attends to."""

    SELF = "self"
    CROSS = "cross"
    ENCODER = "encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What `sglang generate` and `sglang attention explain` share."""

    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            metavar="FOLDER_OR_ID",
            help="Diffusers pipeline: a folder with model_index.json, or a Hugging Face Hub id.",
        ),
    ]
    attention_backend: Annotated[
        str | None,
        typer.Option(
            "--attention-backend",
            metavar="NAME",
            help="Attention backend of every layer; `sglang attention list` names them. With "
            "--backend diffusers, a name of diffusers such as native or _native_cudnn. "
            "Default: the best one for each layer.",
        ),
    ] = None
    attention_backend_config: Annotated[
        str | None,
        typer.Option(
            "--attention-backend-config",
            metavar="CONFIG",
            help="Parameters of --attention-backend: a JSON or YAML file, a JSON object, or "
            "k=v,k=v. Default: the backend's own.",
        ),
    ] = None
    component_attention_backends: Annotated[
        str | None,
        typer.Option(
            "--component-attention-backends",
            metavar="OVERRIDES",
            help="Backends of single components or roles, e.g. "
            "text_encoder=torch_sdpa,transformer.cross=fa, or a JSON object; also "
            "--component-attention-backends.text-encoder torch_sdpa. Stronger than "
            "--attention-backend.",
        ),
    ] = None
    attention_config: Annotated[
        str | None,
        typer.Option(
            "--attention-config",
            "-ac",
            metavar="CONFIG",
            help="Rules over component, role, layers and steps: a file, a JSON object, or dotted "
            "flags such as -ac.backend fa. Excludes --attention-backend.",
        ),
    ] = None
    strict_attention: Annotated[
        bool,
        typer.Option(
            "--strict-attention",
            help="Refuse instead of falling back when a named backend cannot serve a layer.",
        ),
    ] = False
    dtype: Annotated[
        DtypeChoice,
        typer.Option(
            "--dtype",
            help="Dtype of the weights. auto: bfloat16 on accelerators that have it, else float16 "
            "there, float32 on the CPU.",
        ),
    ] = DtypeChoice.AUTO
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Torch device, e.g. cuda:1 or cpu. Default: this machine's accelerator.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(AttentionOptions):
    """What `sglang generate` takes."""

    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to generate.")]
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative-prompt", metavar="TEXT", help="What to keep out. Default: none."),
    ] = None
    backend: Annotated[
        BackendChoice,
        typer.Option(
            "--backend",
            help="sglang: this package's attention layers. diffusers: diffusers' own, chosen by "
            "its set_attention_backend. auto: sglang, unless --attention-backend is a name that "
            "only diffusers has.",
        ),
    ] = BackendChoice.AUTO
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus",
            metavar="N",
            min=1,
            help="GPUs that share the work; starts a process for each on this host. Default: what "
            "the degrees multiply to. Under torchrun: the ranks it started.",
        ),
    ] = None
    sp_degree: Annotated[
        int | None,
        typer.Option(
            "--sp-degree",
            metavar="N",
            min=1,
            help="GPUs that share one sequence: Ulysses times ring. Default: --num-gpus, or half "
            "of them with --cfg-parallel.",
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None,
        typer.Option(
            "--ulysses-degree",
            metavar="N",
            min=1,
            help="GPUs the heads are split over. Default: as many as share a sequence and fit.",
        ),
    ] = None
    ring_degree: Annotated[
        int | None,
        typer.Option(
            "--ring-degree",
            metavar="N",
            min=1,
            help="GPUs in a ring over keys. Default: what the Ulysses degree leaves.",
        ),
    ] = None
    cfg_parallel: Annotated[
        bool,
        typer.Option(
            "--cfg-parallel",
            help="Run the two branches of classifier-free guidance on different GPUs.",
        ),
    ] = False
    rank_timeout: Annotated[
        int,
        typer.Option(
            "--rank-timeout",
            metavar="SECONDS",
            min=1,
            max=1_000_000,
            help="How long GPUs wait for each other before the run fails.",
        ),
    ] = 300
    height: Annotated[
        int | None,
        typer.Option(
            "--height", metavar="N", min=1, help="Height in pixels. Default: the pipeline's."
        ),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(
            "--width", metavar="N", min=1, help="Width in pixels. Default: the pipeline's."
        ),
    ] = None
    num_frames: Annotated[
        int | None,
        typer.Option(
            "--num-frames", metavar="N", min=1, help="Frames of a video. Default: the pipeline's."
        ),
    ] = None
    num_inference_steps: Annotated[
        int | None,
        typer.Option(
            "--num-inference-steps",
            metavar="N",
            min=1,
            help="Denoising steps. Default: the pipeline's.",
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            "--guidance-scale",
            metavar="X",
            min=0.0,
            help="Guidance of the kind the model has: distilled where the transformer embeds it, "
            "else classifier-free (true_cfg_scale of Qwen-Image, the guider of "
            "HunyuanVideo-1.5). Default: the pipeline's.",
        ),
    ] = None
    true_cfg_scale: Annotated[
        float | None,
        typer.Option(
            "--true-cfg-scale",
            metavar="X",
            min=0.0,
            help="Classifier-free guidance of pipelines that have distilled guidance too, such as "
            "Flux and HunyuanVideo. Default: the pipeline's.",
        ),
    ] = None
    num_outputs: Annotated[
        int, typer.Option("--num-outputs", metavar="N", min=1, help="Images or videos per prompt.")
    ] = 1
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            max=2**63 - 1,
            help="Seed of the noise, drawn on the CPU. Default: a random one, which is printed "
            "and recorded.",
        ),
    ] = None
    fps: Annotated[
        int | None,
        typer.Option(
            "--fps",
            metavar="N",
            min=1,
            max=240,
            help="Frames per second of the video, told to pipelines that ask for it. Default: "
            "the rate the model was made for.",
        ),
    ] = None
    output_path: Annotated[
        Path,
        typer.Option(
            "--output-path",
            metavar="FILE_OR_FOLDER",
            help="A .mp4 or .png file, which must not exist yet, or a folder, where a new name is "
            "made from the model and the seed. Several outputs are numbered.",
        ),
    ] = Path("outputs")
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files at --output-path.")
    ] = False
    save_latents: Annotated[
        bool,
        typer.Option(
            "--save-latents",
            help="Also write the last latents, as the pipeline holds them, to a .safetensors "
            "file beside the output.",
        ),
    ] = False
    offload: Annotated[
        OffloadChoice,
        typer.Option(
            "--offload",
            help="Keep weights in CPU memory while they do not run: model by model, or layer by "
            "layer (least memory, slowest).",
        ),
    ] = OffloadChoice.NONE
    vae_tiling: Annotated[
        bool,
        typer.Option("--vae-tiling", help="Decode in tiles: less memory, slower."),
    ] = False
    enable_torch_compile: Annotated[
        bool,
        typer.Option(
            "--enable-torch-compile", help="Compile the repeated blocks of every denoiser."
        ),
    ] = False


_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(AttentionOptions):
    """What `sglang attention explain` takes."""

    as_json: _AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """What `sglang attention list` takes: a layer to serve."""

    head_size: Annotated[
        int, typer.Option("--head-size", metavar="N", min=1, help="Channels per head of the layer.")
    ] = 128
    heads: Annotated[
        int, typer.Option("--heads", metavar="N", min=1, help="Heads of the layer.")
    ] = 24
    dtype: Annotated[
        DtypeChoice,
        typer.Option("--dtype", help="Dtype of the layer. auto: as in `sglang generate`."),
    ] = DtypeChoice.AUTO
    role: Annotated[RoleChoice, typer.Option("--role", help="What the layer attends to.")] = (
        RoleChoice.SELF
    )
    as_json: _AsJson = False


def takes(
    options: type[OptionsT],
) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Make a function of one options object the command whose flags are the object's fields.

    Args:
        options: dataclass whose annotations are `Annotated[type, typer.Option(...)]`.
    """

    def decorate(run: Callable[[OptionsT], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(options(**values))

        signature = inspect.signature(options)
        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        # Typer reads these two; the parameters of a dataclass are its fields.
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {
            name: parameter.annotation for name, parameter in signature.parameters.items()
        }
        return command

    return decorate
