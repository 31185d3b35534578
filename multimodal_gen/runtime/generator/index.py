"""What `model_index.json` says of a pipeline, read before any weight."""

import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from multimodal_gen.errors import MissingDependencyError, UsageError, first_line, nearest, short
from multimodal_gen.files import MalformedError, read_small_file
from multimodal_gen.runtime.generator.library_errors import blamed_for, told
from multimodal_gen.runtime.generator.model_folder import (
    LIBRARIES,
    check_classes,
    check_code,
    check_files,
)
from multimodal_gen.runtime.generator.output import Kind
from multimodal_gen.runtime.generator.quiet import without
from multimodal_gen.runtime.generator.signatures import arguments_of
from multimodal_gen.runtime.model_path import INDEX, locate

_HUB_TRIES = "huggingface_hub.utils._http"  # tells of each; what the last one met is in the error


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
    def read(cls, model_path: str, pipeline_class_name: str | None = None) -> "PipelineIndex":
        """Read the index of a pipeline.

        Args:
            model_path: folder or hub id.
            pipeline_class_name: the class to use instead of the one that the index names.

        Raises:
            UsageError: there is no such pipeline, or this diffusers does not know its class.
            MissingDependencyError: diffusers is not installed.
        """
        location = locate(model_path)
        diffusers = import_diffusers()
        config = read_config(location)
        check_code(location, components_in(config, dotted=True))
        components = components_in(config)
        check_files(location, components)
        own = config.get("_class_name")
        pipeline_class = _imported(diffusers, pipeline_class_name or own)
        if pipeline_class is None:
            raise _no_pipeline(diffusers, own, model_path, pipeline_class_name)
        check_classes(pipeline_class, location, components)
        return cls(model_path=location, pipeline_class=pipeline_class, components=components)

    @property
    def name(self) -> str:
        """Name of the pipeline class."""
        return self.pipeline_class.__name__

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What calling the pipeline takes."""
        parameters = dict(arguments_of(self.pipeline_class.__call__))
        parameters.pop("self", None)
        return parameters

    @property
    def kind(self) -> Kind:
        """What the pipeline makes: only video pipelines take frames, or have the word in a name."""
        told = any(name in self.parameters for name in ("num_frames", "video", "pose_video"))
        return "video" if told or "Video" in self.name else "image"


def class_of(library: str, class_name: str) -> Any:
    """Return the class of a component, or None for one that is not these libraries' own."""
    found = getattr(import_module(library), class_name, None) if library in LIBRARIES else None
    return found if isinstance(found, type) else None


def class_of_component(index: "PipelineIndex", name: str, flag: str) -> tuple[Any, str]:
    """Return the class, as `class_of` does, of a component that a flag names, and its name.

    Raises:
        UsageError: the pipeline has no such component.
    """
    if name not in index.components:
        valid = sorted(index.components)
        raise UsageError(
            f"{flag} must name a component of {index.name} ({', '.join(valid)}), got "
            f"{short(name)}{nearest(name, valid)}"
        )
    library, class_name = index.components[name]
    return class_of(library, class_name), class_name


def components_in(config: Mapping[str, Any], *, dotted: bool = False) -> dict[str, tuple[str, str]]:
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


def _no_pipeline(diffusers: Any, own: object, model_path: str, named: str | None) -> UsageError:
    """Return the error for a class that is no pipeline: of the index, or that the user named."""
    if named is not None:
        valid = [each for each in dir(diffusers) if each.endswith("Pipeline")]
        return UsageError(
            f"--pipeline-class-name must be a pipeline of diffusers {diffusers.__version__}, got "
            f"{short(named)}{nearest(named, valid)}"
        )
    known = isinstance(own, str) and hasattr(diffusers, own)
    return UsageError(
        f"the pipeline class of {model_path!r} must be one that diffusers "
        f"{diffusers.__version__} has, got {short(own)}, which is "
        f"{'no pipeline' if known else 'no class of it'}; check _class_name in its "
        f"{INDEX}, a newer diffusers may have it"
    )


def _imported(diffusers: Any, name: object) -> type | None:
    """Return the class of that name, if it is a pipeline's."""
    found = _of_diffusers(diffusers, name) if isinstance(name, str) else None
    base = _of_diffusers(diffusers, "DiffusionPipeline")
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    missing = getattr(found, "_backends", None)
    if missing:
        raise MissingDependencyError(
            f"{name} of diffusers needs further packages; install {', '.join(missing)}"
        )
    return None


def _of_diffusers(diffusers: Any, name: str) -> Any:
    """Return what diffusers has of that name, which it imports only now, or None."""
    try:
        with without("transformers.utils.import_utils", lambda text: "torchvision" in text):
            return getattr(diffusers, name, None)
    except (ImportError, RuntimeError, OSError) as error:
        # diffusers and transformers import other packages that they find, whatever their release,
        # and wrap what goes wrong there.
        cause = root_of(error)
        package = blamed_for(cause, "multimodal_gen")
        where, remedy = (
            "",
            "reinstall what is broken, e.g. with: pip install 'multimodal_gen[video]'",
        )
        if package not in ("", "diffusers", "transformers"):
            where = f" in the package {package}"
            remedy = (
                f"install a release of {package} that is made for torch {torch.__version__} and "
                f"the other packages, or remove {package}"
            )
        raise MissingDependencyError(
            f"{name} of diffusers must import, it failed{where}: "
            f"{textwrap.shorten(str(cause), 300, placeholder=' ...')}; {remedy}"
        ) from error


def read_config(location: str, file: str = INDEX) -> dict[str, Any]:
    """Return what a config holds of a folder, or of a repository on the Hub.

    Raises:
        UsageError: there is none, the Hub does not give it, or it holds something else.
    """
    path = Path(location) / file
    if not Path(location).is_dir():
        with without(_HUB_TRIES, lambda _: True), told(partial(_not_given, location, file)):
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(location, file))
    with told(
        lambda error: f"{file} of {location!r} must be a JSON file that holds an object: {error}"
    ):
        config = json.loads(read_small_file(path))
        if not isinstance(config, dict):
            raise MalformedError(f"this holds a {type(config).__name__}")
        return config


def _not_given(location: str, file: str, error: Exception) -> str:
    """Return why the Hub gave no file; what its library says hides that there is no network."""
    reason, root = f"{type(error).__name__}: {first_line(error)}", root_of(error)
    if type(error).__name__ == "LocalEntryNotFoundError":
        reason = f"this machine does not reach the Hub: {first_line(root)}"
    return (
        f"--model-path must be an existing pipeline folder or a reachable hub id, got "
        f"{location!r}: there is no such folder, it is not in the cache, and the Hugging Face "
        f"Hub did not give its {file}; check the spelling, the network and for gated models "
        f"`hf auth login` ({reason})"
    )


def root_of(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    return error if error.__cause__ is None else root_of(error.__cause__)
