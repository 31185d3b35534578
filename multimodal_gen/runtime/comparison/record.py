"""What a comparison found: the records of `report.json`, how they are written and read back.

    Report
      environment, model, settings, prompts, seeds, notes
      reference: Run      the backend that the others are compared with
      floor: Run, ...     the same model on other exact kernels: differences that mean nothing
      candidates: Run, ...
        generations: Generation, ...     one per prompt and seed
          frames: FrameMetrics           against the reference's clip of the same prompt and seed
        cost: Cost
        speed: Estimate                  of the reference's, paired by clip
        differences: Estimate, ...       of its figures, paired by clip
        layers: LayerErrors, ...         against exact attention on the reference's q, k and v
          spread: LayerSpread            over prompts and seeds
        masks: MaskPicture, ...
        verdict: Verdict

A file holds one JSON object per record, with the names of the fields as keys and its fields in
their order. A number that is not finite is the text "inf", "-inf" or "nan". `SCHEMA` names the
format and `VERSION` counts its changes: a reader takes its own version only.

Units: times in seconds, memory in bytes, shares in [0, 1]. Relative errors are |x - y| / |y| with y
the truth, so 0.01 is one percent. Paths are relative to the folder of the report, with "/".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from multimodal_gen.errors import ConfigError, short
from multimodal_gen.records import from_plain, read_file
from multimodal_gen.settings import option

SCHEMA = "multimodal_gen.comparison"
VERSION = 3

_DECIBELS = 1000.0
_ONE = 1.001  # with room for rounding
LARGEST = 1e100
"""Of finite figures: sums and squares of them are finite too."""

_RecordT = TypeVar("_RecordT")
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a comparison ran.

    Attributes:
        device: torch's name and the GPU's, e.g. "cuda:0 (NVIDIA H200)"; "cpu".
        num_ranks: GPUs, or CPU processes, that shared the work; 1 since 0.2.
        mesh: how they did: "cfg", "ring" and "ulysses" ranks; None for one.
        versions: of Python, torch, CUDA, diffusers and so on; None for what is not installed.
        multimodal_gen: version of this package.
        commit: git commit of this package's checkout, or None outside one.
    """

    device: str
    num_ranks: int = 1
    mesh: Mapping[str, int] | None = None
    versions: Mapping[str, str | None]
    multimodal_gen: str
    commit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What was run.

    Attributes:
        path: folder or hub id; the name of the class for a pipeline from Python.
        pipeline: class of the pipeline.
        kind: what it makes.
        dtype: dtype of the denoiser, e.g. "bfloat16".
        identity: digest of what its components are configured with and of some values of every
            weight.
    """

    path: str
    pipeline: str
    kind: Literal["image", "video"]
    dtype: str
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameMetrics:
    """One clip, or image, against the reference's of the same prompt and seed.

    None where a metric does not apply (flicker of an image) or could not be computed; the notes of
    the report then say why.

    Attributes:
        psnr: peak signal-to-noise ratio in dB, of 8-bit RGB over the whole clip; inf where equal.
        ssim: structural similarity, mean over frames, at most 1.
        xpsnr: perceptually weighted PSNR in dB, of luma; inf where equal.
        vmaf: VMAF of the model that ffmpeg has built in, 0 to 100, mean over frames.
        flicker: mean absolute difference of successive frames, in 8-bit levels (0 to 255).
        flicker_reference: the same of the reference's clip.
        lpips: learned perceptual distance, 0 for equal, mean over frames.
        st_lpips: the same where a shift by a pixel counts little, mean over sampled frames.
        cvvdp: visible difference by ColorVideoVDP in JOD, at most 10, which is equal.
        constant: whether a frame has one colour only, where the reference's has more.
        non_finite: pixels that were NaN or infinite before they were rounded to 8 bits.
    """

    psnr: float | None = option(None, ge=-_DECIBELS, le=_DECIBELS)
    ssim: float | None = option(None, ge=-2, le=2)
    xpsnr: float | None = option(None, ge=-_DECIBELS, le=_DECIBELS)
    vmaf: float | None = option(None, ge=0, le=100)
    flicker: float | None = option(None, ge=0, le=255)
    flicker_reference: float | None = option(None, ge=0, le=255)
    lpips: float | None = option(None, ge=0, le=LARGEST)
    st_lpips: float | None = option(None, ge=0, le=LARGEST)
    cvvdp: float | None = option(None, ge=-LARGEST, le=10)
    constant: bool = False
    non_finite: int = option(0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One prompt with one seed.

    Attributes:
        prompt: index into `Report.prompts`.
        seed: seed of the noise.
        frames_path: the pixels, lossless: a NumPy file, uint8 [T, H, W, C]; T is 1 for an image.
            None after a failure.
        preview_path: the same as an MP4 or a PNG, for the page.
        seconds: from the prompt to the pixels, loading apart.
        repeat_seconds: the same of making it once more; None but for some of the reference's.
        step_seconds: of every denoising step.
        score: what the function of the comparison gives it, in [0, 1]; None without one.
        latents: relative L2 distance of the latents from the reference's after every step; empty
            for the reference.
        non_finite: values of the last latents and of the pixels that are NaN or infinite.
        frames: against the reference's clip; None for the reference.
    """

    prompt: int = option(ge=0)
    seed: int = option(ge=0)
    frames_path: str | None = None
    preview_path: str | None = None
    seconds: float = option(0.0, ge=0, le=LARGEST)
    repeat_seconds: float | None = option(None, ge=0, le=LARGEST)
    step_seconds: tuple[float, ...] = option((), ge=0, le=LARGEST)
    score: float | None = option(None, ge=0, le=1)
    latents: tuple[float, ...] = option((), ge=0, le=LARGEST)
    non_finite: int = option(0, ge=0)
    frames: FrameMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over clips, with the interval that holds it with a probability of 95 %.

    Attributes:
        count: clips, or prompts whose clips count as one.
        mean: over them.
        low: lower bound of the interval; None for one of them.
        high: upper bound.
    """

    count: int = option(ge=1)
    mean: float = option(ge=-LARGEST, le=LARGEST)
    low: float | None = option(None, ge=-LARGEST, le=LARGEST)
    high: float | None = option(None, ge=-LARGEST, le=LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a backend takes; medians over its generations, the warm-up apart.

    Attributes:
        step_seconds: of a denoising step. Where steps differ, as with a cache or after dense steps,
            it does not tell how long all of them take.
        generation_seconds: from the prompt to the pixels.
        warm_up_seconds: of its first calls, before anything is measured: kernels' compilation
            mostly. Of the reference, of a short generation.
        peak_memory: bytes at most on the device, weights included; None on the CPU.
        density: share of query-key pairs that self-attention of the denoisers attends to, mean over
            calls; 1 for dense backends.
        attention_share: time in attention over that of the denoising steps.
    """

    step_seconds: float = option(ge=0, le=LARGEST)
    generation_seconds: float = option(ge=0, le=LARGEST)
    warm_up_seconds: float = option(le=LARGEST)
    peak_memory: int | None = option(ge=0)
    density: float = option(ge=0, le=_ONE)
    attention_share: float = option(ge=0, le=2)  # attention may run outside of steps, too


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpread:
    """Standard deviations (n - 1) over prompts and seeds of what `LayerErrors` has the means of.

    Attributes:
        relative_l1: by query head, as all of these.
        relative_l2: the same.
        cosine: the same.
        kept_mass: the same; None where the mean is.
    """

    relative_l1: tuple[float, ...] = option(ge=0, le=LARGEST)
    relative_l2: tuple[float, ...] = option(ge=0, le=LARGEST)
    cosine: tuple[float, ...] = option(ge=0, le=2)
    kept_mass: tuple[float, ...] | None = option(None, ge=0, le=LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """One self-attention layer at one step, replayed on the reference's q, k and v.

    Errors are those of sampled query rows against exact attention of these rows, fp32 or better;
    means over the prompts and seeds that were replayed. Lists have an entry per query head.

    Attributes:
        component: pipeline component, e.g. "transformer_2".
        name: dotted path of the attention module.
        layer: index among the self-attention layers of its component.
        step: denoising step, from 0.
        branch: "cond", "uncond" or "both", or None when unknown.
        backend: what served the call, with its variant: a dense backend in dense steps and layers.
        relative_l1: sum of |error| over sum of |truth|.
        relative_l2: the same with squares, and a root over each sum.
        cosine: of the two vectors of a row, mean over rows.
        kept_mass: share of exact attention's weight that falls on pairs that are kept; None where
            it was not measured.
        kept_mass_source: "plan" where it is exact, the sum over the keys that the method's plan
            keeps; "estimate" where the plan is not known (see `layers.py`), within 0.01 or so;
            "dense" where nothing is left out.
        density: share of pairs that the call attends to, over all heads; 1 for dense backends, and
            for calls that a sparse method leaves to one.
        clips: prompts and seeds that it is the mean of.
        spread: over them; None for one.
    """

    component: str
    name: str
    layer: int
    step: int
    branch: str | None = None
    backend: str
    relative_l1: tuple[float, ...] = option(ge=0, le=LARGEST)
    relative_l2: tuple[float, ...] = option(ge=0, le=LARGEST)
    cosine: tuple[float, ...] = option(ge=-_ONE, le=_ONE)
    kept_mass: tuple[float, ...] | None = option(None, ge=-LARGEST, le=_ONE)
    kept_mass_source: Literal["dense", "plan", "estimate"] | None = None
    density: float = option(1.0, ge=0, le=_ONE)
    clips: int = option(1, ge=1)
    spread: LayerSpread | None = None

    def __post_init__(self) -> None:
        heads = {len(self.relative_l1), len(self.relative_l2), len(self.cosine)}
        if self.kept_mass is not None:
            heads.add(len(self.kept_mass))
        if len(heads) > 1:
            raise ConfigError(
                f"lists of {self.name!r} at step {self.step} must have an entry per head each, got "
                f"{' and '.join(map(str, sorted(heads)))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPicture:
    """Where on the video grid one head looks from one query.

    The grid is cut into cells of equal size, those at its ends cut short. Weights are sums over
    the keys of a cell; all cells sum to 1 less what goes to text. A cell that a sparse method
    leaves out has weight 0.

    Attributes:
        component: pipeline component.
        layer: index among the self-attention layers of its component.
        head: query head.
        step: denoising step.
        grid: latent grid (T, H, W) in tokens; T is 1 for an image.
        cell: tokens of a cell along each axis.
        query: position of the query on the grid, in tokens.
        kept: weights of the backend, by cell along time, height and width.
        exact: weights of exact attention, in the same form.
    """

    component: str
    layer: int
    head: int
    step: int
    grid: tuple[int, int, int] = option(ge=1)
    cell: tuple[int, int, int] = option(ge=1)
    query: tuple[int, int, int] = option(ge=0)
    kept: tuple[tuple[tuple[float, ...], ...], ...]
    exact: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the figures of a run mean, by the rules of `verdict.py`.

    Attributes:
        word: in words; "failed" where it did not run to its end, "unknown" where there is nothing
            to judge by.
        reasons: sentences with the figures and the noise.
    """

    word: Literal["within the noise of dense kernels", "visible", "broken", "failed", "unknown"]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration over all prompts and seeds.

    Attributes:
        name: short and unique in the report, e.g. "sliding_tile_attn" or "sliding_tile_attn-2".
        configuration: what was asked for, as `--backends` takes it, e.g.
            "sliding_tile_attn:window=[3,3,3]".
        backend: the attention backend.
        parameters: of the backend, as asked for; JSON values.
        status: whether it ran to its end.
        message: why it did not, or "".
        attention: what the layers ran, one line per group of layers.
        generations: those that finished, by prompt, then seed.
        cost: what it takes; None where nothing finished.
        speed: how many clips it makes while the reference makes one, paired by clip; runs are
            ranked by it. Of the reference, its own noise: how fast it is the second time.
        differences: of its figures, by measure (`psnr`, ..., `flicker_change`, `latents`, `score`),
            paired by clip: from the noise, that is the exact kernel that is farther away on a clip;
            those of the score from the reference's.
        layers: of sampled calls; empty where not measured.
        masks: of chosen heads; empty for dense backends.
        frames_mean: mean of every metric over the generations.
        frames_spread: standard deviation of every metric over the generations, which are paired
            with the reference's; 0 for one generation.
        verdict: None for the reference, and before it was judged.
    """

    name: str
    configuration: str
    backend: str
    parameters: Mapping[str, Any]
    status: Literal["done", "failed", "out of memory"] = "done"
    message: str = ""
    attention: tuple[str, ...] = ()
    generations: tuple[Generation, ...] = ()
    cost: Cost | None = None
    speed: Estimate | None = None
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    layers: tuple[LayerErrors, ...] = ()
    masks: tuple[MaskPicture, ...] = ()
    frames_mean: FrameMetrics | None = None
    frames_spread: FrameMetrics | None = None
    verdict: Verdict | None = None


def grouped(pairs: Iterable[tuple[_KeyT, _ValueT]]) -> dict[_KeyT, list[_ValueT]]:
    """Return the values of every key, both in the order in which they come."""
    found: dict[_KeyT, list[_ValueT]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def kept_mass_sources(run: Run) -> tuple[str, ...]:
    """Return how the masses of a run that leaves something out were found; empty for others."""
    found = {call.kept_mass_source for call in run.layers}
    return tuple(source for source in ("plan", "estimate") if source in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A comparison.

    Attributes:
        schema: `SCHEMA`.
        version: `VERSION`.
        created: when it was written, ISO 8601 in UTC.
        environment: where it ran.
        model: what ran.
        settings: arguments of the generations that were given (height, num_inference_steps, ...),
            and "fps" for videos.
        prompts: what was generated.
        seeds: of every prompt.
        score: the function that gave the scores, e.g. "score.py:score"; None without one.
        reference: the run that others are compared with.
        floor: other exact kernels.
        candidates: the backends asked for, in that order.
        seconds: of the whole comparison, loading apart; of its last part where it was resumed.
        peak_memory: bytes at most on the device meanwhile; None on the CPU.
        notes: what a reader should know, e.g. why a metric is missing.
    """

    schema: str = SCHEMA
    version: int = VERSION
    created: str
    environment: Environment
    model: Model
    settings: Mapping[str, Any]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    score: str | None = None
    reference: Run
    floor: tuple[Run, ...] = ()
    candidates: tuple[Run, ...] = ()
    seconds: float = 0.0
    peak_memory: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, the reference first and the candidates last."""
        return (self.reference, *self.floor, *self.candidates)


def read_record(kind: type[_RecordT], path: Path) -> _RecordT:
    """Read a record from its file.

    Args:
        kind: which record it is, e.g. `Report`.
        path: the file.

    Raises:
        ConfigError: the file cannot be read, holds something else, a figure that cannot be, or a
            report of another version.
    """
    where = f"{kind.__name__.lower()} {str(path)!r}"
    data = read_file(path, where)
    if kind is Report:
        _check_version(data, where)
    return from_plain(kind, data, where)


def _check_version(data: Any, where: str) -> None:
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise ConfigError(
            f"{where} must be the report of a comparison, with schema {SCHEMA!r}, "
            f"got {short(found)}"
        )
    if data.get("version") != VERSION:
        raise ConfigError(
            f"{where} must have version {VERSION}, got {short(data.get('version'))}; compare again "
            f"with this version of multimodal_gen"
        )
