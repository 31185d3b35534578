"""What a model folder may ask for: no code of its own, and the parts its pipeline needs.

A folder is data that others wrote. Its index names a library and a class per component, which
loading imports; some releases of diffusers import them from the folder itself. So both are checked
before anything is imported, whatever the release.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, get_args

from multimodal_gen.errors import UsageError, nearest, short
from multimodal_gen.runtime.generator.signatures import arguments_of

LIBRARIES: Final = ("diffusers", "transformers")
"""Libraries that components may be of, next to the modules of `diffusers.pipelines`."""

DENOISERS: Final = ("transformer", "unet")
"""What the names of components that denoise begin with."""

_PIPELINES = "diffusers.pipelines"

_MOST_BYTES = 16 << 20  # of a config


def check_code(model_path: str, components: Mapping[str, tuple[str, str]]) -> None:
    """Refuse an index that would have anything but known libraries imported.

    Args:
        model_path: folder or hub id.
        components: (library, class name) by component.

    Raises:
        UsageError: a component is of another library, has code of its own, or no name.
    """
    folder = Path(model_path)
    for name, (library, class_name) in components.items():
        where = f"component {short(name)} of {model_path!r}"
        if not name.isidentifier():
            raise UsageError(f"{where} must have a name of letters, digits and _")
        if library not in LIBRARIES and not _is_pipeline_module(library):
            raise UsageError(
                f"{where} must be of {', '.join(LIBRARIES)} or a module of {_PIPELINES}, got "
                f"{short(library)}; nothing of that name was imported{nearest(library, LIBRARIES)}"
            )
        if not class_name.isidentifier():
            raise UsageError(f"{where} must name a class of {library}, got {short(class_name)}")
        own = folder / name / f"{library}.py"
        if own.exists() or own.is_symlink():
            raise UsageError(
                f"{where} must have no code of its own, got {own.name!r} in its folder, which "
                f"diffusers could run; remove it"
            )


def check_files(model_path: str, components: Mapping[str, object]) -> None:
    """Refuse what may never end, or is too large, where loading reads files.

    Raises:
        UsageError: a pipe, a device or the like lies among the files of a component, or a config is
            larger than any is.
    """
    for name in components:
        folder = Path(model_path) / name
        if not folder.is_dir():
            continue
        for file in folder.iterdir():
            where = f"{file.name} of component {name} of {model_path!r}"
            if not file.is_file() and not file.is_dir():  # a link to itself or to nowhere, too
                raise UsageError(f"{where} must be a regular file; download it again")
            if file.name.endswith("config.json") and file.stat().st_size > _MOST_BYTES:
                raise UsageError(
                    f"{where} must have at most {_MOST_BYTES} bytes, got {file.stat().st_size}; "
                    f"download it again"
                )


def _is_pipeline_module(library: str) -> bool:
    if not library.isidentifier() or library.startswith("_"):
        return False
    return find_spec(f"{_PIPELINES}.{library}") is not None


def check_classes(
    pipeline_class: type, model_path: str, components: Mapping[str, tuple[str, str]]
) -> None:
    """Refuse classes that a library lacks, and denoisers of another pipeline.

    Args:
        pipeline_class: the class that is to run.
        model_path: folder or hub id.
        components: (library, class name) by component.

    Raises:
        UsageError: names the component, its class and the one that is needed.
    """
    for name, (library, class_name) in components.items():
        if library not in LIBRARIES:
            continue
        module = import_module(library)
        given = getattr(module, class_name, None)
        if not isinstance(given, type):
            release = f"{library} {module.__version__}"
            found = f"which is none of {release}"
            if given is None:
                found = f"which {release} lacks; a newer one may have it"
            raise UsageError(
                f"component {name} of {model_path!r} must name a class of {library}, got "
                f"{class_name!r}, {found}"
            )
        wanted = _models(pipeline_class, name) if name.startswith(DENOISERS) else ()
        if wanted and not issubclass(given, wanted):
            raise UsageError(
                f"component {name} of {model_path!r} must be a "
                f"{' or a '.join(cls.__name__ for cls in wanted)}, as {pipeline_class.__name__} "
                f"has it, got a {class_name}; check model_index.json and --pipeline-class-name"
            )


def _models(pipeline_class: type, name: str) -> tuple[type, ...]:
    """Return the classes of models that a pipeline is constructed from; none if not known."""
    annotation = getattr(arguments_of(pipeline_class).get(name), "annotation", None)
    classes = get_args(annotation) or (annotation,)
    return tuple(cls for cls in classes if isinstance(cls, type) and hasattr(cls, "forward"))
