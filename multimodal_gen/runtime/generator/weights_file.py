"""Weights of a component from a file of their own, as trained and distilled models are published.

The pipeline's folder says what the component is; the file has its parameters, under the names of
diffusers, of the authors of the model where diffusers converts them, or of FastVideo, alone or
beside what else a trainer saves. Every parameter has to be there, in its shape, and nothing else
may be, but the layers that sparse methods train, which go with the model: see
`integrations.trained_layers`.
"""

import math
import re
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import UsageError, listed
from multimodal_gen.runtime.generator.index import PipelineIndex, class_of, class_of_component
from multimodal_gen.runtime.generator.library_errors import described, told
from multimodal_gen.settings import expanded

TRAINED_LAYERS = frozenset({"to_gate_compress", "proj_l"})
"""Layers that sparse methods train; attaching reads them."""
TRAINED = "trained_parameters"
"""Attribute of a model from a file: the parameters of its trained layers, by name."""

_FLAG = "--transformer-weights-path"
_SAFETENSORS = ".safetensors"
_SHOWN = 5
# Where trainers put the weights of a model; the averaged ones are what is meant to be used.
_HOLDERS = ("generator_ema", "generator", "state_dict", "model", "module", "net")
# What all names may begin with, and what wrappers put between their parts.
_PREFIXES = ("model.", "diffusion_model.", "module.", "net.", "generator.", "transformer.")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
# FastVideo's names of Wan's parameters, where they differ from those of diffusers.
_FASTVIDEO = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^patch_embedding\.proj\.", "patch_embedding."),
        (r"^(condition_embedder\.text_embedder)\.fc_in\.", r"\1.linear_1."),
        (r"^(condition_embedder\.text_embedder)\.fc_out\.", r"\1.linear_2."),
        (r"^(condition_embedder\.time_embedder)\.mlp\.fc_in\.", r"\1.linear_1."),
        (r"^(condition_embedder\.time_embedder)\.mlp\.fc_out\.", r"\1.linear_2."),
        (r"^condition_embedder\.time_modulation\.linear\.", "condition_embedder.time_proj."),
        (r"^(condition_embedder\.image_embedder\.ff)\.fc_in\.", r"\1.net.0.proj."),
        (r"^(condition_embedder\.image_embedder\.ff)\.fc_out\.", r"\1.net.2."),
        (r"^(blocks\.\d+)\.(to_[qkv]|norm_[qk])\.", r"\1.attn1.\2."),
        (r"^(blocks\.\d+)\.to_out\.(weight|bias)$", r"\1.attn1.to_out.0.\2"),
        (r"^(blocks\.\d+\.attn2)\.to_out\.(weight|bias)$", r"\1.to_out.0.\2"),
        (r"^(blocks\.\d+\.ffn)\.fc_in\.", r"\1.net.0.proj."),
        (r"^(blocks\.\d+\.ffn)\.fc_out\.", r"\1.net.2."),
        (r"^(blocks\.\d+)\.self_attn_residual_norm\.norm\.", r"\1.norm2."),
    )
)


def check_weights(
    index: PipelineIndex, files: Mapping[str, str], quantized: Collection[str]
) -> None:
    """Refuse files that cannot be loaded, before weights are.

    Args:
        index: the pipeline.
        files: file or folder by component.
        quantized: components that are quantised while they are loaded.

    Raises:
        UsageError: there is no such component or file, it is no model of diffusers, or it is
            quantised.
    """
    from diffusers import ModelMixin

    for name, file in files.items():
        flag = f"{_FLAG} {name}={file}"
        found, class_name = class_of_component(index, name, _FLAG)
        if found is None or not issubclass(found, ModelMixin):
            raise UsageError(f"{flag} must name a model of diffusers, got {name}, a {class_name}")
        if name in quantized:
            raise UsageError(f"{flag} must not be given with --quantize {name}; leave one out")
        path = expanded(file, _FLAG)
        if path.suffix.lower() == ".gguf":
            raise UsageError(f"{flag} must not be a file in GGUF; give --quantize {name}={file}")
        if not path.is_file() and not weight_files(path):
            raise UsageError(
                f"{flag} must name an existing file, or a folder with files in {_SAFETENSORS}, got "
                f"{str(path)!r}"
            )


def load_weights(index: PipelineIndex, name: str, file: str, dtype: torch.dtype) -> Any:
    """Load a component of the pipeline with the weights of a file.

    Args:
        index: the pipeline, whose config of the component is used.
        name: the component.
        file: the file, or a folder of them in safetensors.
        dtype: what weights are kept in that the model does not keep in fp32.

    Returns:
        The model, in evaluation mode, on the CPU; its attribute `TRAINED` has the parameters of
        trained layers, in the dtype of the file.

    Raises:
        UsageError: the file does not hold the weights of the component; lists what differs.
    """
    from accelerate import init_empty_weights

    cls: Any = class_of(*index.components[name])
    flag = f"{_FLAG} {name}={file}"
    with told(lambda error: f"{flag} could not be loaded: {described(error)}"):
        with init_empty_weights():  # buffers are made all the same
            model = cls.from_config(cls.load_config(index.model_path, subfolder=name))
        wanted = {key: value.shape for key, value in model.state_dict().items()}
        state = _named(model, _tensors(_read(expanded(file, _FLAG)), flag), wanted)
        trained = {
            key: state.pop(key)
            for key in sorted(state.keys() - wanted)
            if TRAINED_LAYERS.intersection(key.split("."))
        }
        _check(state, wanted, f"{flag} must hold the weights of this {cls.__name__}")
        fp32 = set(cls._keep_in_fp32_modules or ())
        for key, value in state.items():
            if value.is_floating_point():
                kept = not fp32.isdisjoint(key.split("."))
                state[key] = value.to(torch.float32 if kept else dtype)
        model.load_state_dict(state, assign=True)
    setattr(model, TRAINED, trained)
    return model.eval()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, in order; pipes and devices are none."""
    return sorted(path for path in folder.glob(f"*{_SAFETENSORS}") if path.is_file())


def _read(path: Path) -> Any:
    """Return what a file holds, or the files of a folder; nothing in them is executed."""
    from safetensors.torch import load_file

    if path.is_dir():
        return {key: value for file in weight_files(path) for key, value in load_file(file).items()}
    if path.suffix.lower() == _SAFETENSORS:
        return load_file(path)
    mapped = zipfile.is_zipfile(path)  # an older form cannot be
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _tensors(found: Any, flag: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a model among what a file holds, without what all names begin with."""
    while isinstance(found, Mapping):
        inner = next((found[x] for x in _HOLDERS if isinstance(found.get(x), Mapping)), None)
        if inner is None:
            break
        found = inner
    given = found if isinstance(found, Mapping) else {}
    if not (given and all(isinstance(value, torch.Tensor) for value in given.values())):
        raise UsageError(
            f"{flag} must hold tensors by name, alone or as one of {', '.join(_HOLDERS)}, got a "
            f"{type(found).__name__}{f' ({listed([*given], _SHOWN)})' if given else ''}"
        )
    state = {_WRAPPERS.sub("", key): value for key, value in given.items()}
    while prefix := next((x for x in _PREFIXES if all(key.startswith(x) for key in state)), ""):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _named(
    model: Any, state: dict[str, torch.Tensor], wanted: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return tensors under the names of diffusers: those that most parameters of a model have."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    def hits(known: Mapping[str, torch.Tensor]) -> int:
        return len(wanted.keys() & known)

    named = max(state, _without_fastvideos_names(state), key=hits)
    single = SINGLE_FILE_LOADABLE_CLASSES.get(type(model).__name__)
    if single is not None and hits(named) < len(wanted) / 2:
        with suppress(Exception):  # which it raises in any way where it does not know the names
            converted = single["checkpoint_mapping_fn"](config=model.config, checkpoint=dict(state))
            named = max(named, converted, key=hits)
    key = "patch_embedding.weight"  # a linear layer of whole patches is a convolution of them
    shape, found = wanted.get(key, ()), named.get(key)
    if found is not None and found.ndim == 2 and found.shape[1] == math.prod(shape[1:]):
        named[key] = found.reshape(-1, *shape[1:])
    return named


def _without_fastvideos_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        for pattern, name in _FASTVIDEO:
            key = pattern.sub(name, key)
        found[key] = value
    return found


def _check(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size], start: str) -> None:
    """Refuse weights that are not those of a model."""
    shapes = [
        f"{key} {list(state[key].shape)} in place of {list(shape)}"
        for key, shape in wanted.items()
        if key in state and state[key].shape != shape
    ]
    different = {
        "missing": sorted(wanted.keys() - state),
        "unexpected": sorted(state.keys() - wanted),
        "of another shape": sorted(shapes),
    }
    found = [
        f"{len(keys)} {what} ({listed(keys, _SHOWN)})" for what, keys in different.items() if keys
    ]
    if found:
        remedy = "take the file of another model, or this model from another folder"
        if any(key.endswith(".int8_weight") for key in state):
            remedy = "its layers are quantised: take the file without -quant"
        raise UsageError(f"{start}: {'; '.join(found)}; {remedy}")
