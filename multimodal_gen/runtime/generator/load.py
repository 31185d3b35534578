"""Loading a diffusers pipeline, with errors that say what to do.

Libraries fill gaps by themselves: a tokenizer without files has no words, and a model whose
weights lack a parameter draws it at random. Such pipelines compute noise and are refused.
"""

import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.distributed.groups import is_main_rank
from multimodal_gen.runtime.generator.model_folder import (
    check_classes,
    check_code,
    check_required,
    check_sizes,
    component_configs,
)
from multimodal_gen.runtime.generator.output import Kind
from multimodal_gen.runtime.platforms import current_platform
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs

__all__ = [
    "PipelineIndex",
    "check_complete",
    "check_folders",
    "denoisers",
    "first_line",
    "import_diffusers",
    "is_out_of_memory",
    "load_pipeline",
    "load_text_models",
    "pick_device",
    "pick_dtype",
]

_INDEX = "model_index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHOWN = 3

# Files that any tokenizer of transformers can be made of, whatever its class names.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")


def import_diffusers() -> Any:
    """Return the module `diffusers`.

    Raises:
        MissingDependencyError: it, or transformers, is not installed.
    """
    try:
        import diffusers
        import transformers  # noqa: F401 - a pipeline without it fails late and obscurely
    except ImportError as error:
        raise MissingDependencyError(
            f"running a pipeline needs diffusers and transformers ({error}); "
            f"install with: pip install 'multimodal_gen[video]'"
        ) from error
    return diffusers


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """What `model_index.json` says, read before any weight.

    Attributes:
        model_path: folder or hub id.
        pipeline_class: the diffusers class.
        components: (library, class name) by component; those the pipeline leaves out are not in it.
        settings: the rest, what the pipeline was saved with.
    """

    model_path: str
    pipeline_class: type
    components: Mapping[str, tuple[str, str]]
    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, model_path: str) -> "PipelineIndex":
        """Read the index of a pipeline.

        Raises:
            UsageError: there is no such pipeline, or this diffusers does not know its class.
            MissingDependencyError: diffusers is not installed.
        """
        location = _locate(model_path)
        diffusers = import_diffusers()
        config = _read_config(diffusers, location)
        check_code(location, _named(config, dotted=True))
        pipeline_class = _pipeline_class(diffusers, config.get("_class_name"), model_path)
        components = _named(config)
        check_classes(pipeline_class, location, components)
        settings = {
            key: value
            for key, value in config.items()
            if not isinstance(value, (list, tuple)) and not key.startswith("_")
        }
        return cls(
            model_path=location,
            pipeline_class=pipeline_class,
            components=components,
            settings=settings,
        )

    @property
    def name(self) -> str:
        """Name of the pipeline class."""
        return self.pipeline_class.__name__

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What calling the pipeline takes."""
        parameters = dict(inspect.signature(self.pipeline_class.__call__).parameters)
        parameters.pop("self", None)
        return parameters

    @property
    def kind(self) -> Kind:
        """What the pipeline makes: only video pipelines take a number of frames."""
        return "video" if "num_frames" in self.parameters else "image"


def load_pipeline(index: PipelineIndex, args: ServerArgs, device: torch.device) -> Any:
    """Load the weights and put them where they run.

    Raises:
        UsageError: the files are incomplete, or an option does not fit the device or pipeline.
    """
    if args.offload != "none" and device.type == "cpu":
        raise UsageError(f"--offload must be none on the CPU, got {args.offload}")
    check_folders(index.model_path, index.components)
    check_required(index.pipeline_class, index.model_path, index.components)
    for name, config in component_configs(index.model_path, index.components):
        check_sizes(name, config, index.model_path)
    dtypes = _dtypes(index, args.dtype, pick_dtype(args.dtype, device))
    try:
        with _bars_on_terminals_only():
            models = load_text_models(index.model_path, index.components, dtypes)
            pipe = index.pipeline_class.from_pretrained(  # type: ignore[attr-defined]
                index.model_path, **models, **{_dtype_argument(): dtypes}
            )
    except UsageError:
        raise
    except Exception as error:
        # Files that do not fit their classes fail in every way there is, from within libraries.
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"the pipeline at {index.model_path!r} could not be loaded, check its files and "
            f"options: {_described(error)}"
        ) from error
    check_complete(index.model_path, pipe)
    if args.vae_tiling:
        _tile_vae(pipe)
    if args.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif args.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def check_folders(model_path: str, components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a folder that lacks components, or components that lack their first files.

    Args:
        model_path: a folder, or a hub id, which is not looked at.
        components: (library, class name) by component.

    Raises:
        UsageError: a folder, a config or the files of a tokenizer are missing.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise UsageError(
            f"the pipeline at {model_path!r} must have a folder for every component of its "
            f"model_index.json, missing {', '.join(missing)}; download it again"
        )
    for name, (library, class_name) in components.items():
        files = _needed(_class_of(library, class_name))
        if files and not any((folder / name / file).is_file() for file in files):
            raise UsageError(
                f"the pipeline at {model_path!r} must have {' or '.join(files)} in {name}, which "
                f"has none; download it again"
            )


def load_text_models(
    model_path: str, components: Mapping[str, tuple[str, str]], dtype: Any
) -> dict[str, Any]:
    """Load the components that are models of transformers.

    Args:
        model_path: folder or hub id.
        components: (library, class name) by component.
        dtype: one for all, or one by component and "default".

    Returns:
        Models by component, in evaluation mode, on the CPU.

    Raises:
        UsageError: the weights of a model lack parameters; transformers would draw them at random.
    """
    from transformers import PreTrainedModel

    loaded = {}
    for name, (library, class_name) in components.items():
        found = _class_of(library, class_name)
        if library != "transformers" or found is None or not issubclass(found, PreTrainedModel):
            continue
        own = dtype.get(name, dtype["default"]) if isinstance(dtype, Mapping) else dtype
        model, info = found.from_pretrained(
            model_path, subfolder=name, dtype=own, output_loading_info=True
        )
        if info["missing_keys"]:
            raise _incomplete(model_path, name, info["missing_keys"])
        loaded[name] = model
    return loaded


def check_complete(model_path: str, pipe: Any) -> None:
    """Refuse models with parameters that no file held: diffusers leaves them without values.

    Raises:
        UsageError: a parameter is on the meta device.
    """
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            state = component.state_dict(keep_vars=True)
            missing = [key for key, value in state.items() if getattr(value, "is_meta", False)]
            if missing:
                raise _incomplete(model_path, name, missing)


def pick_device(device: str | None) -> torch.device:
    """Return the device to run on; this machine's accelerator when none is named.

    Raises:
        UsageError: torch does not know the device, or the machine does not have it.
    """
    if device is None:
        return torch.device(current_platform().device_type)
    reason = ""
    try:
        chosen = torch.device(device)
        # Tensors on the meta device have no values: nothing would be computed.
        if chosen.type != "meta":
            reason = f"; torch cannot use {chosen.type} here"
            torch.empty(0, device=chosen)
            return chosen
    except (NotImplementedError, ImportError):
        pass
    except (RuntimeError, AssertionError) as error:
        reason = reason and f" ({first_line(error)})"
    raise UsageError(
        f"--device must be a torch device of this machine ({', '.join(_devices())}), got "
        f"{device!r}{reason}"
    )


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype to load weights in; "auto" is half precision on accelerators.

    Raises:
        ConfigError: it is none of those of `--dtype`.
    """
    asked = SETTINGS["dtype"].normalised(dtype)
    if asked != "auto":
        chosen: torch.dtype = getattr(torch, str(asked))
        return chosen
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def denoisers(pipe: Any) -> dict[str, Any]:
    """Return the components that denoise: diffusers models with attention that are no autoencoder.

    Returns:
        Models by component name, e.g. "transformer" and "transformer_2".
    """
    return {
        name: component
        for name, component in pipe.components.items()
        if hasattr(component, "set_attention_backend") and not hasattr(component, "decode")
    }


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device's memory, or the machine's, is full."""
    # The CPU's allocator raises a plain RuntimeError.
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "can't allocate memory" in str(error)


def _incomplete(model_path: str, name: str, missing: Collection[str]) -> UsageError:
    names = sorted(missing)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return UsageError(
        f"the weights of {name} at {model_path!r} must hold every parameter of its config, missing "
        f"{', '.join(names[:_SHOWN])}{more}; download the component again"
    )


def _class_of(library: str, class_name: str) -> Any:
    """Return the class of a component, or None for one that is not these libraries' own."""
    import diffusers
    import transformers

    module = {"diffusers": diffusers, "transformers": transformers}.get(library)
    found = getattr(module, class_name, None)
    return found if isinstance(found, type) else None


def _needed(found: Any) -> tuple[str, ...]:
    """Return the files of which a component of the class has at least one; none if not known."""
    from diffusers import ConfigMixin
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if found is None:
        return ()
    if issubclass(found, ConfigMixin):
        return (str(found.config_name),) if found.config_name else ()
    if issubclass(found, PreTrainedModel):
        return ("config.json",)
    if issubclass(found, PreTrainedTokenizerBase) and found.vocab_files_names:
        return tuple(dict.fromkeys((*found.vocab_files_names.values(), *_TOKENIZERS)))
    return ()


def _devices() -> tuple[str, ...]:
    """Return the devices of this machine by torch's names."""
    kind = current_platform().device_type
    if kind == "cpu":
        return ("cpu",)
    count = getattr(torch.get_device_module(kind), "device_count", lambda: 1)()
    return ("cpu", *(f"{kind}:{n}" for n in range(count)))


def _described(error: BaseException) -> str:
    """Return the first line of an error, with its type where the line alone says little."""
    line = first_line(error)
    return line if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {line}"


def _named(config: Mapping[str, Any], *, dotted: bool = False) -> dict[str, tuple[str, str]]:
    """Return library and class name by component, those left out not; `dotted`: private keys too.

    diffusers takes every list for a component, so that code is looked for behind all of them.
    """
    return {
        key: (str(value[0]), str(value[1]))
        for key, value in config.items()
        if isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[0], str)
        and (dotted or not key.startswith("_"))
        and key != "_class_name"
    }


def _pipeline_class(diffusers: Any, name: object, model_path: str) -> type:
    """Return the class of that name, if it is a pipeline's."""
    try:
        found = getattr(diffusers, name, None) if isinstance(name, str) else None
    except (ImportError, RuntimeError, OSError) as error:  # diffusers imports it only now
        raise MissingDependencyError(
            f"{name} of diffusers must import, it failed: {' '.join(str(error).split())[:300]}; "
            f"reinstall what is broken, e.g. with: pip install 'multimodal_gen[video]'"
        ) from error
    base = diffusers.DiffusionPipeline
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    missing = getattr(found, "_backends", None)
    if missing:
        raise MissingDependencyError(
            f"{name} of diffusers needs further packages; install {', '.join(missing)}"
        )
    what = "no class of it" if found is None else "no pipeline"
    raise UsageError(
        f"the pipeline class of {model_path!r} must be one that diffusers "
        f"{diffusers.__version__} has, got {name!r}, which is {what}; check _class_name in its "
        f"{_INDEX}, a newer diffusers may have it"
    )


def _locate(model_path: str) -> str:
    """Return the folder, with `~` expanded, or the hub id."""
    try:
        return _located(model_path)
    except (OSError, RuntimeError) as error:
        # Too long, not readable, or the home of nobody.
        shown = model_path if len(model_path) <= 80 else f"{model_path[:80]}..."
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(
            f"--model-path must be an existing pipeline folder or a hub id, got {shown!r} "
            f"({reason})"
        ) from error


def _located(model_path: str) -> str:
    folder = Path(model_path).expanduser()
    if (folder / _INDEX).is_file():
        return str(folder)
    if folder.is_dir():
        single = (folder / "config.json").is_file()
        hint = "; this looks like one component, name the folder above it" if single else ""
        raise UsageError(
            f"--model-path must be a pipeline folder with {_INDEX}, got {model_path!r} "
            f"without one{hint}"
        )
    if folder.exists():
        raise UsageError(
            f"--model-path must be a pipeline folder with {_INDEX}, got the file {model_path!r}; "
            f"make a folder of it with from_single_file and save_pretrained of diffusers"
        )
    if not _HUB_ID.fullmatch(model_path):
        raise UsageError(
            f"--model-path must be an existing pipeline folder or a hub id such as "
            f"Wan-AI/Wan2.1-T2V-1.3B-Diffusers, got {model_path!r}, which is neither"
        )
    return model_path


def _read_config(diffusers: Any, location: str) -> dict[str, Any]:
    try:
        config = diffusers.DiffusionPipeline.load_config(location)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        # diffusers takes for granted that the file holds an object.
        if Path(location).is_dir():
            raise UsageError(
                f"{_INDEX} of {location!r} must be a JSON file that holds an object, reading it "
                f"failed: {_described(error)}"
            ) from error
        raise UsageError(
            f"--model-path must be an existing pipeline folder or a reachable hub id, got "
            f"{location!r}: there is no such folder, it is not in the cache, and the Hugging Face "
            f"Hub did not give its {_INDEX}; check the spelling, the network and for gated models "
            f"`hf auth login` ({first_line(error)})"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(
            f"{_INDEX} of {location!r} must be a JSON file that holds an object, got a "
            f"{type(config).__name__}"
        )
    return config


def _dtype_argument() -> str:
    """Return what this diffusers calls the dtype argument of `from_pretrained`."""
    import diffusers

    # Releases that take `dtype` warn about the older name.
    return "dtype" if hasattr(diffusers.utils, "_resolve_dtype") else "torch_dtype"


def _dtypes(index: PipelineIndex, asked: str, dtype: torch.dtype) -> Any:
    """Return the dtype of each component: Wan's autoencoder loses detail in half precision."""
    if asked == "auto" and index.name.startswith("Wan") and dtype is not torch.float32:
        return {"default": dtype, "vae": torch.float32}
    return dtype


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep the loading bars of both libraries out of logs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    enabled = [
        library
        for library in (diffusers_logging, transformers_logging)
        if library.is_progress_bar_enabled() and not (is_main_rank() and sys.stderr.isatty())
    ]
    for library in enabled:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in enabled:
            library.enable_progress_bar()


def _tile_vae(pipe: Any) -> None:
    enable = getattr(getattr(pipe, "vae", None), "enable_tiling", None)
    if enable is None:
        raise UsageError(
            f"--vae-tiling must be left out for {type(pipe).__name__}: its autoencoder cannot "
            f"decode in tiles"
        )
    enable()
