"""What a run is asked for, checked and normalised once.

A setting is declared once, as a field of `ServerArgs`: its name is that of its flag, and beside its
default stand its help and what it may be. The command line makes its flags from `SETTINGS`.

Importing this module imports neither torch nor diffusers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.plain_values import MalformedError, frozen, read_json, read_pairs
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

__all__ = [
    "CALL_SETTINGS",
    "ROLES",
    "SETTINGS",
    "ServerArgs",
    "Setting",
    "as_flag",
    "check_exclusive",
    "component_mapping",
    "parse_attention_backend",
    "parse_component_backends",
    "parse_component_key",
]

ROLES = ("self", "cross", "encoder")
"""What a layer attends to, as it is written in keys and flags."""

_PLUGIN_GROUP = "multimodal_gen.attention_backends"
_KINDS = (bool, int, float, Path, str)

_ComponentBackends = dict[str, AttentionBackendEnum | None]
_Check: TypeAlias = Callable[["Setting", Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: what it is called, what it may be, and what help says of it.

    Attributes:
        help: what it means, with unit and default.
        name: that of its field; the flag is `--name` with dashes.
        kind: type of its values as text on the command line spells them: bool, int, float, `Path`
            or str. That of the field.
        default: that of the field; `MISSING` where a value must be given. None is accepted only
            where it is the default, which then means "the pipeline's own" or "automatic".
        metavar: what stands for the value in help; None for switches and choices.
        short: a second, shorter flag, or "".
        choices: the texts that are valid, in lower case; empty where others are.
        ge: smallest number allowed, or None.
        le: largest number allowed, or None.
        empty: whether text may be empty.
        check: returns the normalised value or raises `ConfigError`; None for what the other
            attributes say.
    """

    help: str
    name: str = ""
    kind: type = str
    default: Any = dataclasses.field(default_factory=lambda: MISSING)
    metavar: str | None = None
    short: str = ""
    choices: tuple[str, ...] = ()
    ge: float | None = None
    le: float | None = None
    empty: bool = True
    check: _Check | None = None

    @property
    def flag(self) -> str:
        """The flag."""
        return as_flag(self.name)

    def normalised(self, value: object) -> object:
        """Return `value` as the field holds it.

        Raises:
            ConfigError: it has the wrong type, or is out of range.
        """
        if self.check is not None:
            return self.check(self, value)
        if value is None and self.default is None:
            return None
        return _CHECKS[self.kind](self, value)

    def wrong(self, expected: str, value: object) -> ConfigError:
        """Return the error for a value that is not what was expected."""
        return ConfigError(f"{self.flag} must be {expected}, got {value!r}")


def as_flag(setting: str) -> str:
    """Return the flag of a setting: `--attention-config` for `attention_config`."""
    return "--" + setting.replace("_", "-")


def _switch(setting: Setting, value: object) -> bool:
    if not isinstance(value, bool):
        raise setting.wrong("true or false", value)
    return value


def _integer(setting: Setting, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or _below(setting, value):
        raise setting.wrong(f"an integer >= {setting.ge}", value)
    return _not_above(setting, value)


def _number(setting: Setting, value: object) -> Any:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Whole numbers are finite, and may be too large for a float.
    if (
        not real
        or (isinstance(value, float) and not math.isfinite(value))
        or _below(setting, value)
    ):
        raise setting.wrong(f"a number >= {setting.ge}", value)
    return _not_above(setting, value)


def _below(setting: Setting, value: Any) -> bool:
    return setting.ge is not None and value < setting.ge


def _not_above(setting: Setting, value: Any) -> Any:
    if setting.le is not None and value > setting.le:
        raise setting.wrong(f"at most {setting.le}", value)
    return value


def _path(setting: Setting, value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise setting.wrong("a file or folder", value)
    return Path(value)


def _text(setting: Setting, value: object) -> str:
    if setting.choices:
        return _choice(setting, value)
    if not isinstance(value, str):
        raise setting.wrong("text", value)
    if not setting.empty and not value.strip():
        raise setting.wrong("text that is not empty", value)
    return value


def _choice(setting: Setting, value: object) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in setting.choices:
        return text
    hint = nearest(text, setting.choices) if text else ""
    raise ConfigError(
        f"{setting.flag} must be one of {', '.join(setting.choices)}, got {value!r}{hint}"
    )


_CHECKS: Mapping[type, _Check] = {
    bool: _switch,
    int: _integer,
    float: _number,
    Path: _path,
    str: _text,
}


def _prompt(setting: Setting, value: object) -> str | None:
    """Return a text that is Unicode, as tokenizers take it."""
    text = "" if value is None else _text(setting, value)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"{setting.flag} must be Unicode text, got bytes that are not UTF-8: {text[:80]!r}; "
            f"check the encoding of the terminal or script"
        )
    return None if value is None else text


def _configuration(setting: Setting, value: object) -> object:
    """Return a path, text or mapping that holds a configuration; None where it is empty."""
    if not isinstance(value, (str, Mapping, type(None))):
        raise setting.wrong("a path, a JSON object, k=v,k=v or a mapping", value)
    empty = not value.strip() if isinstance(value, str) else not value
    return None if empty else frozen(value)


def _overrides(setting: Setting, value: Any) -> object:
    return frozen(parse_component_backends(value, name=setting.flag))


def _any(setting: Setting, value: object) -> object:
    """Return `value`: what may be given depends on other settings."""
    return value


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
            metavar="FOLDER_OR_ID",
            empty=False,
            help="Diffusers pipeline: a folder with model_index.json, or a Hugging Face Hub id.",
        ),
    ]
    prompt: Annotated[
        str | None, Setting(metavar="TEXT", check=_prompt, help="What to generate.")
    ] = None
    negative_prompt: Annotated[
        str | None, Setting(metavar="TEXT", check=_prompt, help="What to keep out. Default: none.")
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
            check=_any,
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
    strict_attention: Annotated[
        bool,
        Setting(help="Refuse instead of falling back when a named backend cannot serve a layer."),
    ] = False
    num_gpus: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=1,
            le=65536,
            help="GPUs that share the work; starts a process for each on this host. Default: what "
            "the degrees multiply to. Under torchrun: the ranks it started.",
        ),
    ] = None
    sp_degree: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=1,
            le=65536,
            help="GPUs that share one sequence: Ulysses times ring. Default: --num-gpus, or half "
            "of them with --cfg-parallel.",
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=1,
            le=65536,
            help="GPUs the heads are split over. Default: as many as share a sequence and fit.",
        ),
    ] = None
    ring_degree: Annotated[
        int | None,
        Setting(
            metavar="N",
            ge=1,
            le=65536,
            help="GPUs in a ring over keys. Default: what the Ulysses degree leaves.",
        ),
    ] = None
    cfg_parallel: Annotated[
        bool, Setting(help="Run the two branches of classifier-free guidance on different GPUs.")
    ] = False
    rank_timeout: Annotated[
        int,
        Setting(
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
    save_latents: Annotated[
        bool,
        Setting(
            help="Also write the last latents, as the pipeline holds them, to a .safetensors file "
            "beside the output."
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
    dtype: Annotated[
        str,
        Setting(
            choices=("auto", "float32", "float16", "bfloat16"),
            help="Dtype of the weights. auto: bfloat16 on accelerators that have it, else float16 "
            "there, float32 on the CPU.",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        Setting(
            metavar="DEVICE",
            empty=False,
            help="Torch device, e.g. cuda:1 or cpu. Default: this machine's accelerator.",
        ),
    ] = None
    offload: Annotated[
        str,
        Setting(
            choices=("none", "model", "sequential"),
            help="Keep weights in CPU memory while they do not run: model by model, or layer by "
            "layer (least memory, slowest).",
        ),
    ] = "none"
    vae_tiling: Annotated[bool, Setting(help="Decode in tiles: less memory, slower.")] = False
    enable_torch_compile: Annotated[
        bool, Setting(help="Compile the repeated blocks of every denoiser.")
    ] = False

    def __post_init__(self) -> None:
        for name, declared in SETTINGS.items():
            self._set(name, declared.normalised(getattr(self, name)))
        if self.backend == "diffusers":
            self._keep_diffusers_name()
        else:
            self._parse_our_name()
        check_exclusive(
            self.attention_backend, self.attention_backend_config, self.attention_config
        )
        if self.check_attention and self.record_attention is None:
            raise ConfigError(
                f"--check-attention needs --record-attention, the file for what it finds, got "
                f"--check-attention {self.check_attention} alone; add it"
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


def _settings() -> Mapping[str, Setting]:
    hints = get_type_hints(ServerArgs, include_extras=True)
    found = {}
    for field in dataclasses.fields(ServerArgs):
        annotation, declared = get_args(hints[field.name])
        members = (annotation, *get_args(annotation))
        kind = next(kind for kind in _KINDS if kind in members)
        found[field.name] = replace(declared, name=field.name, kind=kind, default=field.default)
    return found


SETTINGS: Mapping[str, Setting] = MappingProxyType(_settings())
"""The settings of `ServerArgs` by name, in order."""

CALL_SETTINGS = (
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
)
"""Those that a pipeline is called with and that change its latents, beside prompt and seed."""


def parse_attention_backend(
    value: object, *, name: str = "--attention-backend"
) -> AttentionBackendEnum | None:
    """Return the backend `value` names; None and "auto" leave the choice to us.

    Args:
        value: what the user gave.
        name: the flag or place it came from, for messages.

    Raises:
        ConfigError: no backend has that name.
    """
    if value is None or isinstance(value, AttentionBackendEnum):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be the name of an attention backend, got {value!r}")
    if value.strip().lower() == "auto":
        return None
    # Not with the module, which `--help` imports.
    from importlib.metadata import entry_points

    plugins = {
        AttentionBackendEnum.register_plugin_name(entry.name): entry
        for entry in entry_points(group=_PLUGIN_GROUP)
    }
    try:
        backend = AttentionBackendEnum.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if backend in plugins:
        # Its class says whether it is sparse; an error concerns the layer that selects it.
        with suppress(Exception):
            plugins[backend].load()
    return backend


def parse_component_backends(
    value: Mapping[str, object] | str | None,
    *,
    name: str = "--component-attention-backends",
) -> _ComponentBackends:
    """Return backends by `component` or `component.role`, from any of the accepted forms.

    Args:
        value: a mapping, a JSON object or `a=x,b=y`; `-` in keys means `_`.
        name: the flag or argument it came from, for messages.

    Raises:
        ConfigError: malformed text, a bad or repeated key, an unknown role or backend.
    """
    found: _ComponentBackends = {}
    for key, backend in component_mapping(value, name=name).items():
        component = parse_component_key(key, name=name)
        if component in found:
            raise ConfigError(f"{name} must name {component!r} once, got it twice")
        if not isinstance(backend, (str, AttentionBackendEnum, type(None))):
            raise ConfigError(f"{name} must give {component!r} a backend's name, got {backend!r}")
        found[component] = parse_attention_backend(backend, name=f"{name}: {component}")
    return found


def component_mapping(value: object, *, name: str) -> Mapping[object, object]:
    """Return what `value` says of components, with keys and values as they were written.

    Args:
        value: a mapping, a JSON object or `a=x,b=y`; None and empty text say nothing.
        name: the flag or argument it came from, for messages.

    Raises:
        ConfigError: malformed text, or a repeated key.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a mapping, a JSON object or a=x,b=y, got {value!r}")
    text = value.strip()
    try:
        found = read_json(text) if text[:1] == "{" else read_pairs(text) if text else {}
    except MalformedError as error:
        raise ConfigError(
            f"{name} must be component=backend pairs, a JSON object or a mapping; {error}"
        ) from None
    assert isinstance(found, dict), "what opens like an object is one"
    return found


def parse_component_key(key: object, *, name: str, roles: bool = True) -> str:
    """Return a key such as `text_encoder` or `transformer.cross`, normalised.

    Case, blanks around its parts and `-` for `_` make no difference.

    Args:
        key: what the user wrote.
        name: the flag or place it came from, for messages.
        roles: accept `component.role`, else `component` only.

    Raises:
        ConfigError: the key is empty, or its role is not one of self, cross and encoder.
    """
    if not isinstance(key, str):
        raise ConfigError(f"{name} must have component names as keys, got {key!r}")
    component, dot, role = (part.strip() for part in key.replace("-", "_").lower().partition("."))
    if not component or (dot and not roles):
        form = "component or component.role" if roles else "component, without a role"
        raise ConfigError(f"{name} must name a {form}, got {key!r}")
    if dot and role not in ROLES:
        raise ConfigError(
            f"{name} must name one of the roles {', '.join(ROLES)} after the dot, got {key!r}"
            f"{nearest(role, ROLES)}"
        )
    return component + dot + role


def check_exclusive(
    backend: object,
    backend_config: object,
    attention_config: object,
    *,
    spell: Callable[[str], str] = as_flag,
) -> None:
    """Check that the ways to ask for a backend do not contradict each other.

    Args:
        backend: `--attention-backend`, None when not given.
        backend_config: `--attention-backend-config`, None when not given.
        attention_config: `--attention-config`, None when not given.
        spell: what messages call a setting of that name.

    Raises:
        ConfigError: `--attention-config` stands beside one of the others, or a backend's
            parameters are given without the backend.
    """
    structured = spell("attention_config")
    of_backend, parameters = spell("attention_backend"), spell("attention_backend_config")
    for name, value in ((of_backend, backend), (parameters, backend_config)):
        if attention_config is not None and value is not None:
            raise ConfigError(
                f"{structured} must not be given with {name}; move the backend and its "
                f"config into {structured}, or remove one"
            )
    if backend_config is not None and backend is None:
        raise ConfigError(
            f"{parameters} needs {of_backend}, which says whose parameters they are; add it"
        )
