"""`--backend diffusers`: diffusers' own attention backends, by diffusers' own names.

diffusers sets a process-wide default along with a model's backend, and accepts models on which it
then changes nothing. Here the former is restored and the latter refused.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from multimodal_gen.errors import UsageError, first_line, nearest, short
from multimodal_gen.runtime.generator.index import import_diffusers
from multimodal_gen.runtime.generator.library_errors import told
from multimodal_gen.runtime.generator.load import denoisers
from multimodal_gen.runtime.layers.attention.backends.registry import load_plugins
from multimodal_gen.runtime.layers.attention.report import Json
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class DiffusersAttention:
    """A diffusers backend on every denoiser of a pipeline, until removed; it is its own report.

    Args:
        pipe: the pipeline.
        name: diffusers' name of the backend; None leaves the attention as it is.
        notes: what the user should know.

    Attributes:
        backend: diffusers' name of the backend.
        source: who asked for it.
        layers: number of attention modules it was set on, by component.
        notes: what the user should know.

    Raises:
        UsageError: diffusers refuses the backend here, or it would change nothing.
    """

    def __init__(self, pipe: Any, name: str | None = None, *, notes: tuple[str, ...] = ()) -> None:
        models = denoisers(pipe)
        switchable = {key: _switchable(model) for key, model in models.items()}
        self._before = [(each, each._attention_backend) for each in chain(*switchable.values())]
        self._active = _registry()._active_backend
        self.backend = str(self._active.value) if name is None else spelled(name)
        self.source = "diffusers' default" if name is None else "settings"
        self.layers = {key: len(processors) for key, processors in switchable.items()}
        self.notes = notes
        if name is not None:
            try:
                self._set(type(pipe).__name__, models)
            except BaseException:
                self.remove()
                raise

    def _set(self, pipeline: str, models: Mapping[str, Any]) -> None:
        name = self.backend
        for key, model in models.items():
            with told(
                lambda e: f"diffusers cannot use attention backend {name} here: {first_line(e)}"
            ):
                model.set_attention_backend(name)
            self.layers[key] = sum(each._attention_backend == name for each in _switchable(model))
        if not any(self.layers.values()):
            raise UsageError(
                f"--attention-backend {name} changes nothing in {pipeline}: the attention of "
                f"{', '.join(models) or 'its components'} does not go through diffusers' "
                f"backends; leave the option out, or use --backend sglang"
            )

    def report(self) -> "DiffusersAttention":
        """Return which backend runs in how many modules."""
        return self

    def as_dict(self) -> dict[str, Json]:
        """Return the report as JSON data."""
        return {
            "diffusers_backend": self.backend,
            "source": self.source,
            "layers": dict(self.layers),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """Return one line per component."""
        lines = [
            f"{component} ({count} layers): diffusers {self.backend} [{self.source}]"
            if count
            else f"{component}: its own attention, which diffusers' backends do not reach"
            for component, count in self.layers.items()
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def remove(self) -> None:
        """Restore every module, and the process-wide default of diffusers."""
        for processor, backend in self._before:
            processor._attention_backend = backend
        _registry().set_active_backend(self._active)

    def __enter__(self) -> "DiffusersAttention":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def choose_backend(backend: str, attention_backend: str | None) -> tuple[str, str]:
    """Decide whose attention runs.

    Args:
        backend: "auto", "sglang" or "diffusers".
        attention_backend: `--attention-backend`, or None.

    Returns:
        "sglang" or "diffusers", and why.

    Raises:
        UsageError: the attention backend does not belong to `backend`.
    """
    name = attention_backend
    asked = backend, f"asked for with --backend {backend}"
    if backend == "diffusers":
        if name is not None and spelled(name) not in diffusers_backend_names():
            raise _unknown(name, "diffusers", diffusers_backend_names())
        return asked
    if name is None or _is_ours(name):
        return asked if backend == "sglang" else ("sglang", "the default of --backend auto")
    if backend == "auto" and spelled(name) in diffusers_backend_names():
        return "diffusers", f"--backend auto: {name} is an attention backend of diffusers only"
    raise _unknown(name, "sglang", tuple(str(member) for member in AttentionBackendEnum))


def diffusers_backend_names() -> tuple[str, ...]:
    """Return the names `set_attention_backend` of this diffusers takes."""
    import_diffusers()
    from diffusers.models.attention_dispatch import AttentionBackendName

    return tuple(member.value for member in AttentionBackendName)


def spelled(name: str) -> str:
    """Return a diffusers backend name as diffusers spells it."""
    return name.strip().lower().replace("-", "_")


def _is_ours(name: str) -> bool:
    load_plugins()
    try:
        AttentionBackendEnum.parse(name)
    except UsageError:
        return False
    return True


def _unknown(name: str, backend: str, valid: tuple[str, ...]) -> UsageError:
    hint = nearest(name, valid)
    if backend == "diffusers" and _is_ours(name):
        hint = f"; {name} is an attention backend of this package, use it with --backend sglang"
    elif backend == "sglang" and spelled(name) in diffusers_backend_names():
        hint = f"; {name} is an attention backend of diffusers, use it with --backend diffusers"
    return UsageError(
        f"--attention-backend must be one of {', '.join(valid)} with --backend {backend}, got "
        f"{short(name)}{hint}"
    )


def _registry() -> Any:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry


def _switchable(model: Any) -> list[Any]:
    """Return the attention processors of a model that a diffusers backend can be set on."""
    processors = (getattr(module, "processor", None) for module in model.modules())
    return [p for p in processors if p is not None and hasattr(p, "_attention_backend")]
