"""Images, videos and further arguments of a pipeline: from what users write to what its call takes.

Every flag for a file stands for the argument that the pipeline has for it; `--pipeline-arg` gives
any other by its own name. All of them are checked against the pipeline's signature, and the files
read, before weights are loaded.
"""

import types
from collections.abc import Collection, Mapping
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, Final

from multimodal_gen.errors import UsageError, first_line, nearest, short
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.library_errors import told
from multimodal_gen.runtime.generator.output import require_encoder
from multimodal_gen.runtime.generator.signatures import fits, spelled
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag, expanded

INPUTS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
    {
        "image_path": (
            *("image", "images", "input_images", "reference_images", "control_image"),
            *("cond_image", "example_image", "reference_image"),
        ),
        "last_image_path": ("last_image",),
        "video_path": ("video", "control_video"),
        "mask_path": ("mask_image", "mask", "mask_video", "control_mask"),
    }
)
"""Setting, and the names that pipelines give to it; the first one a pipeline has is used."""

_LISTS = ("images", "input_images", "reference_images")  # of these, one is a list too
_VIDEOS = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".gif")

_OF_IMAGES = ("--image-path", "--last-image-path")

# What `generate` decides itself, or has a flag of another name for.
_TAKEN: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "generator": "--seed gives",
        "frame_rate": "--fps gives",
        "num_images_per_prompt": "--num-outputs gives",
        "num_videos_per_prompt": "--num-outputs gives",
        "output_type": "is settled by what is written",
        "return_dict": "is settled by what is written",
        "callback_on_step_end": "is settled by what is written",
        "callback_on_step_end_tensor_inputs": "is settled by what is written",
    }
)
_MOST_TOKENS = 1 << 16  # of a prompt: no text encoder reads so many
_MOST = (1 << 31) - 1


def check_inputs(index: PipelineIndex, args: ServerArgs, settings: Collection[str]) -> None:
    """Check files and further arguments against the pipeline's signature; `read_inputs` reads them.

    Args:
        index: the pipeline.
        args: what was asked for.
        settings: arguments that have flags, which `--pipeline-arg` must leave alone.

    Raises:
        UsageError: the pipeline takes no such argument, or its value has the wrong type.
    """
    for setting in INPUTS:
        files = _files(args, setting)
        if files and _parameter(index, setting) is None:
            raise _takes_none(index, setting, files)
    _check_number(index, args)
    for name, value in _further(args).items():
        _check_argument(index, name, value, settings)


def given_arguments(index: PipelineIndex, args: ServerArgs) -> set[str]:
    """Return the names of the pipeline's arguments that files and `--pipeline-arg` give."""
    named = {_parameter(index, setting) for setting in INPUTS if _files(args, setting)}
    return {name for name in named if name} | set(_further(args))


def as_typed(args: ServerArgs) -> tuple[str, ...]:
    """Return the flags and values of files and further arguments, as users type them."""
    files = ((setting, file) for setting in INPUTS for file in _files(args, setting))
    found = [f"{as_flag(setting)} {file}" for setting, file in files]
    named = [f"{name}={short(value)}" for name, value in _further(args).items()]
    return (*found, *([f"--pipeline-arg {', '.join(named)}"] if named else []))


def how_to_give(index: PipelineIndex, name: str) -> str:
    """Return the flag that gives a pipeline's argument of that name, in words."""
    for setting in INPUTS:
        if _parameter(index, setting) == name:
            return as_flag(setting)
    return f"--pipeline-arg {name}=JSON, or {name}=@FILE for an image or video"


def read_inputs(index: PipelineIndex, args: ServerArgs) -> dict[str, Any]:
    """Return the arguments that files and `--pipeline-arg` give, ready for the call.

    Raises:
        UsageError: a file cannot be read, or is not what the pipeline takes.
        MissingDependencyError: what reads videos is not installed.
    """
    found: dict[str, Any] = {}
    for setting in INPUTS:
        name = _parameter(index, setting)
        media = [_read(as_flag(setting), file) for file in _files(args, setting)]
        if name is not None and media:
            found[name] = media if len(media) > 1 or name in _LISTS else media[0]
    for name, value in _further(args).items():
        file = _file_of(value)
        found[name] = _thawed(value) if file is None else _read(f"--pipeline-arg {name}", file)
    return found


def _files(args: ServerArgs, setting: str) -> tuple[Path, ...]:
    value: Any = getattr(args, setting)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple) else (value,)


def _parameter(index: PipelineIndex, setting: str) -> str | None:
    return next((name for name in INPUTS[setting] if name in index.parameters), None)


def _further(args: ServerArgs) -> Mapping[str, object]:
    return args.pipeline_arg if isinstance(args.pipeline_arg, Mapping) else {}


def _takes_none(index: PipelineIndex, setting: str, files: tuple[Path, ...]) -> UsageError:
    taken = [as_flag(each) for each in INPUTS if _parameter(index, each)]
    has = f"it takes {', '.join(taken)}" if taken else "it starts from text alone"
    return UsageError(
        f"{as_flag(setting)} must be left out for {index.name}, which has no such argument, got "
        f"{short(str(files[0]))}; {has}, another --pipeline-class-name may fit the same model"
    )


def _check_number(index: PipelineIndex, args: ServerArgs) -> None:
    """Refuse several images where the argument's type says that it is one."""
    files, name = _files(args, "image_path"), _parameter(index, "image_path")
    if len(files) < 2 or name is None or name in _LISTS:
        return
    if not fits(list(files), index.parameters[name].annotation):
        raise UsageError(
            f"--image-path must be given once for {index.name}, which starts from one image, got "
            f"{len(files)}"
        )


def _check_argument(
    index: PipelineIndex, name: str, value: object, settings: Collection[str]
) -> None:
    reason = _TAKEN.get(name)
    if reason is not None or name in settings:
        raise UsageError(
            f"--pipeline-arg must not give {name}, which {reason or as_flag(name) + ' gives'}"
        )
    parameter = index.parameters.get(name)
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in index.parameters.values())
    if parameter is None and not open_ended:
        valid = [each for each in index.parameters if each not in settings and each not in _TAKEN]
        raise UsageError(
            f"--pipeline-arg must name an argument of {index.name}, got {short(name)}"
            f"{nearest(name, valid) or '; it takes ' + ', '.join(valid)}"
        )
    if parameter is not None and _file_of(value) is None:
        _check_type(index, parameter, value)
        _check_range(index, parameter, value)


def _check_type(index: PipelineIndex, parameter: Parameter, value: object) -> None:
    """Refuse a value that the argument's type excludes."""
    kind = parameter.annotation
    if fits(value, kind) or (value is None and parameter.default is None):
        return
    hint = ""
    examples: tuple[object, ...] = (True, 1, 0.5, "", [], {})
    if not any(fits(example, kind) for example in examples):
        hint = "; no text spells one, give it to multimodal_gen.generate"
    raise UsageError(
        f"--pipeline-arg {parameter.name} must be of type {spelled(kind)}, as {index.name} has "
        f"it, got {short(_thawed(value))}{hint}"
    )


def _check_range(index: PipelineIndex, parameter: Parameter, value: object) -> None:
    """Refuse counts below what they can be, and numbers of tokens that no text encoder reads."""
    if not isinstance(value, int) or isinstance(value, bool):
        return
    name, default = parameter.name, parameter.default
    tokens = name.endswith("_length")
    counts = isinstance(default, int) and default >= 0
    least = 1 if tokens else 0 if counts else -_MOST
    most = _MOST_TOKENS if tokens else _MOST
    if not least <= value <= most:
        rule = f"at least {least}" if value < least else f"at most {most}"
        raise UsageError(
            f"--pipeline-arg {name} must be {rule}, got {short(value)}; {index.name} has {default} "
            f"by default"
        )


def _file_of(value: object) -> Path | None:
    """Return the file that `@FILE` names; `@@text` is the text `@text`."""
    if isinstance(value, str) and value.startswith("@") and not value.startswith("@@"):
        return Path(value[1:])
    return None


def _thawed(value: object) -> Any:
    """Return frozen values as the lists and dictionaries that pipelines look for."""
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_thawed(item) for item in value]
    return value[1:] if isinstance(value, str) and value.startswith("@@") else value


def _is_video(file: Path) -> bool:
    return file.suffix.lower() in _VIDEOS


def _is_gif(file: Path) -> bool:
    return file.suffix.lower() == ".gif"


def _read(name: str, file: Path) -> Any:
    """Return an image, or a list of images; masks and arguments by their own names may be either.

    Raises:
        UsageError: this is no regular file, or not what it is called or needed as.
    """
    path = expanded(file, name)
    if not path.is_file():
        problem = "this is no regular file" if path.exists() else "there is no such file"
        raise UsageError(_unreadable(name, file, problem))
    with told(partial(_unreadable, name, file)):  # decoders fail in every way there is
        found = _decoded(path)
    if not isinstance(found, list):
        if name != "--video-path":
            return found
        raise UsageError(
            f"{name} must be a video ({', '.join(_VIDEOS)}), got the image {short(str(file))}"
        )
    if name not in _OF_IMAGES:
        return found
    if _is_gif(file) and len(found) == 1:
        return found[0]
    raise UsageError(f"{name} must be an image, got the video {short(str(file))}")


def _decoded(path: Path) -> Any:
    """Return what a file holds, as diffusers reads it."""
    from diffusers.utils import load_image, load_video
    from PIL import Image, ImageSequence

    if _is_video(path) and not _is_gif(path):
        require_encoder("reading a video")
        frames = load_video(str(path))
        if not frames:
            raise ValueError("it has no frames")
        return frames
    with Image.open(path) as image:
        if _is_gif(path):
            return [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
        return load_image(image)


def _unreadable(name: str, file: Path, problem: Exception | str) -> str:
    what = "video" if _is_video(file) else "image"
    reason = problem if isinstance(problem, str) else first_line(problem)
    return f"{name} must be a readable {what}, got {short(str(file))}: {reason}"
