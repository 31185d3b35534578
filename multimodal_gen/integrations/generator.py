"""`DiffGenerator`: a pipeline that is loaded once, and generates from Python.

    from_pretrained(model_path, ...)   what to load, and how: the flags of `sglang generate`
    generate(prompt=..., ...)          what to make, with which attention, in memory or on disk

Settings have the names, the values and the checks of the flags; `runtime/server_args.py` declares
them. The command line runs the same code.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from multimodal_gen._version import __version__
from multimodal_gen.errors import (
    NothingAppliedError,
    UsageError,
    nearest,
    short,
)
from multimodal_gen.integrations.ahead import Ahead, require_one_gpu
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.runtime.distributed.groups import parallel_groups
from multimodal_gen.runtime.generator import (
    DiffusersAttention,
    Generated,
    Give,
    Handle,
    OnStep,
    Session,
    choose_backend,
    pick_device,
    plan_ranks,
    prepare,
)
from multimodal_gen.runtime.generator.attention_guard import AttentionGuard
from multimodal_gen.runtime.guard_bounds import parse_guard_bounds
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, scope_from_args
from multimodal_gen.runtime.platforms import AttentionBackendEnum
from multimodal_gen.runtime.server_args import (
    LOADING_SETTINGS,
    SETTINGS,
    ServerArgs,
    naming_arguments,
)
from multimodal_gen.settings import expect

if TYPE_CHECKING:
    from typing_extensions import Unpack


_Path = Path | str


MOST_GUARDS = 8
"""Settings of attention that a generator remembers the findings of a guard for."""


class LoadingSettings(TypedDict, total=False):
    """How a model is loaded; `sglang generate --help` says what each means."""

    pipeline_class_name: str | None
    num_gpus: int | None
    sp_degree: int | None
    ulysses_degree: int | None
    ring_degree: int | None
    cfg_parallel: bool
    rank_timeout: int
    dtype: str
    device: str | None
    offload: str
    offload_folder: _Path | None
    quantize: Mapping[str, str] | Sequence[str] | str | None
    transformer_weights_path: Mapping[str, _Path] | Sequence[_Path] | _Path | None
    lora_path: Sequence[str] | str | None
    scheduler: str | None
    vae_tiling: bool
    enable_torch_compile: bool
    compiled_kernels: _Path | None
    compile_ahead: bool


class AttentionSettings(TypedDict, total=False):
    """Which attention runs; `sglang generate --help` says what each means."""

    backend: str
    attention_backend: AttentionBackendEnum | str | None
    attention_backend_config: str | Mapping[str, object] | None
    component_attention_backends: Mapping[str, AttentionBackendEnum | str | None] | str | None
    attention_config: str | Mapping[str, object] | None
    attention_auto_table: _Path | None
    attention_guard: Mapping[str, object] | float | str | None
    cuda_graph: bool
    strict_attention: bool


class PretrainedSettings(LoadingSettings, AttentionSettings, total=False):
    """What `DiffGenerator.from_pretrained` takes: how to load, and which attention runs."""


class GenerationSettings(AttentionSettings, total=False):
    """What `DiffGenerator.generate` takes; `sglang generate --help` says what each means."""

    prompt: str | None
    negative_prompt: str | None
    image_path: Sequence[_Path] | _Path | None
    last_image_path: _Path | None
    video_path: _Path | None
    mask_path: _Path | None
    pipeline_arg: Mapping[str, object] | Sequence[str] | str | None
    cache: str | None
    latent_grid: Sequence[int] | str | None
    text_rows: Sequence[int] | str | None
    height: int | None
    width: int | None
    num_frames: int | None
    num_inference_steps: int | None
    sigmas: Sequence[float] | str | None
    guidance_scale: float | None
    true_cfg_scale: float | None
    num_outputs: int
    seed: int | None
    fps: int | None
    output_path: _Path | None
    overwrite: bool
    stream: bool
    prompts_file: _Path | None
    save_latents: bool
    record_attention: _Path | None
    check_attention: int


_ATTENTION = tuple(AttentionSettings.__annotations__)
# One of these in a call of `generate` replaces all of those that were given before.
_CHOICES = tuple(
    name
    for name in _ATTENTION
    if name not in ("attention_auto_table", "attention_guard", "cuda_graph", "strict_attention")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One generation, with all that is settled before the model is loaded; picklable.

    Attributes:
        args: the arguments, with `backend` decided.
        reason: why it was decided so.
        explicit: whether the user named it.
    """

    args: ServerArgs
    reason: str
    explicit: bool


def job_of(settings: Mapping[str, Any]) -> Job:
    """Decide whose attention runs, and check the settings of a generation.

    Args:
        settings: values by names of `SETTINGS`.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another.
        UsageError: the attention backend does not belong to the backend.
    """
    name = settings.get("attention_backend")
    name = None if name is None else str(name)
    if name is not None and name.strip().lower() in ("", "auto"):
        name = None
    asked = SETTINGS["backend"].normalised(settings.get("backend", "auto"))
    backend, reason = choose_backend(str(asked), name)
    args = ServerArgs(**{**settings, "attention_backend": name, "backend": backend})
    return Job(args=args, reason=reason, explicit=asked != "auto")


class DiffGenerator:
    """A loaded pipeline; also a context manager that lets go of it at the end.

    Made by `from_pretrained`. Under `init_parallel` every rank makes one, with the same settings,
    and makes the same calls; rank 0 gets the results. Threads may share one: their generations wait
    for each other.

    Args:
        args: what to load, and how.
        attention: what `generate` has by default, of `AttentionSettings`.
    """

    def __init__(self, args: ServerArgs, attention: Mapping[str, Any] | None = None) -> None:
        expect("args", args, ServerArgs, "ServerArgs", "from_pretrained takes a folder or a hub id")
        self._attention = dict(attention or {})
        self._lock = threading.RLock()
        self._loaded = {name: getattr(args, name) for name in LOADING_SETTINGS}
        self._ahead: Ahead | None = None
        # What generations with a guard asked for, each with the last guard; the newest comes last.
        self._guarded: list[tuple[object, AttentionGuard]] = []
        with ExitStack() as failed:
            if args.prompt is not None:
                self._compile_ahead(args)
                failed.callback(self._stop_ahead)
            elif args.compile_ahead:  # by the first generation, which alone says what is made
                require_one_gpu(pick_device(args.device))
            self._session: Session | None = Session(args)
            failed.pop_all()

    @classmethod
    @naming_arguments()
    def from_pretrained(
        cls, model_path: Path | str, **settings: "Unpack[PretrainedSettings]"
    ) -> "DiffGenerator":
        """Load a pipeline.

        Args:
            model_path: folder with model_index.json, or a Hugging Face Hub id.
            **settings: how to load it, and which attention its generations run with; see
                `PretrainedSettings`.

        Raises:
            ConfigError: a setting is unknown, has the wrong type or is out of range.
            UsageError: it does not fit the pipeline or the device.
            MissingDependencyError: diffusers, or what a setting needs, is not installed.
        """
        expect("model_path", model_path, (str, Path), "a folder or a hub id")
        valid = (*LOADING_SETTINGS, *_ATTENTION)
        _check_names(settings, valid, "DiffGenerator.from_pretrained")
        args = job_of({"model_path": str(model_path), **settings}).args
        given: Mapping[str, Any] = settings
        attention = {name: given[name] for name in _ATTENTION if name in given}
        if parallel_groups() is None and plan_ranks(args).world_size > 1:
            raise UsageError(
                "num_gpus must be 1 for a generator of one process, got settings for several GPUs; "
                "start the script with torchrun and call multimodal_gen.init_parallel first, or "
                "use `sglang generate`"
            )
        return cls(args, attention)

    @naming_arguments()
    def generate(
        self,
        *,
        on_chunk: Give | None = None,
        on_step: OnStep | None = None,
        **settings: "Unpack[GenerationSettings]",
    ) -> Generated | None:
        """Generate images or videos from one prompt.

        Without `output_path` nothing is written, and the result is in memory alone. With
        `stream=True` frames are written to the file, and given to `on_chunk`, as they are done,
        and not kept; one of the two must be there.

        Args:
            on_chunk: takes each `StreamedChunk` of a video that is streamed; what it raises ends
                the generation.
            on_step: takes the index of each denoising step and the latents after it; what it
                raises ends the generation, and nothing is written. Not with `stream=True`.
            **settings: what to make, with which attention; see `GenerationSettings`. A backend,
                or rules, given here replace those of `from_pretrained` and their parameters.

        Returns:
            Pixels, latents, the report of every attention layer, and the files that were written;
            None on ranks other than the first.

        Raises:
            ConfigError: a setting is unknown, has the wrong type or is out of range.
            UsageError: it does not fit the pipeline or the disk, a named backend cannot serve, or
                the result is not finite.
        """
        names = tuple(name for name in SETTINGS if name not in LOADING_SETTINGS)
        _check_names(settings, names, "DiffGenerator.generate")
        replaced = _CHOICES if any(name in settings for name in _CHOICES) else ()
        before = {name: it for name, it in self._attention.items() if name not in replaced}
        given: dict[str, Any] = {**before, **settings}
        save = given.get("output_path") is not None
        if not save:
            given.pop("output_path", None)
            _refuse_files(given)
        _check_callers(given, on_chunk, on_step, save=save)
        job = job_of({**self._loaded, **given})
        return self.run(job, save=save, on_chunk=on_chunk, on_step=on_step)

    def run(
        self,
        job: Job,
        *,
        mark: str = "",
        save: bool = True,
        on_chunk: Give | None = None,
        on_step: OnStep | None = None,
    ) -> Generated | None:
        """Do a job whose settings of loading are those of this generator.

        Args:
            job: what to make.
            mark: what the names of half-written files start with.
            save: write files.
            on_chunk: see `generate`.
            on_step: see `generate`.
        """
        facts = {
            "multimodal_gen": __version__,
            "backend": job.args.backend,
            "backend_reason": job.reason,
        }
        with self._lock:
            if self._session is None:
                raise UsageError(
                    "a DiffGenerator must not be used once it is closed; load it again"
                )
            self._compile_ahead(job.args)
            return self._session.generate(
                job.args,
                partial(self._attach, job),
                facts=facts,
                mark=mark,
                save=save,
                on_chunk=on_chunk,
                on_step=on_step,
            )

    @property
    def load_seconds(self) -> float:
        """How long loading took."""
        return 0.0 if self._session is None else self._session.load_seconds

    def close(self) -> None:
        """Let go of the model; a second call does nothing."""
        with self._lock:
            self._stop_ahead()
            if self._session is not None:
                self._session.close()
            self._session = None

    def __enter__(self) -> "DiffGenerator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _compile_ahead(self, args: ServerArgs) -> None:
        """Begin to compile what the first generation will launch, where that is asked for."""
        if args.compile_ahead and self._ahead is None:
            self._ahead = Ahead(args, pick_device(args.device))

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()

    def _attach(self, job: Job, pipe: Any) -> Handle:
        """Attach what a generation asks for to the loaded pipeline."""
        args = job.args
        if args.backend == "diffusers":
            name = None if args.attention_backend is None else str(args.attention_backend)
            return DiffusersAttention(pipe, name)
        scope = scope_from_args(args)
        # On several ranks, all of them would compute all of what diffusers ships.
        named = scope.default or scope.components or scope.rules
        others = args.attention_guard or args.cuda_graph or args.compile_ahead
        nothing_asked = not (job.explicit or named or others)
        try:
            handle = apply(
                pipe,
                scope=scope,
                latent_grid=args.latent_grid,
                text_rows=args.text_rows,
                attention_guard=self._guard(scope, args),
                cuda_graph=args.cuda_graph,
            )
        except NothingAppliedError as error:
            if not nothing_asked or parallel_groups() is not None:
                raise
            return DiffusersAttention(pipe, notes=(f"runs as diffusers ships it: {error}",))
        handle.ahead = self._ahead
        return handle

    def _guard(self, scope: SelectionScope, args: ServerArgs) -> AttentionGuard | None:
        """Return the guard of a generation, which knows what the last one like it found."""
        bounds = parse_guard_bounds(args.attention_guard)
        if bounds is None:
            return None
        asked = (scope, bounds)
        before = next((known for known in self._guarded if known[0] == asked), None)
        guard = AttentionGuard(bounds, before and before[1])
        others = [known for known in self._guarded if known is not before]
        self._guarded = [*others, (asked, guard)][-MOST_GUARDS:]
        return guard


@naming_arguments()
def generate(model_path: Path | str, **settings: Any) -> Generated | None:
    """Load a pipeline, generate once, and let go of it; see `DiffGenerator`.

    Args:
        model_path: folder with model_index.json, or a Hugging Face Hub id.
        **settings: those of `LoadingSettings` and of `GenerationSettings`.

    Returns:
        What `DiffGenerator.generate` returns.
    """
    _check_names(settings, tuple(SETTINGS), "generate")
    loading: Any = {name: value for name, value in settings.items() if name in LOADING_SETTINGS}
    making: Any = {name: value for name, value in settings.items() if name not in loading}
    if making.get("output_path") is not None:  # is refused before weights are read
        prepare([job_of({"model_path": str(model_path), **settings}).args])
    with DiffGenerator.from_pretrained(model_path, **loading) as generator:
        return generator.generate(**making)


def _check_names(settings: Mapping[str, Any], valid: Sequence[str], call: str) -> None:
    for name in settings:
        if name in valid and name != "model_path":
            continue
        hint = nearest(name, valid)
        if name in SETTINGS:
            other = "from_pretrained" if name in LOADING_SETTINGS else "generate"
            hint = f", which DiffGenerator.{other} takes"
        raise UsageError(f"{call} must be given settings that it takes, got {short(name)}{hint}")


def _check_callers(
    given: Mapping[str, Any], on_chunk: Give | None, on_step: OnStep | None, *, save: bool
) -> None:
    """Refuse a stream whose frames go nowhere, and functions that there is nothing for."""
    if given.get("stream") and not save and on_chunk is None:
        raise UsageError("stream needs output_path or on_chunk, got neither; add one of them")
    if on_chunk is not None and not given.get("stream"):
        raise UsageError("on_chunk needs stream=True, got on_chunk alone; add it")
    expect("on_chunk", on_chunk, Callable | None, "a function that takes a chunk")
    if on_step is not None and given.get("stream"):
        raise UsageError("on_step must be left out with stream=True; raise in on_chunk to end it")
    expect("on_step", on_step, Callable | None, "a function of a step and latents")


def _refuse_files(given: Mapping[str, Any]) -> None:
    """Refuse what only means something for files, where none is written."""
    for name in ("save_latents", "overwrite", "record_attention"):
        if given.get(name):
            raise UsageError(f"{name} needs output_path, got {short(given[name])} alone; add it")
