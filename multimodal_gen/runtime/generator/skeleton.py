"""A pipeline without its weights: what its configs say, and real modules on the meta device."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import first_line, short
from multimodal_gen.runtime.generator.index import (
    PipelineIndex,
    class_of,
    components_in,
    read_config,
)
from multimodal_gen.runtime.generator.library_errors import told
from multimodal_gen.runtime.generator.load import bars_on_terminals_only, pick_dtype
from multimodal_gen.runtime.generator.model_folder import DENOISERS
from multimodal_gen.runtime.generator.quiet import quiet_about_curves
from multimodal_gen.runtime.generator.scheduler import with_scheduler
from multimodal_gen.runtime.model_path import locate
from multimodal_gen.runtime.server_args import ServerArgs

_MOST_LAYERS = 10_000


def model_identity(model_path: str) -> dict[str, str]:
    """Return what tells a model from others, read without its weights and without diffusers.

    Args:
        model_path: folder or hub id.

    Returns:
        "model": the hub id or the folder, absolute and without links; "denoisers": a digest of the
        classes and configurations of its denoisers.

    Raises:
        UsageError: the configuration of a denoiser cannot be read.
    """
    folder = Path(locate(model_path))
    text = json.dumps(denoiser_configs(model_path), sort_keys=True, default=str)
    return {
        "model": str(folder.resolve()) if folder.is_dir() else model_path,
        "denoisers": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def denoiser_configs(model_path: str) -> dict[str, dict[str, Any]]:
    """Return the configurations of the denoisers, by component, read as `model_identity` says.

    Raises:
        UsageError: there is no such model, or one cannot be read.
    """
    location = locate(model_path)
    found = {}
    for name, (_, class_name) in components_in(read_config(location)).items():
        if name.startswith(DENOISERS):
            config = read_config(location, f"{name}/config.json")
            # The other keys tell who wrote the file, and when.
            kept = {key: value for key, value in config.items() if not key.startswith("_")}
            found[name] = {**kept, "_class_name": class_name}
    return found


def load_skeleton(index: PipelineIndex, dtype: str, device: torch.device) -> Any:
    """Build a pipeline whose models have shapes and dtypes but no weights.

    It takes seconds and next to no memory at any model size, which is enough to learn what its
    attention layers are. Only the configs are read, or fetched from the hub.

    Args:
        index: the pipeline.
        dtype: dtype the weights would be loaded in, or "auto".
        device: where they would run; "auto" depends on it.

    Returns:
        An instance of the pipeline's class. Models are on the meta device; schedulers are whole,
        where they have a config; tokenizers, processors and what has none are None.

    Raises:
        UsageError: a component's config is missing or does not fit its class.
    """
    # Constructors of pipelines want tokenizers, schedulers and so on; a skeleton needs none.
    pipeline_class: Any = index.pipeline_class
    pipe = pipeline_class.__new__(pipeline_class)
    # Those that this pipeline leaves out, too.
    names = {*_required(pipeline_class), *pipeline_class._optional_components}
    pipe.register_modules(**dict.fromkeys(sorted(names)))
    for name, built in _built(index, dtype, device):
        if built is not None:
            pipe.register_modules(**{name: built})
    return pipe


def _built(index: PipelineIndex, dtype: str, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield the components of a pipeline without weights, as far as configs make them."""
    chosen = pick_dtype(dtype, device)
    for name, (library, class_name) in index.components.items():
        built = _build(index.model_path, name, library, class_name)
        if isinstance(built, torch.nn.Module):
            # The plain cast: the libraries' own `to` warns about weights that are not there.
            built = torch.nn.Module.to(built, dtype=chosen).eval()
        yield name, built


def load_rehearsed(index: PipelineIndex, args: ServerArgs, device: torch.device) -> Any:
    """Load a pipeline whose models have no weights, and whose other parts are whole.

    It can be called where tensors need no data; see `kernels.launch.rehearsal`.

    Args:
        index: the pipeline.
        args: how it would be loaded.
        device: where it would run.

    Raises:
        UsageError: files are missing, or do not fit their classes.
    """
    built = _built(index, args.dtype, device)
    models = {name: model for name, model in built if isinstance(model, torch.nn.Module)}
    pipeline_class: Any = index.pipeline_class
    with (
        bars_on_terminals_only(),
        told(lambda error: f"{index.name} could not be built: {first_line(error)}"),
    ):
        pipe = pipeline_class.from_pretrained(index.model_path, **models)
    if args.scheduler is not None:
        pipe.scheduler = with_scheduler(pipe, args.scheduler)
    return pipe


def without_weights(index: PipelineIndex) -> Any:
    """Construct the pipeline with its parts of diffusers, which its sizes depend on; no weights.

    It knows the sizes that it takes, as the loaded one will.

    Returns:
        The pipeline; None where it cannot be constructed so.
    """
    pipeline_class: Any = index.pipeline_class
    parameters = inspect.signature(pipeline_class).parameters
    parts = {
        name: _build(index.model_path, name, library, class_name)
        for name, (library, class_name) in index.components.items()
        if name in parameters and library == "diffusers"
    }
    try:
        return pipeline_class(**{**dict.fromkeys(_required(pipeline_class)), **parts})
    except Exception:  # its constructor wants a tokenizer's settings, or more
        return None


def _required(pipeline_class: Any) -> list[str]:
    """Return what constructing a pipeline takes and has no default for."""
    parameters = inspect.signature(pipeline_class).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def _build(model_path: str, name: str, library: str, class_name: str) -> Any:
    """Build a model on the meta device, or a scheduler; None for what is neither."""
    import diffusers
    from accelerate import init_empty_weights

    cls = class_of(library, class_name)
    if cls is None or not issubclass(cls, (torch.nn.Module, diffusers.SchedulerMixin)):
        return None
    with told(
        lambda error: (
            f"component {name} of {model_path!r} must have a config for {class_name}, building it "
            f"failed: {first_line(error)}"
        )
    ):
        if not issubclass(cls, torch.nn.Module):
            folder = Path(model_path)
            if folder.is_dir() and not (folder / name / cls.config_name).is_file():
                return None  # it has no config
            return cls.from_pretrained(model_path, subfolder=name)
        if library == "diffusers":
            config = cls.load_config(model_path, subfolder=name)
            _check_layers(config)
            with init_empty_weights(), quiet_about_curves():
                return cls.from_config(config)
        config = _transformers_config(cls, model_path, name)
        _check_layers(config.to_dict())
        with init_empty_weights():
            return cls(config)


def _check_layers(config: Mapping[str, Any]) -> None:
    """Refuse more layers than could be built, which would take for ever."""
    for key, value in config.items():
        if "layers" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"{key} must be at most {_MOST_LAYERS}, got {short(value)}")


def _transformers_config(cls: Any, model_path: str, name: str) -> Any:
    """Read the config by the model's own config class, which part-models need."""
    if Path(model_path).is_dir():  # of which one that is not there would be made up
        return cls.config_class.from_pretrained(Path(model_path) / name)
    return cls.config_class.from_pretrained(model_path, subfolder=name)
