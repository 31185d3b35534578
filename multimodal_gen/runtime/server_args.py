"""What a run is asked for, checked and normalised once.

A setting is declared once, as a field of `ServerArgs`: its name is that of its flag, and with its
default stand its help and what it may be (`settings.py`). The command line makes its flags from
`SETTINGS`.

Importing this module imports neither torch nor diffusers.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from multimodal_gen.errors import ConfigError, MultimodalGenError, nearest, short
from multimodal_gen.runtime.backend_names import (
    check_exclusive,
    parse_attention_backend,
    parse_component_backends,
    parse_component_key,
)
from multimodal_gen.runtime.described_tokens import (
    describe_tokens,
    parse_latent_grid,
    parse_text_rows,
)
from multimodal_gen.runtime.guard_bounds import parse_guard_bounds
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum
from multimodal_gen.settings import Setting, as_flag, as_pairs, declared, frozen

QUANTIZATIONS = ("bnb-nf4", "bnb-int8", "torchao-int8", "torchao-fp8", "torchao-fp8-dynamic")
"""Ways to quantise the weights of a component while they are loaded; files in GGUF are another."""


_MOST_PIXELS = 16384**2
# Of a generation whose prompt is not known yet.
EXAMPLE_PROMPT = "A red fox runs through fresh snow at sunrise"
_COMPONENT = re.compile(r"(?P<component>[A-Za-z][\w-]*)=(?P<file>.+)", re.DOTALL)
_ranks = partial(Setting, loading=True, metavar="N", ge=1, le=65536)


def _prompt(setting: Setting, text: object) -> str:
    """Return a text that is Unicode, as tokenizers take it."""
    if not isinstance(text, str):
        raise setting.wrong("text", text)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"{setting.flag} must be Unicode text, got bytes that are not UTF-8: {short(text)}; "
            f"check the encoding of the terminal or script"
        )
    return text


def _configuration(setting: Setting, value: object) -> object:
    """Return a path, text or mapping that holds a configuration; None where it is empty."""
    if not isinstance(value, (str, Mapping)):
        raise setting.wrong("a path, a JSON object, k=v,k=v or a mapping", value)
    empty = not value.strip() if isinstance(value, str) else not value
    return None if empty else frozen(value)


def _overrides(setting: Setting, value: Any) -> object:
    return frozen(parse_component_backends(value, name=setting.flag))


def _pipeline_arguments(setting: Setting, value: object) -> object:
    """Return arguments by name; what they may be, the pipeline's signature says."""
    found = as_pairs(setting, value)
    for name in found:
        if not name.isidentifier():
            raise setting.wrong("pairs of an argument's name and its value", value)
    return frozen(found) if found else None


def _quantizations(setting: Setting, value: object) -> object:
    """Return what each component is quantised by: a name of `QUANTIZATIONS`, or a GGUF file."""
    found: dict[str, object] = {}
    for key, method in as_pairs(setting, value).items():
        component = parse_component_key(key, name=setting.flag, roles=False)
        text = str(method).strip() if isinstance(method, (str, Path)) else ""
        name = text.lower().replace("_", "-")
        if name not in QUANTIZATIONS and not name.endswith(".gguf"):
            raise ConfigError(
                f"{setting.flag} must give {component} one of {', '.join(QUANTIZATIONS)} or a "
                f".gguf file, got {short(method)}{nearest(name, QUANTIZATIONS)}"
            )
        found[component] = text if name.endswith(".gguf") else name
    return frozen(found) if found else None


def _weights(setting: Setting, value: object) -> object:
    """Return the file of each component's weights; the first transformer's without a name."""
    if isinstance(value, Mapping):
        pairs = [*value.items()]
    else:
        texts = value if isinstance(value, (list, tuple)) else (value,)
        named = ((_COMPONENT.fullmatch(str(text)), text) for text in texts)
        pairs = [(m["component"], m["file"]) if m else ("transformer", text) for m, text in named]
    found: dict[str, object] = {}
    for key, file in pairs:
        component = parse_component_key(key, name=setting.flag, roles=False)
        if not isinstance(file, (str, Path)) or not str(file).strip():
            raise setting.wrong("a file, or COMPONENT=FILE", file)
        if component in found:
            raise ConfigError(f"{setting.flag} must give {component} once, got it twice")
        found[component] = str(file)
    return frozen(found) if found else None


def _sigmas(setting: Setting, value: object) -> object:
    """Return the noise levels, the highest first."""
    listed = value.split(",") if isinstance(value, str) else value
    try:
        found = tuple(float(item) for item in listed)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = ()
    falling = all(a > b for a, b in pairwise(found))
    if not found or not falling or not all(0 <= sigma <= 1000 for sigma in found):
        raise setting.wrong("falling numbers from 0 to 1000 such as 1.0,0.75,0.5,0.25", value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The arguments of one run; hashable, because mappings are copied and frozen.

    Every field is described where it is declared. In Python, `attention_backend_config` and
    `attention_config` may be mappings, and `component_attention_backends` a mapping of
    `component` or `component.role` to backends, None for an automatic choice.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
    """

    model_path: Annotated[
        str,
        Setting(
            loading=True,
            metavar="FOLDER_OR_ID",
            empty=False,
            help="Diffusers pipeline: a folder with model_index.json, or a Hugging Face Hub id.",
        ),
    ]
    pipeline_class_name: Annotated[
        str | None,
        Setting(
            metavar="CLASS",
            empty=False,
            loading=True,
            help="Pipeline of diffusers to load the model with, e.g. FluxImg2ImgPipeline. Default: "
            "the one that model_index.json names.",
        ),
    ] = None
    prompt: Annotated[
        str | None, Setting(metavar="TEXT", check=_prompt, help="What to generate.")
    ] = None
    negative_prompt: Annotated[
        str | None, Setting(metavar="TEXT", check=_prompt, help="What to keep out. Default: none.")
    ] = None
    image_path: Annotated[
        Sequence[Path | str] | Path | str | None,
        Setting(
            metavar="FILE",
            many=True,
            help="Image to start from, for pipelines that take one; repeated, for those that take "
            "several.",
        ),
    ] = None
    last_image_path: Annotated[
        Path | str | None,
        Setting(metavar="FILE", help="Image that a video is to end with."),
    ] = None
    video_path: Annotated[
        Path | str | None,
        Setting(metavar="FILE", help="Video to start from, or to be led by."),
    ] = None
    mask_path: Annotated[
        Path | str | None,
        Setting(metavar="FILE", help="Image or video whose white pixels are made anew."),
    ] = None
    pipeline_arg: Annotated[
        Mapping[str, object] | Sequence[str] | str | None,
        Setting(
            metavar="NAME=JSON",
            many=True,
            check=_pipeline_arguments,
            help="Any other argument of the pipeline, e.g. strength=0.6; name=@FILE gives an image "
            "or a video. May be given repeatedly.",
        ),
    ] = None
    backend: Annotated[
        str,
        Setting(
            choices=("auto", "sglang", "diffusers"),
            help="sglang: this package's attention layers. diffusers: diffusers' own, chosen by "
            "its set_attention_backend. auto: sglang, unless --attention-backend is a name "
            "that only diffusers has.",
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackendEnum | str | None,
        Setting(
            metavar="NAME",
            check=lambda setting, value: value,  # what it may be depends on --backend
            help="Attention backend of every layer; `sglang attention list` names them, and "
            "`sglang attention describe NAME` their parameters. With "
            "--backend diffusers, a name of diffusers such as native or _native_cudnn. "
            "Default: the best one for each layer.",
        ),
    ] = None
    attention_backend_config: Annotated[
        str | Mapping[str, object] | None,
        Setting(
            metavar="CONFIG",
            check=_configuration,
            help="Parameters of --attention-backend: a JSON or YAML file, a JSON object, or "
            "k=v,k=v; `sglang attention describe NAME` lists them. Default: the backend's own.",
        ),
    ] = None
    component_attention_backends: Annotated[
        Mapping[str, AttentionBackendEnum | str | None] | str | None,
        Setting(
            metavar="OVERRIDES",
            check=_overrides,
            help="Backends of single components or roles, e.g. "
            "text_encoder=torch_sdpa,transformer.cross=fa, or a JSON object; also "
            "--component-attention-backends.text-encoder torch_sdpa. Stronger than "
            "--attention-backend.",
        ),
    ] = None
    attention_config: Annotated[
        str | Mapping[str, object] | None,
        Setting(
            metavar="CONFIG",
            short="-ac",
            check=_configuration,
            help="Rules over component, role, layers and steps: a file, a JSON object, or dotted "
            "flags such as -ac.backend fa. Excludes --attention-backend.",
        ),
    ] = None
    attention_auto_table: Annotated[
        Path | str | None,
        Setting(
            metavar="FILE",
            help="What automatic choices go by: a table that `sglang attention bench --save` wrote "
            "on this machine. Default: the one that comes with the package, where it has one.",
        ),
    ] = None
    cache: Annotated[
        str | None,
        Setting(
            metavar="NAME:K=V",
            empty=False,
            help="Step cache, e.g. first_block:threshold=0.1: diffusers' first_block, mag, "
            "taylorseer, pyramid, faster, sea or text_kv, with the fields of its configuration, or "
            "cross_attention, which is exact: keys and values of the text are computed once. One "
            "at a time. Default: none.",
        ),
    ] = None
    latent_grid: Annotated[
        Sequence[int] | str | None,
        Setting(
            metavar="TxHxW",
            check=lambda setting, value: parse_latent_grid(value, name=setting.flag),
            help="For a model that this package has no adapter for: frames, rows and columns of "
            "its latent after patching, which sparse backends need, e.g. 21x45x80.",
        ),
    ] = None
    text_rows: Annotated[
        Sequence[int] | str | None,
        Setting(
            metavar="START-STOP",
            check=lambda setting, value: parse_text_rows(value, name=setting.flag),
            help="With --latent-grid: where text lies among the video's tokens, as the first row "
            "and the row after the last, e.g. 0-226. Default: the text is not among them.",
        ),
    ] = None
    strict_attention: Annotated[
        bool,
        Setting(help="Refuse instead of falling back when a named backend cannot serve a layer."),
    ] = False
    num_gpus: Annotated[
        int | None,
        _ranks(
            help="GPUs that share the work; starts a process for each on this host. Default: what "
            "the degrees multiply to. Under torchrun: the ranks it started."
        ),
    ] = None
    sp_degree: Annotated[
        int | None,
        _ranks(
            help="GPUs that share one sequence: Ulysses times ring. Default: --num-gpus, or half "
            "of them with --cfg-parallel."
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None,
        _ranks(help="GPUs the heads are split over. Default: as many as share a sequence and fit."),
    ] = None
    ring_degree: Annotated[
        int | None,
        _ranks(help="GPUs in a ring over keys. Default: what the Ulysses degree leaves."),
    ] = None
    cfg_parallel: Annotated[
        bool,
        Setting(
            loading=True, help="Run the two branches of classifier-free guidance on different GPUs."
        ),
    ] = False
    rank_timeout: Annotated[
        int,
        Setting(
            loading=True,
            metavar="SECONDS",
            ge=1,
            le=1_000_000,  # exchanges count waits in milliseconds
            help="How long GPUs wait for each other before the run fails.",
        ),
    ] = 300
    # The largest sizes and scales are beyond all use: past them memory runs out while the noise is
    # drawn or the files are named, or floats overflow.
    height: Annotated[
        int | None,
        Setting(metavar="N", ge=1, le=65536, help="Height in pixels. Default: the pipeline's."),
    ] = None
    width: Annotated[
        int | None,
        Setting(metavar="N", ge=1, le=65536, help="Width in pixels. Default: the pipeline's."),
    ] = None
    num_frames: Annotated[
        int | None,
        Setting(metavar="N", ge=1, le=65536, help="Frames of a video. Default: the pipeline's."),
    ] = None
    num_inference_steps: Annotated[
        int | None,
        Setting(metavar="N", ge=1, le=10_000, help="Denoising steps. Default: the pipeline's."),
    ] = None
    sigmas: Annotated[
        Sequence[float] | str | None,
        Setting(
            metavar="X,X,...",
            check=_sigmas,
            help="Noise levels of the steps, one each, before the scheduler's shift. Default: the "
            "scheduler's.",
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        Setting(
            metavar="X",
            ge=0,
            le=10**6,
            help="Guidance of the kind the model has: distilled where the transformer embeds it, "
            "else classifier-free (true_cfg_scale of Qwen-Image, the guider of "
            "HunyuanVideo-1.5). Default: the pipeline's.",
        ),
    ] = None
    true_cfg_scale: Annotated[
        float | None,
        Setting(
            metavar="X",
            ge=0,
            le=10**6,
            help="Classifier-free guidance of pipelines that have distilled guidance too, such as "
            "Flux and HunyuanVideo. Default: the pipeline's.",
        ),
    ] = None
    num_outputs: Annotated[
        int, Setting(metavar="N", ge=1, le=1000, help="Images or videos per prompt.")
    ] = 1
    seed: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=0,
            le=2**63 - 1,  # generators of torch take seeds of 63 bits on every device
            help="Seed of the noise, drawn on the CPU. Default: a random one, which is printed and"
            " recorded.",
        ),
    ] = None
    fps: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=1,
            le=240,
            help="Frames per second of the video, told to pipelines that ask for it. Default: the "
            "rate the model was made for.",
        ),
    ] = None
    output_path: Annotated[
        Path | str,
        Setting(
            metavar="FILE_OR_FOLDER",
            help="A .mp4 or .png file, which must not exist yet, or a folder, where a new name is "
            "made from the model and the seed. Several outputs are numbered.",
        ),
    ] = Path("outputs")
    overwrite: Annotated[bool, Setting(help="Replace the files at --output-path.")] = False
    stream: Annotated[
        bool,
        Setting(
            help="Write the frames of each chunk as it finishes, to an MP4 that plays while it "
            "grows; for pipelines that make a video chunk by chunk. Ctrl-C ends the video with "
            "what is done."
        ),
    ] = False
    prompts_file: Annotated[
        Path | str | None,
        Setting(
            metavar="FILE",
            help="With --stream: prompts that take over later, one per line, each with its start "
            "in seconds first, e.g. `4.5 the fox jumps`.",
        ),
    ] = None
    save_latents: Annotated[
        bool,
        Setting(
            help="Also write the last latents, as the pipeline holds them, to a .safetensors file "
            "next to the output."
        ),
    ] = False
    record_attention: Annotated[
        Path | str | None,
        Setting(
            metavar="FILE",
            help="Also write what the attention layers ran to a JSON file of its own, which must "
            "not exist yet without --overwrite.",
        ),
    ] = None
    check_attention: Annotated[
        int,
        Setting(
            metavar="N",
            ge=0,
            le=1000,
            help="Recompute 64 rows of N self-attention calls of every denoising step exactly; the "
            "layers take turns. Adds the errors of each layer to --record-attention. Of S "
            "tokens, a call takes 64 / S of the products of dense attention, in fp64.",
        ),
    ] = 0
    attention_guard: Annotated[
        Mapping[str, object] | float | str | None,
        Setting(
            metavar="BOUND",
            check=lambda setting, value: _guard_bounds(value, setting.flag),
            help="Compare 64 rows of one in 17 calls of each self-attention layer with exact "
            "attention: layers whose relative error is above the bound, e.g. 0.05, run in 16 bits "
            "from their next call on. The bound is that of backends that round to 8 bits; "
            "quantized=0.05,sparse=0.3 gives sparse methods one too, which have none else, and "
            "then run dense. Outputs that are not finite are computed again at once. Default: no "
            "guard.",
        ),
    ] = None
    cuda_graph: Annotated[
        bool,
        Setting(
            help="Keep calls of the denoisers as CUDA graphs: the second of a kind is captured, "
            "later ones are replayed, without the host's work. For images and short videos, where "
            "the GPU waits for the host. Refused where a graph could not repeat a call."
        ),
    ] = False
    dtype: Annotated[
        str,
        Setting(
            loading=True,
            choices=("auto", "float32", "float16", "bfloat16"),
            help="Dtype of the weights. auto: bfloat16 on accelerators that have it, else float16 "
            "there, float32 on the CPU.",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        Setting(
            loading=True,
            metavar="DEVICE",
            empty=False,
            help="Torch device, e.g. cuda:1 or cpu. Default: this machine's accelerator.",
        ),
    ] = None
    offload: Annotated[
        str,
        Setting(
            choices=("none", "model", "block", "leaf", "sequential"),
            loading=True,
            help="Keep weights in CPU memory while they do not run: model by model; block by block "
            "or layer by layer, the next ones on their way while one runs; sequential: layer by "
            "layer and one after the other (least memory, slowest).",
        ),
    ] = "none"
    offload_folder: Annotated[
        Path | str | None,
        Setting(
            metavar="FOLDER",
            loading=True,
            help="With --offload block or leaf: keep the weights in files there instead of CPU "
            "memory.",
        ),
    ] = None
    quantize: Annotated[
        Mapping[str, str] | Sequence[str] | str | None,
        Setting(
            metavar="COMPONENT=HOW",
            many=True,
            loading=True,
            check=_quantizations,
            help="Quantise the weights of a component while they are loaded: bnb-nf4, bnb-int8, "
            "torchao-int8 or torchao-fp8 (weights only), torchao-fp8-dynamic (activations too); or "
            "load them from a .gguf file. May be given repeatedly.",
        ),
    ] = None
    transformer_weights_path: Annotated[
        Mapping[str, Path | str] | Sequence[Path | str] | Path | str | None,
        Setting(
            metavar="[COMPONENT=]FILE",
            many=True,
            loading=True,
            check=_weights,
            help="Load the weights of the transformer, or of another component, from this file, or "
            "folder of files, in safetensors or of torch.save: those of a trained or distilled "
            "model. May be given repeatedly.",
        ),
    ] = None
    lora_path: Annotated[
        Sequence[str] | str | None,
        Setting(
            metavar="FILE[:SCALE][@COMPONENT]",
            many=True,
            loading=True,
            empty=False,
            help="LoRA to add: a file or a Hugging Face Hub id, and its scale, 1 by default. Of a "
            "model with two experts the first gets it, or the one named, e.g. @transformer_2, or "
            "@both. May be given repeatedly.",
        ),
    ] = None
    scheduler: Annotated[
        str | None,
        Setting(
            metavar="NAME",
            empty=False,
            loading=True,
            help="Scheduler of diffusers to use instead of the model's, with its settings: e.g. "
            "UniPCMultistep or FlowMatchEulerDiscrete.",
        ),
    ] = None
    vae_tiling: Annotated[
        bool, Setting(loading=True, help="Decode in tiles: less memory, slower.")
    ] = False
    enable_torch_compile: Annotated[
        bool,
        Setting(
            loading=True,
            help="Compile the repeated blocks of every denoiser; the record has the time it took.",
        ),
    ] = False

    compiled_kernels: Annotated[
        Path | str | None,
        Setting(
            metavar="FOLDER",
            loading=True,
            help="Take compiled kernels from this folder, which `sglang attention warm --output` "
            "made on a GPU of the same compute capability, with the same releases.",
        ),
    ] = None

    compile_ahead: Annotated[
        bool,
        Setting(
            loading=True,
            help="Compile the kernels of the first generation in other processes while the weights "
            "load and the text is encoded. On one NVIDIA GPU.",
        ),
    ] = False

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            self._set(name, setting.normalised(getattr(self, name)))
        if self.component_attention_backends is None:
            self._set("component_attention_backends", frozen({}))
        if self.backend == "diffusers":
            self._keep_diffusers_name()
        else:
            self._parse_our_name()
        check_exclusive(
            self.attention_backend, self.attention_backend_config, self.attention_config
        )
        if (self.latent_grid, self.text_rows) != (None, None):
            describe_tokens(self.latent_grid, self.text_rows, spell=as_flag)
        if self.offload_folder is not None and self.offload not in ("block", "leaf"):
            raise ConfigError(
                f"--offload-folder needs --offload block or leaf, got --offload {self.offload}"
            )
        self._check_sizes()
        if self.cache is not None and self.enable_torch_compile:
            raise ConfigError(
                f"--cache must not be given with --enable-torch-compile, which compiles blocks as "
                f"one graph, without room for what a cache decides, got {short(self.cache)}; "
                f"leave one out"
            )
        if self.prompts_file is not None and not self.stream:
            raise ConfigError(
                f"--prompts-file needs --stream, got {str(self.prompts_file)!r} alone; add it"
            )
        self._check_stream()
        self._check_graphs()
        if self.check_attention and self.record_attention is None:
            raise ConfigError(
                f"--check-attention needs --record-attention, the file for what it finds, got "
                f"--check-attention {self.check_attention} alone; add it"
            )

    def _check_sizes(self) -> None:
        if (self.height or 1) * (self.width or 1) > _MOST_PIXELS:
            raise ConfigError(
                f"--height times --width must be at most {_MOST_PIXELS}, which is 16384 by 16384, "
                f"got {self.height} by {self.width}"
            )
        if self.sigmas is not None and self.num_inference_steps not in (None, len(self.sigmas)):
            raise ConfigError(
                f"--sigmas must have as many numbers as --num-inference-steps "
                f"{self.num_inference_steps}, got {len(self.sigmas)}; leave one of them out"
            )

    def _check_graphs(self) -> None:
        """Refuse what decides or looks in every call, which a replay of one would leave out."""
        for name in ("cache", "attention_guard", "check_attention", "stream"):
            value = getattr(self, name)
            if self.cuda_graph and value:
                raise ConfigError(
                    f"{as_flag(name)} must not be given with --cuda-graph, which repeats one call "
                    f"as it was, got {short(value)}; leave one out"
                )
        if self.cuda_graph and self.offload != "none":
            raise ConfigError(
                f"--offload must be none with --cuda-graph, whose weights must stay where they "
                f"are, got {self.offload}; leave one out"
            )

    def _check_stream(self) -> None:
        """Refuse what a video that is written while it is made cannot be."""
        shared = ("num_gpus", "sp_degree", "ulysses_degree", "ring_degree", "cfg_parallel")
        for name in ("num_outputs", *shared):
            value = getattr(self, name)
            if self.stream and value not in (None, 1, False):
                raise ConfigError(
                    f"{as_flag(name)} must be {'left out' if value is True else 1} with --stream, "
                    f"which writes one video from one GPU, got {value}"
                )

    def _parse_our_name(self) -> None:
        try:
            self._set("attention_backend", parse_attention_backend(self.attention_backend))
        except ConfigError as error:
            raise ConfigError(
                f"{error}; names of diffusers' own backends need `sglang generate --backend "
                f"diffusers`"
            ) from None

    def _keep_diffusers_name(self) -> None:
        ours = (
            "attention_backend_config",
            "component_attention_backends",
            "attention_config",
            "attention_auto_table",
            "attention_guard",
            "cuda_graph",
            "compile_ahead",
            "latent_grid",
        )
        for name in ours:
            if getattr(self, name):
                raise ConfigError(
                    f"{as_flag(name)} must not be given with --backend diffusers, whose attention "
                    f"backends take no configuration; remove it, or use --backend sglang"
                )
        value = self.attention_backend
        if value is None:
            return
        if not isinstance(value, (str, AttentionBackendEnum)) or not str(value).strip():
            raise SETTINGS["attention_backend"].wrong(
                "the name of a diffusers attention backend", value
            )
        self._set("attention_backend", str(value).strip())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _guard_bounds(value: object, flag: str) -> str | None:
    bounds = parse_guard_bounds(value, name=flag)
    return None if bounds is None else str(bounds)


def _settings() -> Mapping[str, Setting]:
    hints = get_type_hints(ServerArgs, include_extras=True)
    fields = dataclasses.fields(ServerArgs)
    return {each.name: declared(each.name, hints[each.name], each.default) for each in fields}


SETTINGS: Mapping[str, Setting] = MappingProxyType(_settings())
"""The settings of `ServerArgs` by name, in order."""

LOADING_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.loading)
"""Those that a loaded model keeps for any number of generations."""

CALL_SETTINGS = (
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
)
"""Those that a pipeline is called with and that change its latents, as prompt and seed do."""

# Commands to type and what somebody gave stay as they are.
_FLAG = re.compile(r"`[^`]*`|'[^']*'|--(?P<name>[a-z][a-z-]*)")


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let errors name the arguments of Python where they name the flags that are called so."""

    def argument(found: re.Match[str]) -> str:
        name = (found["name"] or "").replace("-", "_")
        return name if name in SETTINGS else found[0]

    try:
        yield
    except MultimodalGenError as error:
        error.args = (_FLAG.sub(argument, str(error)), *error.args[1:])
        raise
