"""Low-rank adapters (LoRA) of a loaded pipeline: every tensor of their files has its place.

diffusers says in a log, if at all, that a file does not fit the model, or that it takes a part of
it alone; what it left out is missing in the result. Here such files are refused. What a repository
on the Hub lost when diffusers renamed its tensors is not seen.

Of a pipeline with two experts, such as Wan 2.2, diffusers adds a file to the first one unless it is
told otherwise; here that is chosen behind an @, or said.
"""

import math
import re
import textwrap
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError, first_line, listed, short
from multimodal_gen.runtime.generator.library_errors import told
from multimodal_gen.runtime.generator.quiet import without
from multimodal_gen.runtime.model_path import HUB_ID
from multimodal_gen.settings import expanded

_TARGET = re.compile(r"(?P<rest>.+)@(?P<target>\w+)")
_SCALE = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """One adapter.

    Attributes:
        path: as it was given: a file, a folder that holds one, or a hub id.
        file: the file, or None for a hub id.
        scale: what its weights are multiplied by; finite.
        target: the component that it is added to, or "both"; None for diffusers' choice.
    """

    path: str
    file: Path | None
    scale: float
    target: str | None


def read_loras(texts: Sequence[str]) -> tuple[Lora, ...]:
    """Return the adapters that `FILE[:SCALE][@COMPONENT]` texts name.

    Raises:
        UsageError: a scale is beyond all floats; there is no such file, or a folder has several.
    """
    return tuple(map(_read, texts))


def _read(text: str) -> Lora:
    # A file may be called so itself.
    rest, target, scale = text, None, 1.0
    if not _exists(rest) and (match := _TARGET.fullmatch(rest)):
        rest, target = match["rest"], match["target"]
    if not _exists(rest) and (match := _SCALE.fullmatch(rest)):
        rest, scale = match["path"], float(match["scale"])
    if not math.isfinite(scale):
        raise UsageError(f"--lora-path must have a finite scale, got {short(text)}")
    return Lora(path=rest, file=_file_of(rest), scale=scale, target=target)


def _exists(path: str) -> bool:
    return expanded(path, "--lora-path").exists()


def _file_of(path: str) -> Path | None:
    """Return the file of an adapter, or None for a hub id."""
    file = expanded(path, "--lora-path")
    if file.is_dir():
        return _only_file(file)
    if file.is_file():
        return file
    if file.exists() or not HUB_ID.fullmatch(path) or path.lower().endswith(_WEIGHTS):
        raise UsageError(
            f"--lora-path must be an existing file or folder, or a hub id, got {short(path)}"
        )
    return None


def check_loras(pipeline_class: type, components: Collection[str], loras: Sequence[Lora]) -> None:
    """Refuse adapters that cannot be loaded, before weights are.

    Args:
        pipeline_class: the pipeline.
        components: the names of what it has.
        loras: the adapters.

    Raises:
        UsageError: the pipeline takes none, or there is no such component.
        MissingDependencyError: peft is not installed.
    """
    if not loras:
        return
    if not hasattr(pipeline_class, "load_lora_weights"):
        raise UsageError(
            f"--lora-path must be left out for {pipeline_class.__name__}, which takes no LoRA, got "
            f"{short(loras[0].path)}"
        )
    if find_spec("peft") is None:
        raise MissingDependencyError(
            "--lora-path needs peft; install with: pip install 'multimodal_gen[video]'"
        )
    experts = _experts(pipeline_class, components)
    choices = (*experts, "both") if len(experts) > 1 else experts
    for lora in loras:
        if lora.target is not None and lora.target not in choices:
            raise UsageError(
                f"--lora-path must name a component of {pipeline_class.__name__} that takes a LoRA "
                f"behind the @, {' or '.join(choices)}, got {short(lora.target)} for "
                f"{short(lora.path)}"
            )


def _experts(pipeline_class: type, components: Collection[str]) -> tuple[str, ...]:
    """Return the denoisers that diffusers can add an adapter to, the first one unasked."""
    loadable = getattr(pipeline_class, "_lora_loadable_modules", ())
    names = ("unet", "transformer", "transformer_2")
    return tuple(name for name in names if name in loadable and name in components)


def not_reached(pipe: Any, loras: Sequence[Lora]) -> tuple[str, ...]:
    """Return a sentence for each adapter that was added to one of two experts, unasked.

    Args:
        pipe: the pipeline that the adapters were added to.
        loras: the adapters, in that order.
    """
    found = []
    for number, lora in enumerate(loras, 1):
        places = {name: _places(getattr(pipe, name), _name(number)) for name in _experts_of(pipe)}
        reached = [name for name, tensors in places.items() if tensors]
        rest = [name for name in places if name not in reached]
        if lora.target is None and reached and rest:
            found.append(
                f"the LoRA {lora.path} reached {reached[0]} alone, not {rest[0]}; choose with "
                f"--lora-path FILE:SCALE@{rest[0]}, or @both"
            )
    return tuple(found)


def _experts_of(pipe: Any) -> tuple[str, ...]:
    return _experts(type(pipe), [name for name, it in pipe.components.items() if it is not None])


def _name(number: int) -> str:
    """Return diffusers' name of an adapter."""
    return f"lora_{number}"


def _places(model: torch.nn.Module, name: str) -> set[str]:
    """Return where an adapter has tensors in a model, as its file calls them."""
    return {key.replace(f".{name}.", ".") for key in model.state_dict() if f".{name}." in key}


def add_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Load adapters and set their scales.

    Raises:
        UsageError: a file cannot be read, or holds tensors that the pipeline has no place for.
    """
    names = [_name(number) for number in range(1, len(loras) + 1)]
    for name, lora in zip(names, loras, strict=True):
        with (
            told(partial(_failure, pipe, lora)),
            warnings.catch_warnings(),
            without("diffusers.loaders.peft", lambda text: "was unsuccessful" in text),
        ):
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
            given = None if lora.file is None else _tensors(lora.file)
            held = pipe.lora_state_dict(lora.path if given is None else dict(given))
            held = held[0] if isinstance(held, tuple) else held
            _check_kept(pipe, lora, given or {}, held)
            _check_finite(lora, held)
            # diffusers leaves biases that only some layers have without values otherwise.
            biased = any(key.endswith(".bias") for key in held)
            options = {"low_cpu_mem_usage": False} if biased else {}
            for target in _experts_of(pipe) if lora.target == "both" else (lora.target,):
                if target == "transformer_2":
                    options["load_into_transformer_2"] = True
                pipe.load_lora_weights(str(lora.file or lora.path), adapter_name=name, **options)
                _check_placed(pipe, lora, name, held, target)
    if loras:
        pipe.set_adapters(names, [lora.scale for lora in loras])


def _only_file(folder: Path) -> Path:
    """Return the weights in a folder; those named as diffusers names them count before others."""
    for suffix in _WEIGHTS:
        found = sorted(file for file in folder.glob(f"*{suffix}") if file.is_file())
        own = [file for file in found if file.name == f"pytorch_lora_weights{suffix}"]
        if len(own or found) > 1:
            names = ", ".join(file.name for file in found)
            raise UsageError(
                f"--lora-path must name one file, got the folder {str(folder)!r} with {names}"
            )
        if found:
            return (own or found)[0]
    raise UsageError(
        f"--lora-path must be a folder with a file in .safetensors, got {str(folder)!r} without one"
    )


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return what a file has, by its own names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError:
        if file.suffix.lower() == _WEIGHTS[0]:
            raise
    found: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def _check_kept(
    pipe: Any, lora: Lora, given: dict[str, torch.Tensor], held: dict[str, torch.Tensor]
) -> None:
    """Refuse a file with tensors other than those of low rank that diffusers did not take.

    Such are the magnitudes of DoRA and changes of whole weights. Zeros change nothing.

    Args:
        pipe: the pipeline.
        lora: the adapter.
        given: its tensors, by the names of the file.
        held: what diffusers made of them.
    """
    kept = {x.data_ptr() for x in held.values()}
    lost = [
        name
        for name, x in given.items()
        if ("dora_scale" in name or name.endswith((".diff", ".diff_b")))
        and x.data_ptr() not in kept
        and bool(x.any())
    ]
    if lost:
        raise UsageError(_unplaced(pipe, lora, lost, len(given)))


def _failure(pipe: Any, lora: Lora, error: Exception) -> str:
    line = textwrap.shorten(first_line(error), 200, placeholder=" ...")
    return (
        f"--lora-path must be a LoRA for {type(pipe).__name__}, got {short(lora.path)}, which "
        f"could not be loaded: {type(error).__name__}: {line}"
    )


def _check_finite(lora: Lora, held: dict[str, Any]) -> None:
    """Refuse weights that are NaN or infinite: they change the output, or leave none."""
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
            raise UsageError(
                f"--lora-path must have finite weights, got NaN or infinity in {key} of "
                f"{short(lora.path)}; download it again"
            )


def _check_placed(
    pipe: Any, lora: Lora, name: str, held: dict[str, Any], target: str | None
) -> None:
    """Refuse a file of which tensors were left out, of one component or of all."""
    placed = {
        f"{component}.{key}"
        for component, model in pipe.components.items()
        if isinstance(model, torch.nn.Module) and target in (None, component)
        for key in _places(model, name)
    }
    wanted = [key for key in held if ".lora_" in key]
    if target == "transformer_2":  # for which diffusers takes the names of the first one
        wanted = [f"{target}.{key.partition('.')[2]}" for key in wanted]
    if placed and len(placed) >= len(wanted):
        return
    if not wanted:
        raise UsageError(
            f"--lora-path must be a LoRA for {type(pipe).__name__}, got {short(lora.path)}, "
            f"which has no tensors of one"
        )
    missing = sorted(set(wanted) - placed) or wanted
    raise UsageError(_unplaced(pipe, lora, missing, len(wanted)))


def _unplaced(pipe: Any, lora: Lora, missing: Sequence[str], total: int) -> str:
    return (
        f"--lora-path must be a LoRA for {type(pipe).__name__}, got {short(lora.path)}, of which "
        f"{len(missing)} of {total} tensors have no place in the model: {listed(missing)}"
    )
