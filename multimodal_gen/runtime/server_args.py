"""What a run is asked for, checked and normalised once; field names are the flags' names.

Importing this module imports neither torch nor diffusers.
"""

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multimodal_gen.errors import ConfigError, nearest
from multimodal_gen.runtime.plain_values import MalformedError, frozen, read_json, read_pairs
from multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

__all__ = [
    "ServerArgs",
    "as_flag",
    "check_exclusive",
    "component_mapping",
    "parse_attention_backend",
    "parse_component_backends",
    "parse_component_key",
]

_ComponentBackends = dict[str, AttentionBackendEnum | None]

_ROLES = ("self", "cross", "encoder")
_PLUGIN_GROUP = "multimodal_gen.attention_backends"

_CHOICES = MappingProxyType(
    {
        "backend": ("auto", "sglang", "diffusers"),
        "dtype": ("auto", "float32", "float16", "bfloat16"),
        "offload": ("none", "model", "sequential"),
    }
)
_PARALLEL = ("num_gpus", "sp_degree", "ulysses_degree", "ring_degree")
_SIZES = ("height", "width", "num_frames", "num_inference_steps", "num_outputs", "fps")
_MINIMUM = MappingProxyType({**dict.fromkeys((*_PARALLEL, *_SIZES, "rank_timeout"), 1), "seed": 0})
# Generators of torch take seeds of 63 bits on every device; exchanges count waits in milliseconds.
_MAXIMUM = MappingProxyType({"seed": 2**63 - 1, "fps": 240, "rank_timeout": 1_000_000})
_NUMBERS = ("guidance_scale", "true_cfg_scale")
_SWITCHES = (
    "strict_attention",
    "cfg_parallel",
    "enable_torch_compile",
    "overwrite",
    "save_latents",
    "vae_tiling",
)
_TEXTS = ("model_path", "prompt", "negative_prompt", "device")
# None is allowed only where it is the default, which then means "the pipeline's own".
_NEVER_NONE = frozenset({"model_path", "num_outputs", "rank_timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The arguments of one run; hashable, because mappings are copied and frozen.

    Attributes:
        model_path: diffusers pipeline: a folder with `model_index.json`, or a hub id.
        prompt: what to generate, or None where nothing is generated.
        negative_prompt: what to keep out.
        backend: `sglang` runs this package's layers, `diffusers` its own attention, `auto` decides.
        attention_backend: backend of every layer, None for an automatic choice. With backend
            `diffusers` it is one of diffusers' names, kept as text.
        attention_backend_config: its parameters: path, JSON object, `k=v,k=v` or mapping.
        component_attention_backends: backend by `component` or `component.role`, None for an
            automatic choice; given as a mapping, a JSON object or `a=x,b=y`.
        attention_config: structured selection: path, JSON object or mapping; excludes
            `attention_backend`.
        strict_attention: refuse the documented fallbacks too.
        num_gpus: GPUs the pipeline is spread over, on all hosts; None: what the degrees multiply
            to, or the ranks that torchrun started.
        sp_degree: GPUs that share one sequence.
        ulysses_degree: GPUs the heads are split over.
        ring_degree: GPUs in the ring over keys.
        cfg_parallel: run the branches of classifier-free guidance on different GPUs.
        rank_timeout: seconds the ranks of a run on several GPUs wait for each other.
        height: pixels; None: the pipeline's default, as for every None below.
        width: pixels.
        num_frames: frames of a video.
        num_inference_steps: denoising steps.
        guidance_scale: guidance of the kind the model has.
        true_cfg_scale: classifier-free guidance of pipelines that have distilled guidance too.
        num_outputs: images or videos to make.
        seed: seed of the noise; None draws one.
        fps: frames per second of a video.
        output_path: file to write, or folder to choose a name in.
        overwrite: replace existing files.
        save_latents: also write the last latents.
        enable_torch_compile: compile the denoisers' repeated blocks.
        dtype: dtype of the weights; `auto` takes the device's best.
        device: torch device, or None for this machine's accelerator.
        offload: what stays in CPU memory while it does not run: nothing, models, or layers.
        vae_tiling: decode in tiles.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
    """

    model_path: str
    prompt: str | None = None
    negative_prompt: str | None = None
    backend: str = "auto"
    attention_backend: AttentionBackendEnum | str | None = None
    attention_backend_config: str | Mapping[str, object] | None = None
    component_attention_backends: Mapping[str, AttentionBackendEnum | str | None] | str | None = (
        field(default_factory=dict)
    )
    attention_config: str | Mapping[str, object] | None = None
    strict_attention: bool = False
    num_gpus: int | None = None
    sp_degree: int | None = None
    ulysses_degree: int | None = None
    ring_degree: int | None = None
    cfg_parallel: bool = False
    rank_timeout: int = 300
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_outputs: int = 1
    seed: int | None = None
    fps: int | None = None
    output_path: str | Path = Path("outputs")
    overwrite: bool = False
    save_latents: bool = False
    enable_torch_compile: bool = False
    dtype: str = "auto"
    device: str | None = None
    offload: str = "none"
    vae_tiling: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            self._set(name, _choice(name, getattr(self, name), choices))
        for name, minimum in _MINIMUM.items():
            _check_integer(name, getattr(self, name), minimum, _MAXIMUM.get(name))
        for name in _NUMBERS:
            _check_number(name, getattr(self, name))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "true or false", getattr(self, name))
        for name in _TEXTS:
            _check_text(name, getattr(self, name))
        if not isinstance(self.output_path, (str, Path)) or not str(self.output_path).strip():
            raise _wrong("output_path", "a file or folder", self.output_path)
        self._set("output_path", Path(self.output_path))
        self._normalise_attention()

    def _normalise_attention(self) -> None:
        for name in ("attention_backend_config", "attention_config"):
            value = getattr(self, name)
            if not isinstance(value, (str, Mapping, type(None))):
                raise _wrong(name, "a path, a JSON object, k=v,k=v or a mapping", value)
            empty = not value.strip() if isinstance(value, str) else not value
            self._set(name, None if empty else frozen(value))
        components = parse_component_backends(self.component_attention_backends)
        self._set("component_attention_backends", frozen(components))
        if self.backend == "diffusers":
            self._keep_diffusers_name()
        else:
            self._parse_our_name()
        check_exclusive(
            self.attention_backend, self.attention_backend_config, self.attention_config
        )

    def _parse_our_name(self) -> None:
        try:
            self._set("attention_backend", parse_attention_backend(self.attention_backend))
        except ConfigError as error:
            raise ConfigError(
                f"{error}; names of diffusers' own backends need --backend diffusers"
            ) from None

    def _keep_diffusers_name(self) -> None:
        ours = ("attention_backend_config", "component_attention_backends", "attention_config")
        for name in ours:
            if getattr(self, name):
                raise ConfigError(
                    f"{_flag(name)} must not be given with --backend diffusers, whose attention "
                    f"backends take no configuration; remove it, or use --backend sglang"
                )
        value = self.attention_backend
        if value is None:
            return
        if not isinstance(value, (str, AttentionBackendEnum)) or not str(value).strip():
            raise _wrong("attention_backend", "the name of a diffusers attention backend", value)
        self._set("attention_backend", str(value).strip())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


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
    # Names only: what the entry points load is looked at when a layer selects them.
    for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP):
        AttentionBackendEnum.register_plugin_name(entry.name)
    try:
        return AttentionBackendEnum.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


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
    if dot and role not in _ROLES:
        raise ConfigError(
            f"{name} must name one of the roles {', '.join(_ROLES)} after the dot, got {key!r}"
            f"{nearest(role, _ROLES)}"
        )
    return component + dot + role


def as_flag(setting: str) -> str:
    """Return the flag of a setting: `--attention-config` for `attention_config`."""
    return "--" + setting.replace("_", "-")


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


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    for choice in choices:
        if choice == text:
            return choice
    hint = nearest(text, choices) if text else ""
    raise ConfigError(f"{_flag(name)} must be one of {', '.join(choices)}, got {value!r}{hint}")


def _check_integer(name: str, value: object, minimum: int, maximum: int | None) -> None:
    if value is None and name not in _NEVER_NONE:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _wrong(name, f"an integer >= {minimum}", value)
    if maximum is not None and value > maximum:
        raise _wrong(name, f"at most {maximum}", value)


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise _wrong(name, "a number >= 0", value)


def _check_text(name: str, value: object) -> None:
    if value is None and name not in _NEVER_NONE:
        return
    if not isinstance(value, str):
        raise _wrong(name, "text", value)
    if name in ("model_path", "device") and not value.strip():
        raise _wrong(name, "text that is not empty", value)


def _wrong(name: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(f"{_flag(name)} must be {expected}, got {value!r}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
