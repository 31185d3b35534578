"""Low-rank adapters (LoRA) of a loaded pipeline: every tensor of their files has its place.

diffusers says in a log, if at all, that a file does not fit the model; what it left out is missing
in the result. Here such files are refused.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator.index import HUB_ID, first_line, is_out_of_memory
from multimodal_gen.runtime.setting import expanded

__all__ = ["Lora", "add_loras", "check_loras", "read_loras"]

_SCALE = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_SHOWN = 3
_MOST = 200  # characters of another library's message


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """One adapter.

    Attributes:
        path: a file, a folder that holds one, or a hub id.
        scale: what its weights are multiplied by.
    """

    path: str
    scale: float = 1.0


def read_loras(texts: Sequence[str]) -> tuple[Lora, ...]:
    """Return the adapters that `FILE[:SCALE]` texts name."""
    found = []
    for text in texts:
        match = _SCALE.fullmatch(text)
        # A file may be called so itself.
        if match is None or expanded(text, "--lora-path").exists():
            found.append(Lora(path=text))
        else:
            found.append(Lora(path=match["path"], scale=float(match["scale"])))
    return tuple(found)


def check_loras(pipeline_class: type, loras: Sequence[Lora]) -> None:
    """Refuse adapters that cannot be loaded, before weights are.

    Raises:
        UsageError: the pipeline takes none, or there is no such file.
        MissingDependencyError: peft is not installed.
    """
    if not loras:
        return
    if not hasattr(pipeline_class, "load_lora_weights"):
        raise UsageError(
            f"--lora-path must be left out for {pipeline_class.__name__}, which takes no LoRA, got "
            f"{loras[0].path!r}"
        )
    if find_spec("peft") is None:
        raise MissingDependencyError(
            "--lora-path needs peft; install with: pip install 'multimodal_gen[video]'"
        )
    for lora in loras:
        file = expanded(lora.path, "--lora-path")
        if file.is_file() or file.is_dir():
            continue
        if file.exists() or not HUB_ID.fullmatch(lora.path):
            raise UsageError(
                f"--lora-path must be an existing file or folder, or a hub id, got {lora.path!r}"
            )


def add_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Load adapters and set their scales.

    Raises:
        UsageError: a file cannot be read, or holds tensors that the pipeline has no place for.
    """
    names = [f"lora_{number}" for number in range(1, len(loras) + 1)]
    for name, lora in zip(names, loras, strict=True):
        with _explained(pipe, lora), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
            held = pipe.lora_state_dict(_location(lora))
            pipe.load_lora_weights(_location(lora), adapter_name=name)
        _check_placed(pipe, lora, name, held[0] if isinstance(held, tuple) else held)
    if loras:
        pipe.set_adapters(names, [lora.scale for lora in loras])


def _location(lora: Lora) -> str:
    file = expanded(lora.path, "--lora-path")
    return str(file) if file.exists() else lora.path


@contextmanager
def _explained(pipe: Any, lora: Lora) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # files that do not fit fail in every way there is
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"--lora-path must be a LoRA for {type(pipe).__name__}, got {lora.path!r}, which could "
            f"not be loaded: {type(error).__name__}: {first_line(error)[:_MOST]}"
        ) from error


def _check_placed(pipe: Any, lora: Lora, name: str, held: dict[str, Any]) -> None:
    """Refuse a file of which tensors were left out."""
    placed = {
        f"{component}.{key.replace(f'.{name}.', '.')}"
        for component, model in pipe.components.items()
        if isinstance(model, torch.nn.Module)
        for key in model.state_dict()
        if f".{name}." in key
    }
    wanted = [key for key in held if ".lora_" in key]
    if placed and len(placed) >= len(wanted):
        return
    missing = sorted(set(wanted) - placed) or wanted
    shown = ", ".join(missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise UsageError(
        f"--lora-path must be a LoRA for {type(pipe).__name__}, got {lora.path!r}, of which "
        f"{len(wanted) - len(placed)} of {len(wanted)} tensors have no place in the model: "
        f"{shown}{more}"
    )
