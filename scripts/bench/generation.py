"""Whole generations of models of true size with random weights: text encoders, denoiser, decoder.

Every recipe loads the model anew and makes two videos, or images, as `multimodal_gen.generate`
does: the first pays for what is compiled and tuned, unless a recipe before it did. Latents of dense
recipes are compared with those of the first one, and every self-attention of the denoiser must have
run on the backend that was asked for. What fails, or is wrong, is a row that says so.

    python3 scripts/bench/run.py generation --commit HASH [--case 5B] [--only "^auto"] [--steps 10]
    python3 scripts/bench/run.py generation --commit HASH --smoke    # tiny models, on any machine

Needs diffusers and accelerate. `generation.yaml` has models, recipes and what others published.

Columns: `video`, the first or the second; `status`, ok or why it failed; `prepare_s`, for encoding
text (and image) and drawing noise; `denoise_s`; `decode_s`; `rest_s`, for attaching the attention,
checks and the record; `added_s`, for steps that were not run, as the second video had them, which
`shortened` tells in words; `total_s`, the sum of these; `s_per_step`; `compile_s`, what the stages
took to compile; `peak_gib` of the GPU's memory; `density` of the denoiser's self-attention.
"""

import argparse
import gc
import json
import math
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
import yaml
from _harness import DEVICE, Bench, Row, pattern, positive, relative_error, version_of
from accelerate import init_empty_weights
from wan_forward import draw_weights

from multimodal_gen import DiffGenerator
from multimodal_gen.errors import UnsupportedBackendError, UsageError
from multimodal_gen.runtime.generator import Generated
from multimodal_gen.runtime.generator import run as session
from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.load import pick_dtype
from multimodal_gen.runtime.generator.quantized import check_quantized, quantization_config
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.server_args import LOADING_SETTINGS, ServerArgs
from multimodal_gen.testing.tiny_models import FAMILIES
from multimodal_gen.testing.tiny_models.family import DEFAULT_PROMPT

SPEC = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
RECIPES: dict[str, dict[str, Any]] = SPEC["recipes"]
NOT_SETTINGS = ("class", "dtype", "tiny")
VIDEOS = ("first", "second")  # or images
BOUND = 5e-2  # of a prediction, as in `wan_forward`
STAGES = ("prepare_s", "denoise_s", "decode_s", "rest_s")
FAILED: Row = dict.fromkeys(
    (*STAGES, "s_per_step", "compile_s", "peak_gib", "density", "error"), math.nan
)

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is asked of it; `generation.yaml` says what the fields are."""

    name: str
    pipeline: str
    family: str
    parameters: float
    components: Mapping[str, Settings]
    settings: Settings
    config: Settings = field(default_factory=dict)
    sparse: Settings = field(default_factory=dict)
    steps_run: int | None = None
    published: Settings = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Denoising steps that are asked for."""
        return int(self.settings["num_inference_steps"])

    @property
    def tiny(self) -> "Case":
        """The same of a few layers, a few pixels and a few steps."""
        smallest = {
            name: min(self.settings.get(name, 0), most) for name, most in SPEC["smoke"].items()
        }
        return replace(
            self,
            name=f"smoke {self.name}",
            components={k: {**part, **part.get("tiny", {})} for k, part in self.components.items()},
            settings={**self.settings, **{k: value for k, value in smallest.items() if value}},
            steps_run=self.steps_run and 5,
            published={},
        )

    @property
    def shape(self) -> str:
        """What the results file calls the output."""
        size = f"{self.settings['width']}x{self.settings['height']}"
        frames = self.settings.get("num_frames")
        return f"{size} {frames}f" if frames else size

    @property
    def bound(self) -> float:
        """The relative error that latents may have.

        With classifier-free guidance w a prediction is w times one branch less w - 1 times the
        other, so that their errors may add up to 2w - 1 times as much.
        """
        embedded = self.components["transformer"].get("guidance_embeds", False)
        scale = 1.0 if embedded else float(self.settings["guidance_scale"])
        return BOUND * max(1.0, 2 * scale - 1)


CASES = tuple(Case(name=name, **spec) for name, spec in SPEC["cases"].items())
# One of each pipeline, and of each way to call it.
SMOKE = tuple({(x.pipeline, bool(x.config)): x.tiny for x in reversed(CASES)}.values())[::-1]


def library_of(part: Settings) -> str:
    """Return the library that has the class of a component."""
    return "diffusers" if hasattr(diffusers, part["class"]) else "transformers"


def make_empty(part: Settings, tokenizer: Any = None) -> Any:
    """Return a component; parameters of a model are on the meta device, buffers are there."""
    own = {name: value for name, value in part.items() if name not in NOT_SETTINGS}
    library = library_of(part)
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], part["class"])
    if library == "diffusers" or not issubclass(cls, torch.nn.Module):
        with init_empty_weights(include_buffers=False):
            return cls(**own)
    if tokenizer is not None:
        own |= {
            f"{of}_token_id": getattr(tokenizer, f"{of}_token_id") for of in ("bos", "eos", "pad")
        }
    with init_empty_weights(include_buffers=False):
        model = cls(cls.config_class(**own))
    model.tie_weights()  # which putting them on the meta device undid
    return model


def kept_in_fp32(model: torch.nn.Module) -> set[str]:
    """Return the names of the modules that diffusers loads in fp32, whatever the dtype."""
    kept = model._keep_in_fp32_modules if isinstance(model, diffusers.ModelMixin) else None
    return {*(kept or ())}


def fill(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Give the parameters of a model random values on a device, and move its buffers there."""
    exact = kept_in_fp32(model)
    made: dict[int, torch.nn.Parameter] = {}  # parameters may be tied
    for path, old in list(model.named_parameters(remove_duplicate=False)):
        own = torch.float32 if exact & {*path.split(".")} else dtype
        if id(old) not in made:
            values = torch.empty(old.shape, dtype=own, device=device)
            made[id(old)] = torch.nn.Parameter(values, requires_grad=False)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, made[id(old)])
    draw_weights(model)
    return torch.nn.Module.to(model, device).eval()


@cache
def tokenizers(family: str) -> dict[str, Any]:
    """Return the tokenizers of a tiny family, by component."""
    return {f"tokenizer{end}": make() for end, (make, _) in FAMILIES[family].text.items()}


def build(case: Case, index: PipelineIndex, args: ServerArgs, device: torch.device) -> Any:
    """Stand for `load_pipeline`: return a pipeline with random weights where it is to run.

    Raises:
        UnsupportedBackendError: a package for quantising it is not installed, or the device
            cannot compute so.
    """
    ways: Mapping[str, str] = args.quantize if isinstance(args.quantize, Mapping) else {}
    try:
        check_quantized(index, ways, device)
    except UsageError as error:
        raise UnsupportedBackendError(str(error)) from error
    dtype = pick_dtype(args.dtype, device)
    parts = dict(tokenizers(case.family))
    for name, part in case.components.items():
        own = getattr(torch, part["dtype"]) if "dtype" in part else dtype
        made = make_empty(part, parts.get(name.replace("text_encoder", "tokenizer")))
        parts[name] = fill(made, own, device) if isinstance(made, torch.nn.Module) else made
    pipe = index.pipeline_class(**parts, **case.config)
    for name, way in ways.items():
        quantise(parts[name], quantization_config("diffusers", way, dtype).quant_type)
    if args.vae_tiling:
        pipe.vae.enable_tiling()
    return pipe


def quantise(model: torch.nn.Module, config: Any) -> None:
    """Quantise what diffusers would quantise while it loads a model."""
    from torchao.quantization import quantize_

    exact = kept_in_fp32(model)
    quantize_(
        model,
        config,
        lambda layer, path: isinstance(layer, torch.nn.Linear) and not exact & {*path.split(".")},
    )


def write_folder(case: Case, folder: Path) -> Settings:
    """Write what is read of a model before its weights; returns the inputs that it asks for."""
    components = {name: (library_of(part), part["class"]) for name, part in case.components.items()}
    components |= {
        name: ("transformers", type(tokenizer).__name__)
        for name, tokenizer in tokenizers(case.family).items()
    }
    index = {"_class_name": case.pipeline, **components, **case.config}
    (folder / "model_index.json").write_text(json.dumps(index))
    if "image_encoder" not in components:
        return {}
    from PIL import Image

    Image.linear_gradient("L").convert("RGB").save(folder / "image.png")
    return {"image_path": folder / "image.png"}


def settings_of(case: Case, recipe: Settings, steps: int) -> dict[str, Any] | None:
    """Return the settings of a recipe for so many steps; None where these are too few for it."""
    first = steps // 5
    found = {name: value for name, value in recipe.items() if name != "needs"}
    if "cache" in found:
        if not first:
            return None
        found["cache"] = found["cache"].format(first=first)
    if "attention_backend_config" in found:
        config = {**found["attention_backend_config"], **case.sparse}
        dense = config.pop("dense_steps")
        if first:
            config["dense_steps"] = dense.format(last=first - 1)
        found["attention_backend_config"] = config
    return {**case.settings, **found, "num_inference_steps": steps}


def is_dense(recipe: Settings) -> bool:
    """Tell whether a recipe gives what the model computes, up to rounding."""
    return not {"attention_backend_config", "quantize", "cache"} & recipe.keys()


def density_of(asked: str | None, made: Generated) -> float:
    """Return the share of token pairs that the denoiser attended to; NaN where nothing tells.

    Args:
        asked: the backend that the denoiser's self-attention must have run on, in some steps.
        made: what was made.

    Raises:
        RuntimeError: it did not.
    """
    if asked is None:
        return math.nan
    layers = [layer for layer in made.report.layers if layer.role is AttentionRole.SELF]
    if not layers:
        raise RuntimeError(f"{asked} must run in self-attention, of which there is none")
    pairs, calls = 0.0, 0
    for layer in layers:
        ran = [entry for entry in (*layer.entries, *layer.detours) if entry.calls]
        names = [str(entry.selection.backend) for entry in ran]
        if asked not in names:
            raise RuntimeError(f"{layer.name} must run {asked}, ran {names}")
        calls += sum(entry.calls for entry in ran)
        pairs += sum(
            entry.calls * (1.0 if entry.density is None else entry.density) for entry in ran
        )
    return pairs / calls


def make_video(generator: DiffGenerator, making: Settings) -> tuple[Generated, Row]:
    """Make a video; returns it with its times and its memory."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    made = generator.generate(prompt=DEFAULT_PROMPT, seed=0, **making)
    assert made is not None, "there is one rank"
    found: Any = made.record["timings_s"]
    stages = (found["prepare"], sum(found["steps"]), found["decode"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else math.nan
    return made, {
        **dict(zip(STAGES, (*stages, made.seconds - sum(stages)), strict=True)),
        "s_per_step": sum(found["steps"]) / len(found["steps"]),
        "compile_s": found.get("compile", 0.0),
        "peak_gib": peak,
    }


@contextmanager
def loaded(case: Case, loading: Settings, folder: Path, *, smoke: bool) -> Iterator[DiffGenerator]:
    """Build a model once that of the recipe before, and what was compiled for it, is gone."""
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(session, "load_pipeline", partial(build, case)))
        if smoke:  # inductor takes long on a CPU
            compile_eagerly = partialmethod(torch.nn.Module.compile, backend="eager")
            stack.enter_context(mock.patch.object(torch.nn.Module, "compile", compile_eagerly))
        generator = DiffGenerator.from_pretrained(folder, device=DEVICE, **loading)
        yield stack.enter_context(generator)


def run_recipe(
    case: Case,
    name: str,
    settings: Settings,
    folder: Path,
    first: torch.Tensor | None,
    bench: Bench,
) -> tuple[dict[str, Row], torch.Tensor | None]:
    """Make both videos of a recipe.

    Args:
        case: the model.
        name: of the recipe.
        settings: of `multimodal_gen.generate`.
        folder: the model's.
        first: latents of the first dense recipe, if one ran before.
        bench: the run.

    Returns:
        The columns of each video by its name, and latents to compare dense ones with.

    Raises:
        UnsupportedBackendError: this machine cannot run it.
        RuntimeError: the result is wrong, or another attention ran.
    """
    recipe = RECIPES[name]
    for needed in recipe.get("needs", ()):
        is_there = DEVICE == "cuda" if needed == "cuda" else find_spec(needed) is not None
        if not is_there:
            raise UnsupportedBackendError(f"there is no {needed}")
    loading = {key: value for key, value in settings.items() if key in LOADING_SETTINGS}
    making = {key: value for key, value in settings.items() if key not in LOADING_SETTINGS}
    asked = None if recipe.get("backend") == "diffusers" else recipe.get("attention_backend")
    rows = {}
    with loaded(case, loading, folder, smoke=bench.options.smoke) as generator:
        for video in VIDEOS:
            made, row = make_video(generator, making)
            rows[video] = row | {"density": density_of(asked, made), "error": math.nan}
            if is_dense(recipe):
                latents = made.latents.float().cpu()
                first = latents if first is None else first
                error = rows[video]["error"] = relative_error(latents, first)
                if not error < case.bound:
                    raise RuntimeError(f"relative error {error:.2e}, above {case.bound:.2g}")
    return rows, first


def write(
    case: Case, name: str, steps: int, rows: Mapping[str, Row], status: str, bench: Bench
) -> None:
    """Write both videos of a recipe, with what the steps take that were not run."""
    packages = ("diffusers", "torchao") if "quantize" in RECIPES[name] else ("diffusers",)
    added = (case.steps - steps) * rows[VIDEOS[-1]]["s_per_step"] if steps < case.steps else 0.0
    told = case.published
    for video, row in rows.items():
        total = sum(row[stage] for stage in STAGES) + added
        columns = {
            "video": video,
            "status": status,
            "width": case.settings["width"],
            "height": case.settings["height"],
            "frames": case.settings.get("num_frames", 1),
            "guidance_scale": case.settings["guidance_scale"],
            "steps": case.steps,
            "steps_run": steps,
            **{stage: row[stage] for stage in STAGES},
            "added_s": added,
            "total_s": total,
            **{key: row[key] for key in ("s_per_step", "compile_s", "peak_gib", "density")},
        }
        columns = {k: round(v, 4) if isinstance(v, float) else v for k, v in columns.items()} | {
            "shortened": "" if steps == case.steps else f"{steps} of {case.steps} steps were run",
            "published": ", ".join(
                f"{who} {value}" for who, value in told.get("figures", {}).items()
            ),
            **{f"published_{key}": told.get(key, "") for key in ("of", "gpu", "source")},
        }
        bench.write(
            {name: [1e3 * total]},
            case,
            flop=math.nan,
            flop_formula="time only",
            errors={name: row["error"]},
            versions=", ".join(version_of(x) for x in packages),
            more=lambda _, columns=columns: columns,
            show=described,
        )


def described(row: Row) -> str:
    """Return what is printed of a row."""
    stages = ", ".join(f"{stage[:-2]} {row[stage]:.2f}" for stage in (*STAGES, "added_s"))
    return (
        f"{row['case']:32} {row['contender']:32} {row['video']:6} {row['total_s']:8.2f} s "
        f"({stages}), {row['s_per_step']:.3f} s a step, {row['peak_gib']:.1f} GiB, {row['status']}"
        + (f", {row['shortened']}" if row["shortened"] else "")
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument("--case", type=pattern, default="", help="models whose name matches")
    parser.add_argument("--steps", type=positive, help="run at most so many denoising steps")


def measure(case: Case, bench: Bench) -> None:
    """Run the recipes that are asked for, and write a row for each of their videos."""
    if DEVICE != "cuda" and not bench.options.smoke:
        raise argparse.ArgumentError(None, "models of true size need a GPU; try --smoke")
    steps = min(case.steps_run or case.steps, bench.options.steps or case.steps)
    first = None
    with tempfile.TemporaryDirectory(prefix="generation-") as made:
        folder = Path(made)
        inputs = write_folder(case, folder)
        for name in filter(bench.wants, RECIPES):
            settings = settings_of(case, RECIPES[name], steps)
            if settings is None:
                print(f"left out: {name}, {steps} steps are too few for a step cache", flush=True)
                continue
            status = "ok"
            try:
                rows, first = run_recipe(case, name, {**settings, **inputs}, folder, first, bench)
            except UnsupportedBackendError as error:
                print(f"left out: {name}, {error}", flush=True)
                continue
            except Exception as error:  # one recipe must not end the others
                print(f"FAILED {name}: {traceback.format_exc()[-1500:]}", flush=True)
                status = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                rows = dict.fromkeys(VIDEOS, FAILED)
                bench.wrong.append(name)
            write(case, name, steps, rows, status, bench)
