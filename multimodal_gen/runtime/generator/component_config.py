"""What the config of a component may hold: sizes of models that exist, and values of their types.

Libraries check little of it. A size beyond those of any model takes hours or all memory to build;
text where a number belongs fails in the middle of a run, where the message is about tensors.
"""

import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.files import MalformedError, read_small_file
from multimodal_gen.runtime.generator.signatures import arguments_of, fits, spelled
from multimodal_gen.settings import short

_FILES = ("config.json", "scheduler_config.json", "tokenizer_config.json")

# The most that a number may be, by what its name has in it; the first that is in it counts. Tables
# of positions and of timesteps are computed when a model is built.
_MOST: Final[tuple[tuple[str, int], ...]] = (
    ("model_max_length", 1 << 127),  # tokenizers spell "no limit" so
    *((word, 1 << 20) for word in ("timesteps", "vocab", "extra_ids")),
    ("max_position_embeddings", (1 << 31) - 1),
    ("seq_len", 1 << 18),
    *((word, 4096) for word in ("layers", "blocks", "depth", "solver_order")),
    *((word, 1 << 18) for word in ("dim", "channels", "hidden_size", "intermediate_size")),
    *((word, 1 << 18) for word in ("num_attention_heads", "d_model", "num_buckets")),
    ("", (1 << 31) - 1),
)
_LISTED = ("layers", "blocks", "depth")
_MOST_LISTED = 4096
_MOST_NESTED = 8

# Lists of them, which some models have, are left to the models.
_COUNTS = frozenset(
    {
        "attention_head_dim",
        "hidden_size",
        "in_channels",
        "latent_channels",
        "num_attention_heads",
        "num_hidden_layers",
        "num_layers",
        "num_train_timesteps",
        "out_channels",
        "rope_max_seq_len",
        "solver_order",
        "z_dim",
    }
)
_MOST_SECONDS = 5.0
_PER_CHANNEL = ("latents_mean", "latents_std")


def component_configs(
    model_path: str, components: Mapping[str, object]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and config of the components of a folder, as far as they can be read."""
    for name in components:
        files = (Path(model_path) / name / file for file in _FILES)
        path = next((file for file in files if file.is_file()), None)
        if path is None:
            continue
        try:
            config: Any = json.loads(read_small_file(path))
        except (MalformedError, ValueError, RecursionError):
            continue  # whoever builds it says what is wrong
        if isinstance(config, dict):
            yield name, config


def check_config(name: str, cls: Any, config: Mapping[str, Any], model_path: str) -> None:
    """Refuse sizes that no model has, and values that the component's class excludes.

    Args:
        name: the component.
        cls: its class; None where that is not known.
        config: its config; sizes may be nested.
        model_path: folder or hub id.

    Raises:
        UsageError: names the component, the key and the value.
    """
    check_sizes(name, config, model_path)
    for key, value in _numbers(config, 0):
        if isinstance(value, float) and math.isnan(value):
            raise _wrong(name, model_path, "be finite", key, value)
    if cls is None or not cls.__module__.startswith("diffusers."):
        return
    kinds = arguments_of(cls.__init__)
    for key in sorted(kinds.keys() & config.keys()):
        parameter, value = kinds[key], config[key]
        if _is_text(value) and not (
            _may_be_text(parameter.annotation) or _is_text(parameter.default)
        ):
            kind = spelled(parameter.annotation)
            raise _wrong(name, model_path, f"be of type {kind}", key, value)
        if _is_infinite(value) and not _is_infinite(parameter.default):
            raise _wrong(name, model_path, "be finite", key, value)
    if config.get("scaling_factor") == 0:
        raise _wrong(name, model_path, "be other than 0", "scaling_factor", 0)
    _check_axes(name, kinds, config, model_path)
    _check_channels(name, kinds, config, model_path)


def _check_axes(
    name: str, kinds: Mapping[str, inspect.Parameter], config: Mapping[str, Any], model_path: str
) -> None:
    """Refuse rotated channels that are more or fewer than a head has, where they are by default."""
    names = "axes_dims_rope", "attention_head_dim"
    default, given = (
        [source.get(key) for key in names]
        for source in ({key: kind.default for key, kind in kinds.items()}, config)
    )
    if _is_split(*default) and _is_split(*given) is False:
        rule = f"be channels that add up to its attention_head_dim of {given[1]}"
        raise _wrong(name, model_path, rule, names[0], given[0])


def _is_split(axes: Any, head: Any) -> bool | None:
    """Tell whether channels by axis are those of a head; None where they are no numbers."""
    listed = isinstance(axes, (list, tuple)) and all(type(item) is int for item in axes)
    return sum(axes) == head if listed and isinstance(head, int) else None


def _check_channels(
    name: str, kinds: Mapping[str, inspect.Parameter], config: Mapping[str, Any], model_path: str
) -> None:
    """Refuse means and deviations of latents that are not one for each channel."""
    channels = config.get("z_dim", config.get("latent_channels"))
    for key in _PER_CHANNEL:
        value = config.get(key)
        needed = key in config and key in kinds and kinds[key].default is not None
        if not isinstance(channels, int) or (value is None and not needed):
            continue
        listed = isinstance(value, list) and all(type(item) in (int, float) for item in value)
        if not listed or not value or len(value) % channels:
            rule = f"be a list with a number for each of {channels} channels"
            raise _wrong(name, model_path, rule, key, value)


def check_sizes(name: str, config: Mapping[str, Any], model_path: str) -> None:
    """Refuse sizes that no model has, and what is no size, before it is built.

    Args:
        name: the component.
        config: its config; sizes may be nested.
        model_path: folder or hub id.

    Raises:
        UsageError: names the component, the key and the value.
    """
    for key in sorted(_COUNTS & config.keys()):
        value = config[key]
        least = 0 if "layers" in key else 1
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_whole and value is not None and not isinstance(value, (list, tuple)):
            rule = f"be a whole number of at least {least}"
            raise _wrong(name, model_path, rule, key, value)
    for key, value in _numbers(config, 0):
        most = next(most for word, most in _MOST if word in key)
        if "scale" in key:
            most = _MOST[-1][1]
        if isinstance(value, int) and abs(value) > most:
            rule = f"be at most {most}"
            raise _wrong(name, model_path, rule, key, value)


def check_scheduler_config(name: str, cls: Any, config: Mapping[str, Any], model_path: str) -> None:
    """Refuse the config of a scheduler that cannot be built, or makes steps that are not finite.

    Args:
        name: the component.
        cls: its class; anything but a scheduler of diffusers is left alone.
        config: its config.
        model_path: folder or hub id.

    Raises:
        UsageError: names the first key without which it can.
    """
    if cls is None or not hasattr(cls, "set_timesteps") or not hasattr(cls, "from_config"):
        return
    kinds = arguments_of(cls.__init__)
    for key in sorted(kinds.keys() & config.keys()):
        kind, value = kinds[key].annotation, config[key]
        is_number = isinstance(value, (int, float))
        if is_number and not any(fits(number, kind) for number in (True, 1, 0.5)):
            raise _wrong(name, model_path, f"be of type {spelled(kind)}", key, value)
    config = {key: config[key] for key in config if key in kinds}
    problem = _problem(cls, config)
    if not problem or _problem(cls, {}):
        return  # what its class cannot do by default either, pipelines may know how to
    at_fault = key_at_fault(config, lambda rest: not _problem(cls, rest))
    if at_fault is not None:
        rule = f"be one that {cls.__name__} makes steps with ({problem})"
        raise _wrong(name, model_path, rule, at_fault, config[at_fault])


def key_at_fault(config: Mapping[str, Any], works: Callable[[dict[str, Any]], bool]) -> str | None:
    """Return the first key without which a config works; None where there is none, or in time.

    Args:
        config: a config that does not.
        works: tells whether a config does; it is not asked any more after some seconds.
    """
    end = time.monotonic() + _MOST_SECONDS
    # Switches last: where one is turned off, a wrong number does not matter.
    for key in sorted(config, key=lambda each: (isinstance(config[each], bool), each)):
        if time.monotonic() > end:
            return None
        if not key.startswith("_") and works({k: config[k] for k in config if k != key}):
            return key
    return None


def _problem(cls: Any, config: Mapping[str, Any]) -> str:
    """Return why a scheduler makes no steps; "" where it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run says them once more
            scheduler = cls.from_config(dict(config))
            taken = inspect.signature(scheduler.set_timesteps).parameters
            shift = {"mu": _shift(scheduler.config)} if "mu" in taken else {}
            scheduler.set_timesteps(2, **shift)
        made = [getattr(scheduler, part, None) for part in ("timesteps", "sigmas")]
        finite = all(torch.as_tensor(part).isfinite().all() for part in made if part is not None)
        return "" if finite else "they are not finite"
    except Exception as error:  # in every way there is
        return " ".join(str(error).split())[:120] or type(error).__name__


def _shift(config: Mapping[str, Any]) -> float:
    """Return the shift of a sequence, as pipelines compute it."""
    if not config.get("use_dynamic_shifting") or "max_image_seq_len" not in config:
        return 1.0
    length = config["max_image_seq_len"] - config["base_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / length
    return float(config["base_shift"] + slope)


def _is_text(value: object) -> bool:
    listed = isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value)
    return listed or isinstance(value, str)


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _may_be_text(kind: Any) -> bool:
    """Tell whether a type may have text in it; what takes a `Literal` may know further words."""
    if get_origin(kind) is Literal:
        return True
    inner = [each for each in get_args(kind) if each is not Ellipsis]
    return any(map(_may_be_text, inner)) if inner else kind not in (bool, int, float, type(None))


def _wrong(name: str, model_path: str, rule: str, key: str, value: object) -> UsageError:
    return UsageError(
        f"`{key}` of component {name} of {model_path!r} must {rule}, got {short(value)}; check its "
        f"config"
    )


def _numbers(value: object, depth: int, key: str = "") -> Iterator[tuple[str, float]]:
    if depth > _MOST_NESTED:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, depth + 1, str(name))
    elif isinstance(value, (list, tuple)):
        if any(word in key for word in _LISTED) and len(value) > _MOST_LISTED:
            yield key, len(value)
        for inner in value[: _MOST_LISTED + 1]:
            yield from _numbers(inner, depth + 1, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value
