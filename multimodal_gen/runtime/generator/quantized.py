"""Components whose weights are quantised while they are loaded, or come quantised from a GGUF file.

The packages that do it are extras, imported only when they are asked for.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError
from multimodal_gen.runtime.generator.index import PipelineIndex, class_of, class_of_component
from multimodal_gen.runtime.generator.library_errors import described, told
from multimodal_gen.settings import expanded

_GGUF = ".gguf"
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
        found, class_name = class_of_component(index, name, "--quantize")
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
    with told(lambda error: f"{flag} must name a file in GGUF: {described(error)}"):
        _read_header(file)


def _read_header(file: Path) -> None:
    """Read a header as diffusers will, whose reader would go on behind the end of the file.

    Raises:
        ValueError: the file ends within what its header says, or the header is none.
    """
    from gguf import GGUFReader

    class Bounded(GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **kwargs: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **kwargs)
            if len(found) != count:
                raise ValueError("its header goes on behind the end of the file")
            return found

    Bounded(file)


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
    module = import_module(library)
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
    with told(
        lambda error: (
            f"--quantize {name}={file} must name a file with the weights of this {cls.__name__}, "
            f"loading it failed: {described(error)}"
        )
    ):
        return cls.from_single_file(
            str(expanded(file, "--quantize")),
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            config=index.model_path,
            subfolder=name,
            dtype=dtype,
        )
