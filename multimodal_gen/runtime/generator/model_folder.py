"""What a model folder may ask for: no code of its own, the parts its pipeline needs, sane sizes.

A folder is data that others wrote. Its index names a library and a class per component, which
loading imports; some releases of diffusers import them from the folder itself. So both are checked
before anything is imported, whatever the release.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, get_args

from multimodal_gen.errors import UsageError, nearest
from multimodal_gen.runtime.plain_values import short

__all__ = [
    "DENOISERS",
    "LIBRARIES",
    "check_classes",
    "check_code",
    "check_required",
    "check_sizes",
    "component_configs",
]

LIBRARIES: Final = ("diffusers", "transformers")
"""Libraries that components may be of, beside the modules of `diffusers.pipelines`."""

DENOISERS: Final = ("transformer", "unet")
"""What the names of components that denoise begin with."""

_PIPELINES = "diffusers.pipelines"

# Sizes beyond those of any model: building one would take hours, or never end.
_MOST_LAYERS = 4096
_MOST = 2**31 - 1
_LAYER_WORDS = ("layers", "blocks", "depth")
# Lists of them, which some models have, are left to the models.
_COUNTS = frozenset(
    {
        "attention_head_dim",
        "hidden_size",
        "in_channels",
        "num_attention_heads",
        "num_hidden_layers",
        "num_layers",
        "out_channels",
    }
)
_MOST_BYTES = 16 << 20


def check_code(model_path: str, components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse an index that would have anything but known libraries imported.

    Args:
        model_path: folder or hub id.
        components: (library, class name) by component.

    Raises:
        UsageError: a component is of another library, has code of its own, or no name.
    """
    folder = Path(model_path)
    for name, (library, class_name) in components.items():
        where = f"component {short(name)} of {model_path!r}"
        if not name.isidentifier():
            raise UsageError(f"{where} must have a name of letters, digits and _")
        if library not in LIBRARIES and not _is_pipeline_module(library):
            raise UsageError(
                f"{where} must be of {', '.join(LIBRARIES)} or a module of {_PIPELINES}, got "
                f"{short(library)}; nothing of that name was imported{nearest(library, LIBRARIES)}"
            )
        if not class_name.isidentifier():
            raise UsageError(f"{where} must name a class of {library}, got {short(class_name)}")
        own = folder / name / f"{library}.py"
        if own.exists() or own.is_symlink():
            raise UsageError(
                f"{where} must have no code of its own, got {own.name!r} in its folder, which "
                f"diffusers could run; remove it"
            )


def _is_pipeline_module(library: str) -> bool:
    if not library.isidentifier() or library.startswith("_"):
        return False
    return find_spec(f"{_PIPELINES}.{library}") is not None


def check_required(
    pipeline_class: type, model_path: str, components: Mapping[str, tuple[str, str]]
) -> None:
    """Refuse an index that lacks a component the pipeline is constructed from.

    Raises:
        UsageError: names the missing components.
    """
    optional = getattr(pipeline_class, "_optional_components", ())
    parameters = inspect.signature(pipeline_class).parameters.values()
    denoisers = [p.name for p in parameters if p.name.startswith(DENOISERS)]
    missing = [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in components
        and p.name not in optional
    ]
    if denoisers and not any(name in components for name in denoisers):
        missing.append(denoisers[0])  # each may be left out, but not all of them
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        raise UsageError(
            f"model_index.json of {model_path!r} must name library and class of every component "
            f"of {pipeline_class.__name__}, missing {names}; download it again"
        )


def check_classes(
    pipeline_class: type, model_path: str, components: Mapping[str, tuple[str, str]]
) -> None:
    """Refuse a denoiser of another pipeline: its arguments would be those of another model.

    Raises:
        UsageError: names the component, its class and the one that is needed.
    """
    import diffusers

    parameters = inspect.signature(pipeline_class).parameters
    for name, (library, class_name) in components.items():
        if library != "diffusers" or not name.startswith(DENOISERS):
            continue
        annotation = getattr(parameters.get(name), "annotation", None)
        wanted = [cls for cls in (get_args(annotation) or (annotation,)) if _is_model(cls)]
        given = getattr(diffusers, class_name, None)
        if wanted and isinstance(given, type) and not issubclass(given, tuple(wanted)):
            raise UsageError(
                f"component {name} of {model_path!r} must be a "
                f"{' or a '.join(cls.__name__ for cls in wanted)}, as {pipeline_class.__name__} "
                f"has it, got a {class_name}; check model_index.json"
            )


def _is_model(cls: object) -> bool:
    return isinstance(cls, type) and hasattr(cls, "from_config")


def component_configs(
    model_path: str, components: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield name and config of the components of a folder, as far as they can be read.

    Raises:
        UsageError: a config is larger than any is.
    """
    for name in components:
        path = Path(model_path) / name / "config.json"
        try:
            if not path.is_file():
                continue
            size = path.stat().st_size
            if size > _MOST_BYTES:
                raise UsageError(
                    f"config.json of component {name} of {model_path!r} must have at most "
                    f"{_MOST_BYTES} bytes, got {size}; download it again"
                )
            config: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # whoever builds it says what is wrong
        if isinstance(config, dict):
            yield name, config


def check_sizes(name: str, config: Mapping[str, object], model_path: str) -> None:
    """Refuse sizes that no model has, and what is no size, before it is built.

    Args:
        name: the component.
        config: its config; sizes may be nested.
        model_path: folder or hub id.

    Raises:
        UsageError: names the component, the key and the value.
    """
    for key in _COUNTS & config.keys():
        value = config[key]
        least = 0 if "layers" in key else 1
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_whole and value is not None and not isinstance(value, (list, tuple)):
            raise UsageError(
                f"component {name} of {model_path!r} must have a whole number of at least {least} "
                f"as `{key}`, got {short(value)}; check its config.json"
            )
    for key, value in _numbers(config, 0):
        is_count = any(word in key for word in _LAYER_WORDS) and "scale" not in key
        most = _MOST_LAYERS if is_count and isinstance(value, int) else _MOST
        if isinstance(value, int) and abs(value) > most:
            raise UsageError(
                f"component {name} of {model_path!r} must have a `{key}` of at most {most}, got "
                f"{short(value)}; no model is that large, check its config.json"
            )


def _numbers(value: object, depth: int, key: str = "") -> Iterator[tuple[str, object]]:
    if depth > 8:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, depth + 1, str(name))
    elif isinstance(value, (list, tuple)):
        if any(word in key for word in _LAYER_WORDS) and len(value) > _MOST_LAYERS:
            yield key, len(value)
        for inner in value[: _MOST_LAYERS + 1]:
            yield from _numbers(inner, depth + 1, "")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value
