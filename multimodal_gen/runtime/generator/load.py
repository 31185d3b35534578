"""Loading a diffusers pipeline, with errors that say what to do.

Libraries fill gaps by themselves: a tokenizer without files has no words, and a model whose
weights lack a parameter draws it at random. Such pipelines compute noise and are refused.
"""

import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import UsageError, first_line, listed, short
from multimodal_gen.files import require_writable
from multimodal_gen.kernels.launch.ahead import use
from multimodal_gen.runtime.generator.index import PipelineIndex, class_of
from multimodal_gen.runtime.generator.library_errors import described, told
from multimodal_gen.runtime.generator.lora import add_loras, check_loras, read_loras
from multimodal_gen.runtime.generator.progress import is_shown
from multimodal_gen.runtime.generator.quantized import (
    check_quantized,
    load_gguf,
    quantization_config,
)
from multimodal_gen.runtime.generator.quiet import quiet_about_curves, without
from multimodal_gen.runtime.generator.scheduler import scheduler_class, with_scheduler
from multimodal_gen.runtime.generator.weights_file import (
    TRAINED_LAYERS,
    check_weights,
    load_weights,
)
from multimodal_gen.runtime.platforms import current_platform
from multimodal_gen.runtime.server_args import SETTINGS, ServerArgs
from multimodal_gen.settings import expanded

# Functions, of diffusers and of this module, whose `name` is the component that they load.
_LOADING = ("load_sub_model", "load_text_models")

# Files that any tokenizer of transformers can be made of, whatever its class names.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")


def check_loading(index: PipelineIndex, args: ServerArgs, device: torch.device) -> None:
    """Check what the weights are to be loaded from, and how, before that takes minutes.

    Raises:
        UsageError: the files are incomplete, or an option does not fit the device or pipeline.
        MissingDependencyError: a package that an option needs is not installed.
    """
    if args.offload != "none" and device.type == "cpu":
        raise UsageError(f"--offload must be none on the CPU, got {args.offload}")
    if args.offload_folder is not None:
        require_writable(expanded(args.offload_folder, "--offload-folder"), "--offload-folder")
    if args.compiled_kernels is not None:
        use(expanded(args.compiled_kernels, "--compiled-kernels"), device)
    check_folder(index.model_path, index.components)
    ways = _by_component(args.quantize)
    check_weights(index, _by_component(args.transformer_weights_path), ways)
    check_quantized(index, ways, device)
    check_loras(index.pipeline_class, index.components, read_loras(args.lora_path or ()))
    if args.scheduler is not None:
        scheduler_class(args.scheduler)


def load_pipeline(index: PipelineIndex, args: ServerArgs, device: torch.device) -> Any:
    """Load the weights and put them where they run.

    Raises:
        UsageError: the files are incomplete, or an option does not fit the device or pipeline.
        MissingDependencyError: a package that an option needs is not installed.
    """
    check_loading(index, args, device)
    with (
        bars_on_terminals_only(),
        without("diffusers.models.modeling_utils", _is_of_trained_layers),
        quiet_about_curves(),
        told(lambda error: _failure(index, error)),
    ):
        pipe = _read_weights(index, args, device)
    check_complete(index.model_path, pipe)
    add_loras(pipe, read_loras(args.lora_path or ()))
    if args.scheduler is not None:
        pipe.scheduler = with_scheduler(pipe, args.scheduler)
    if args.vae_tiling:
        _tile_vae(pipe)
    _place(pipe, args, device)
    return pipe


def _failure(index: PipelineIndex, error: Exception) -> str:
    """Return what an error while loading says: files fail in every way, from within libraries."""
    if isinstance(error, ImportError):  # processors ask for their packages only when they are made
        return (
            f"the pipeline at {index.model_path!r} needs a package that is not installed: "
            f"{first_line(error)}"
        )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loading = (frame for frame in frames if frame.f_code.co_name in _LOADING)
    name = next((frame.f_locals["name"] for frame in loading), None)
    what = f"component {name} of the pipeline" if name else "the pipeline"
    return (
        f"{what} at {index.model_path!r} could not be loaded, check its files and options: "
        f"{described(error)}"
    )


def _by_component(value: object) -> Mapping[str, str]:
    """Return a setting of components as its check left it."""
    given = value if isinstance(value, Mapping) else {}
    return {name: str(item) for name, item in given.items()}


def _read_weights(index: PipelineIndex, args: ServerArgs, device: torch.device) -> Any:
    """Load the pipeline to the CPU, or where what quantises it needs it."""
    chosen = pick_dtype(args.dtype, device)
    dtypes, ways = _dtypes(index, args.dtype, chosen), _by_component(args.quantize)
    files = {name: way for name, way in ways.items() if way.lower().endswith(".gguf")}
    given = {name: load_gguf(index, name, file, chosen) for name, file in files.items()}
    for name, file in _by_component(args.transformer_weights_path).items():
        given[name] = load_weights(index, name, file, dtypes.get(name, chosen))
    configs = {
        name: quantization_config(index.components[name][0], way, chosen)
        for name, way in ways.items()
        if name not in files
    }
    given |= load_text_models(index.model_path, index.components, dtypes, configs)
    own = {name: config for name, config in configs.items() if name not in given}
    if own:
        from diffusers import PipelineQuantizationConfig

        given["quantization_config"] = PipelineQuantizationConfig(quant_mapping=own)
    return index.pipeline_class.from_pretrained(  # type: ignore[attr-defined]
        index.model_path, **given, dtype=dtypes
    )


def _place(pipe: Any, args: ServerArgs, device: torch.device) -> None:
    """Put the pipeline on the device, or what runs of it, while it runs."""
    try:
        if args.offload == "none":
            pipe.to(device)
        elif args.offload == "model":
            pipe.enable_model_cpu_offload(device=device)
        elif args.offload == "sequential":
            pipe.enable_sequential_cpu_offload(device=device)
        else:
            by_block = args.offload == "block"
            folder = args.offload_folder
            pipe.enable_group_offload(
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type="block_level" if by_block else "leaf_level",
                num_blocks_per_group=1 if by_block else None,
                use_stream=device.type == "cuda",  # the next ones on their way while one runs
                offload_to_disk_path=None
                if folder is None
                else str(expanded(folder, "--offload-folder")),
            )
    except (ValueError, NotImplementedError) as error:  # quantised weights that must not move
        raise UsageError(
            f"--offload must be one that this {type(pipe).__name__} can have, got {args.offload}: "
            f"{first_line(error)}"
        ) from error


def check_folder(model_path: str, components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse components without the files that transformers makes up where they are missing.

    Args:
        model_path: a folder, or a hub id, which is not looked at.
        components: (library, class name) by component.

    Raises:
        UsageError: a tokenizer has no words, or a model no config.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    folder = Path(model_path)
    for name, (library, class_name) in components.items() if folder.is_dir() else ():
        found = class_of(library, class_name)
        files: tuple[str, ...] = ()
        if found is not None and issubclass(found, PreTrainedModel):
            files = ("config.json",)
        elif found is not None and issubclass(found, PreTrainedTokenizerBase):
            own = tuple(found.vocab_files_names.values())
            files = tuple(dict.fromkeys((*own, *_TOKENIZERS))) if own else ()
        if files and not any((folder / name / file).is_file() for file in files):
            raise UsageError(
                f"the pipeline at {model_path!r} must have {' or '.join(files)} in {name}, which "
                f"has none; download it again"
            )


def load_text_models(
    model_path: str,
    components: Mapping[str, tuple[str, str]],
    dtypes: Mapping[str, torch.dtype],
    configs: Mapping[str, Any],
) -> dict[str, Any]:
    """Load the components that are models of transformers.

    Args:
        model_path: folder or hub id.
        components: (library, class name) by component.
        dtypes: by component, and "default" for the others.
        configs: what quantises them, by component.

    Returns:
        Models by component, in evaluation mode, on the CPU.

    Raises:
        UsageError: the weights of a model lack parameters; transformers would draw them at random.
    """
    from transformers import PreTrainedModel

    loaded = {}
    for name, (library, class_name) in components.items():
        found = class_of(library, class_name)
        if library != "transformers" or found is None or not issubclass(found, PreTrainedModel):
            continue
        quantized = {"quantization_config": configs[name]} if name in configs else {}
        model, info = found.from_pretrained(
            model_path,
            subfolder=name,
            dtype=dtypes.get(name, dtypes["default"]),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told here
            **quantized,
        )
        for key, found_shape, wanted in sorted(info["mismatched_keys"])[:1]:
            raise UsageError(
                f"{key} of component {name} of {model_path!r} must have the shape "
                f"{tuple(wanted)} of its config, got weights of {tuple(found_shape)}; download the "
                f"component again"
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
        reason = reason and f" ({first_line(error).partition('. ')[0]})"
    raise UsageError(
        f"--device must be a torch device of this machine ({', '.join(_devices())}), got "
        f"{short(device)}{reason}"
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


def _incomplete(model_path: str, name: str, missing: Collection[str]) -> UsageError:
    return UsageError(
        f"the weights of {name} at {model_path!r} must hold every parameter of its config, missing "
        f"{listed(sorted(missing))}; download the component again"
    )


def _devices() -> tuple[str, ...]:
    """Return the devices of this machine by torch's names."""
    kind = current_platform().device_type
    if kind == "cpu":
        return ("cpu",)
    count = getattr(torch.get_device_module(kind), "device_count", lambda: 1)()
    return ("cpu", *(f"{kind}:{n}" for n in range(count)))


def _dtypes(index: PipelineIndex, asked: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return dtypes by component: Wan's autoencoder loses detail in half precision."""
    of_vae = {"vae": torch.float32} if asked == "auto" and index.name.startswith("Wan") else {}
    return {"default": dtype, **of_vae}


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Keep the loading bars of both libraries out of logs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    with ExitStack() as undo:
        for library in (diffusers_logging, transformers_logging):
            if library.is_progress_bar_enabled() and not is_shown():
                library.disable_progress_bar()
                undo.callback(library.enable_progress_bar)
        yield


def _is_of_trained_layers(message: str) -> bool:
    """Tell whether a message is about weights alone that are read when an attention attaches."""
    _, unused, names = message.partition(" were not used when initializing ")
    listed = names.partition("['")[2].partition("']")[0].split(", ")
    return bool(unused) and all(TRAINED_LAYERS & set(name.split(".")) for name in listed)


def _tile_vae(pipe: Any) -> None:
    enable = getattr(getattr(pipe, "vae", None), "enable_tiling", None)
    if enable is None:
        raise UsageError(
            f"--vae-tiling must be left out for {type(pipe).__name__}: its autoencoder cannot "
            f"decode in tiles"
        )
    enable()
