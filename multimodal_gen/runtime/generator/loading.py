"""Loading a diffusers pipeline, with errors that say what to do."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator.output import Kind
from multimodal_gen.runtime.platforms import current_platform
from multimodal_gen.runtime.server_args import ServerArgs

__all__ = [
    "PipelineIndex",
    "denoisers",
    "first_line",
    "import_diffusers",
    "load_pipeline",
    "pick_device",
    "pick_dtype",
]

_INDEX = "model_index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = ("float32", "float16", "bfloat16")


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
    """

    model_path: str
    pipeline_class: type
    components: Mapping[str, tuple[str, str]]

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
        name = config.get("_class_name")
        pipeline_class = getattr(diffusers, str(name), None)
        if not isinstance(pipeline_class, type):
            raise UsageError(
                f"the pipeline class of {model_path!r} must be one that diffusers "
                f"{diffusers.__version__} has, got {name!r}; a newer diffusers may have it"
            )
        components = {
            key: (str(value[0]), str(value[1]))
            for key, value in config.items()
            if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] is not None
        }
        return cls(model_path=location, pipeline_class=pipeline_class, components=components)

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
    _check_folders(index)
    dtype = pick_dtype(args.dtype, device)
    try:
        with _bars_on_terminals_only():
            pipe = index.pipeline_class.from_pretrained(  # type: ignore[attr-defined]
                index.model_path, **{_dtype_argument(): _dtypes(index, args.dtype, dtype)}
            )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the pipeline at {index.model_path!r} could not be loaded: {first_line(error)}"
        ) from error
    if args.vae_tiling:
        _tile_vae(pipe)
    if args.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif args.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def _check_folders(index: PipelineIndex) -> None:
    """Refuse a folder that lacks components: diffusers runs some pipelines without, and badly."""
    folder = Path(index.model_path)
    missing = [name for name in index.components if not (folder / name).is_dir()]
    if folder.is_dir() and missing:
        raise UsageError(
            f"the pipeline at {index.model_path!r} must have a folder for every component of its "
            f"model_index.json, missing {', '.join(missing)}; download it again"
        )


def pick_device(device: str | None) -> torch.device:
    """Return the device to run on; this machine's accelerator when none is named.

    Raises:
        UsageError: torch does not know the device, or the machine does not have it.
    """
    if device is None:
        return torch.device(current_platform().device_type)
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"--device must be a torch device of this machine, such as cpu or cuda:0, got "
            f"{device!r} ({first_line(error)})"
        ) from error
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype to load weights in; "auto" is half precision on accelerators."""
    if dtype in _DTYPES:
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if dtype != "auto":
        raise UsageError(f"--dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
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


def _locate(model_path: str) -> str:
    """Return the folder, with `~` expanded, or the hub id."""
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
        config: dict[str, Any] = diffusers.DiffusionPipeline.load_config(location)
    except (OSError, ValueError) as error:
        if Path(location).is_dir():
            raise UsageError(
                f"{_INDEX} of {location!r} must be a JSON file, reading it failed: "
                f"{first_line(error)}"
            ) from error
        raise UsageError(
            f"--model-path must be an existing pipeline folder or a reachable hub id, got "
            f"{location!r}: there is no such folder, and the Hugging Face Hub did not give its "
            f"{_INDEX} ({first_line(error)})"
        ) from error
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
        if library.is_progress_bar_enabled() and not sys.stderr.isatty()
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
