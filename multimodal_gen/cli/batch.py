"""What one `sglang generate` is to make: flags, a configuration file and a file of prompts.

    defaults  <  --config FILE  <  flags  <  a line of --prompt-file

Each prompt is one generation. All of them run on one loaded model, so that a line may give any flag
but those of loading.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from multimodal_gen.errors import ConfigError, MultimodalGenError, nearest, short
from multimodal_gen.files import MalformedError
from multimodal_gen.runtime.server_args import LOADING_SETTINGS, SETTINGS
from multimodal_gen.settings import (
    Setting,
    as_flag,
    as_plain,
    expanded,
    lines_of,
    read_json,
    read_mapping,
)

if TYPE_CHECKING:
    from multimodal_gen.integrations.generator import Job

_PROMPT = replace(
    SETTINGS["prompt"],
    many=True,
    help="What to generate; may be given repeatedly, for one generation each.",
)
_PROMPT_FILE = Setting(
    name="prompt_file",
    kind=Path,
    default=None,
    metavar="FILE",
    help="One generation a line: a prompt, or a JSON object of flags such as "
    '{"prompt": "a fox", "seed": 1}. The model is loaded once.',
)
_RESUME = Setting(
    name="resume",
    kind=bool,
    default=False,
    help="Leave out the generations whose record is in the output folder already.",
)
_CONFIG = Setting(
    name="config",
    kind=Path,
    default=None,
    metavar="FILE",
    help="YAML or JSON file with flags by name, e.g. height: 480; flags of the command line win.",
)
_PRINT_CONFIG = Setting(
    name="print_config",
    kind=bool,
    default=False,
    help="Print every setting as a file for --config, and generate nothing.",
)
BATCH: Final = (_PROMPT, _PROMPT_FILE, _RESUME, _CONFIG, _PRINT_CONFIG)
"""The flags of `generate` that are not settings of one generation."""

_KNOWN: Final[Mapping[str, Setting]] = MappingProxyType(
    {**SETTINGS, **{setting.name: setting for setting in (_PROMPT, _PROMPT_FILE, _RESUME)}}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command is to make.

    Attributes:
        settings: what was given, by name, the configuration file's included.
        generations: settings of each generation.
        resume: leave out those that are done.
    """

    settings: Mapping[str, Any]
    generations: tuple[Mapping[str, Any], ...]
    resume: bool


def asked_for(typed: Mapping[str, Any]) -> Asked:
    """Return what is to be made.

    Args:
        typed: what the command line gave, by name.

    Raises:
        ConfigError: a file cannot be read, names an unknown flag, or gives what a line cannot; or
            the model or the prompt is missing.
    """
    config = {} if typed.get("config") is None else _configured(typed["config"])
    own = ("config", "print_config")
    settings = {**config, **{name: value for name, value in typed.items() if name not in own}}
    if settings.get("model_path") is None:
        raise ConfigError(
            "--model-path must be given, or be in --config; see `sglang generate --help`"
        )
    resume = _RESUME.normalised(settings.pop("resume", False))
    prompts, file = settings.pop("prompt", None), settings.pop("prompt_file", None)
    generations = [
        *({**settings, "prompt": prompt} for prompt in _listed(prompts)),
        *({**settings, **line} for line in (() if file is None else _lines(file, settings))),
    ]
    if not generations:
        raise ConfigError(
            "--prompt must be given, or be in --prompt-file or --config; see "
            "`sglang generate --help`"
        )
    settings |= {"prompt": list(_listed(prompts)), "prompt_file": file, "resume": resume}
    return Asked(settings=settings, generations=tuple(generations), resume=bool(resume))


def jobs_of(asked: Asked) -> tuple["Job", ...]:
    """Return the generations with all settings checked.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
        UsageError: an attention backend does not belong to the backend.
    """
    from multimodal_gen.integrations.generator import job_of

    found = []
    for number, settings in enumerate(asked.generations, 1):
        try:
            found.append(job_of(settings))
        except MultimodalGenError as error:
            if len(asked.generations) == 1:
                raise
            raise ConfigError(f"generation {number}: {error}") from error
    return tuple(found)


def as_config(asked: Asked) -> str:
    """Return every setting as a file for `--config`: YAML, with values that are JSON."""
    lines = []
    for name, setting in _KNOWN.items():
        default = None if setting.default is MISSING else setting.default
        value = asked.settings.get(name, default)
        lines.append(f"{name}: {json.dumps(as_plain(value), ensure_ascii=False)}\n")
    return "".join(lines)


def _listed(prompts: object) -> Sequence[Any]:
    if prompts is None:
        return ()
    return prompts if isinstance(prompts, (list, tuple)) else (prompts,)


def _configured(path: object) -> dict[str, Any]:
    """Return the settings of a configuration file, by name."""
    _CONFIG.normalised(path)
    file = expanded(str(path), "--config")
    return _named(read_mapping(file, name="--config"), f"--config {str(path)!r}")


def _named(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return settings with names that are known, spelled as fields."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in _KNOWN:
            hint = nearest(name, _KNOWN)
            raise ConfigError(
                f"{where} must name flags of `sglang generate`, got {short(key)}{hint}"
            )
        if name in found:
            raise ConfigError(f"{where} must give {as_flag(name)} once, got it twice")
        found[name] = value
    return found


def _lines(path: object, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings that each line of a file of prompts gives."""
    _PROMPT_FILE.normalised(path)
    for number, line in lines_of(str(path), "--prompt-file"):
        yield _line(line, f"--prompt-file {str(path)!r}, line {number},", settings)


def _line(text: str, where: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if not text.startswith("{"):
        return {"prompt": text}
    try:
        given = read_json(text)
    except MalformedError as error:
        raise ConfigError(f"{where} must be a prompt or a JSON object: {error}") from None
    assert isinstance(given, Mapping), "what opens like an object is one"
    found = _named(given, where)
    for name, value in found.items():
        if name in ("prompt_file", "resume"):
            raise ConfigError(f"{where} must not give {as_flag(name)}, which is for the whole file")
        if name not in LOADING_SETTINGS:
            continue
        for_all = settings.get(name, SETTINGS[name].default)
        if value != for_all:
            raise ConfigError(
                f"{where} must leave {as_flag(name)} as it is for all generations, because the "
                f"model is loaded once, got {short(value)} instead of {short(for_all)}"
            )
    if not isinstance(found.get("prompt"), str):
        raise ConfigError(f'{where} must have a "prompt" that is text, got {short(text)}')
    return found
