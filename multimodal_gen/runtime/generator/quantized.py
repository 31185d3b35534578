"""Components whose weights are quantised while they are loaded, or come quantised from a GGUF file.

The packages that do it are extras, imported only when they are asked for.
"""

import os
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from multimodal_gen.errors import (
    MissingDependencyError,
    UsageError,
    first_line,
    is_out_of_memory,
    nearest,
)
from multimodal_gen.runtime.generator.index import (
    PipelineIndex,
    class_of,
    described,
    dtype_argument,
)
from multimodal_gen.settings import expanded

_GGUF = ".gguf"
# Types of entries in its header: those of a fixed size in bytes, by number, and the others.
_GGUF_SIZES: Final[Mapping[int, int]] = {
    **dict.fromkeys((0, 1, 7), 1),
    **dict.fromkeys((2, 3), 2),
    **dict.fromkeys((4, 5, 6), 4),
    **dict.fromkeys((10, 11, 12), 8),
}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_PACKAGES: Final[Mapping[str, str]] = {"bnb": "bitsandbytes", "torchao": "torchao", "gguf": "gguf"}


def check_quantized(index: PipelineIndex, ways: Mapping[str, str], device: torch.device) -> None:
    """Refuse what cannot be quantised so, before weights are loaded.

    Args:
        index: the pipeline.
        ways: by component, a name of `QUANTIZATIONS` or a file in GGUF.
        device: where the pipeline will run.

    Raises:
        UsageError: there is no such component or file, it is no model, or the device cannot.
        MissingDependencyError: a package is not installed.
    """
    for name, way in ways.items():
        flag = f"--quantize {name}={way}"
        if name not in index.components:
            valid = sorted(index.components)
            raise UsageError(
                f"--quantize must name a component of {index.name} ({', '.join(valid)}), got "
                f"{name!r}{nearest(name, valid)}"
            )
        library, class_name = index.components[name]
        found = class_of(library, class_name)
        if found is None or not issubclass(found, torch.nn.Module):
            raise UsageError(f"{flag} must name a model, got {name}, a {class_name}")
        package = _PACKAGES["gguf" if _is_file(way) else way.partition("-")[0]]
        if find_spec(package) is None:
            raise MissingDependencyError(
                f"{flag} needs {package}; install with: pip install 'multimodal_gen[quantize]'"
            )
        if _is_file(way):
            _check_gguf(flag, expanded(way, flag), found, class_name)
        else:
            _check_device(flag, way, device)


def _is_file(way: str) -> bool:
    return way.lower().endswith(_GGUF)


def _check_gguf(flag: str, file: Path, found: Any, class_name: str) -> None:
    if not hasattr(found, "from_single_file"):
        raise UsageError(
            f"{flag} must name a model that diffusers loads from single files, got a {class_name}; "
            f"quantise it with bnb-nf4 or torchao-int8 instead"
        )
    if not file.is_file():
        raise UsageError(f"{flag} must name an existing file, got {str(file)!r}")
    try:
        with file.open("rb") as opened:
            _check_header(opened, file.stat().st_size)
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{flag} must name a file in GGUF: {first_line(error)}") from error


def _check_header(file: BinaryIO, size: int) -> None:
    """Refuse a header that cannot be as long as it says; its reader would go on behind the end.

    Raises:
        ValueError: a number of entries is more than the file has room for, a type is unknown, or
            the rows of a tensor are not whole blocks of its type.
        struct.error: the file ends within the header.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    magic, version = _unpack(file, "4sI")
    if magic != b"GGUF" or version & 0xFFFF == 0:
        return  # no such file, or of other machines: the library says so at once
    num_tensors, num_entries = _unpack(file, "QQ")
    for _ in range(num_entries):
        _skip(file, _unpack(file, "Q")[0], size)
        _skip_value(file, _unpack(file, "I")[0], size)
    for _ in range(num_tensors):
        name = file.read(_fitting(_unpack(file, "Q")[0], size)).decode("utf-8", "replace")
        (num_axes,) = _unpack(file, "I")
        shape = _unpack(file, f"{_fitting(num_axes, size)}Q")
        kind, _ = _unpack(file, "IQ")
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape and shape[0] % block:
            raise ValueError(
                f"rows of tensor {name} must be whole blocks of {block}, as its type "
                f"{GGMLQuantizationType(kind).name} has them, got {shape[0]} values"
            )


def _skip_value(file: BinaryIO, kind: int, size: int) -> None:
    """Go on behind the value of an entry, of a type by its number."""
    if kind in _GGUF_SIZES:
        _skip(file, _GGUF_SIZES[kind], size)
    elif kind == _GGUF_TEXT:
        _skip(file, _unpack(file, "Q")[0], size)
    elif kind == _GGUF_ARRAY:
        inner, length = _unpack(file, "IQ")
        _fitting(length * _GGUF_SIZES.get(inner, 1), size)
        if inner in _GGUF_SIZES:
            _skip(file, length * _GGUF_SIZES[inner], size)
            return
        if inner != _GGUF_TEXT:
            raise ValueError(f"an array of its header has entries of type {inner}")
        for _ in range(length):
            _skip_value(file, inner, size)
    else:
        raise ValueError(f"an entry of its header has the unknown type {kind}")


def _unpack(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def _skip(file: BinaryIO, length: int, size: int) -> None:
    file.seek(_fitting(length, size), os.SEEK_CUR)


def _fitting(length: int, size: int) -> int:
    if length > size:
        raise ValueError(f"its header has {length} entries or bytes, the file {size} bytes")
    return length


def _check_device(flag: str, way: str, device: torch.device) -> None:
    if way.startswith("bnb") and device.type not in ("cuda", "xpu"):
        raise UsageError(
            f"{flag} must run on a GPU, got the device {device}; torchao-int8, torchao-fp8 and "
            f"GGUF files run on the CPU too"
        )
    if way != "torchao-fp8-dynamic":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (8, 9):
        actual = f"compute capability {capability[0]}.{capability[1]}" if capability[0] else device
        raise UsageError(
            f"{flag} must run on a GPU of compute capability 8.9 or later, got {actual}; try "
            f"torchao-fp8, which quantises the weights alone"
        )


def quantization_config(library: str, way: str, dtype: torch.dtype) -> Any:
    """Return what the library takes to quantise a component while it is loaded.

    Args:
        library: "diffusers" or "transformers", whose component it is.
        way: a name of `QUANTIZATIONS`.
        dtype: what is computed in.
    """
    import diffusers
    import transformers

    module: Any = {"diffusers": diffusers, "transformers": transformers}[library]
    if way == "bnb-nf4":
        return module.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if way == "bnb-int8":
        return module.BitsAndBytesConfig(load_in_8bit=True)
    from torchao import quantization

    settings = {
        "torchao-int8": "Int8WeightOnlyConfig",
        "torchao-fp8": "Float8WeightOnlyConfig",
        "torchao-fp8-dynamic": "Float8DynamicActivationFloat8WeightConfig",
    }
    return module.TorchAoConfig(getattr(quantization, settings[way])())


def load_gguf(index: PipelineIndex, name: str, file: str, dtype: torch.dtype) -> Any:
    """Load a component of the pipeline from a file in GGUF.

    Args:
        index: the pipeline, whose config of the component is used.
        name: the component.
        file: the file.
        dtype: what is computed in, and what unquantised weights are kept in.

    Raises:
        UsageError: the file does not hold the weights of the component.
    """
    from diffusers import GGUFQuantizationConfig

    cls = class_of(*index.components[name])
    try:
        model = cls.from_single_file(
            str(expanded(file, "--quantize")),
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            config=index.model_path,
            subfolder=name,
            **{dtype_argument(): dtype},
        )
    except Exception as error:  # in every way there is
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"--quantize {name}={file} must name a file with the weights of this {cls.__name__}, "
            f"loading it failed: {described(error)}"
        ) from error
    return model
