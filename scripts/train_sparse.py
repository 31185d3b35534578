"""Fine-tune Wan for a sparse attention backend: a complete run, small enough to read.

    python scripts/train_sparse.py MODEL OUT --backend video_sparse_attn --config sparsity=0.9 \
        --data clips --steps 400 --weights lora

`--data` is a folder of clips, each with its prompt in a text file of the same name, or a
safetensors file of what was encoded before: `latents` [N, C, T, H, W], normalised, and `prompts`
[N, L, D]. Without either, a synthetic set shows that everything works. A sparsity such as
`sparsity={0: 0.5, 0.3: 0.9}` changes over the steps of training. The loss is that of flow matching,
or with `--target dense` the distance from what the model gave with dense attention before. OUT
becomes a pipeline's folder, which `sglang generate --model-path OUT --attention-backend ...` reads
alone; `loss.csv` and, with matplotlib, `loss.png` stay next to it. `--resume` goes on from the last
state that was saved.
"""

import argparse
import copy
import csv
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanPipeline
from diffusers.optimization import get_scheduler
from tqdm import tqdm

import multimodal_gen
from multimodal_gen.errors import MultimodalGenError, UsageError
from multimodal_gen.runtime.managers.forward_context import set_forward_context

NEW_PARTS = ("to_gate_compress", "proj_l")
ATTENTION_WEIGHTS = ["to_q", "to_k", "to_v", "to_out.0"]
CLIPS = (".mp4", ".mov", ".webm", ".mkv", ".gif")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the model learns from: latents [C, T, H, W], and the embedding of a prompt [L, D]."""

    latents: torch.Tensor
    prompt: torch.Tensor


def synthetic(pipe: WanPipeline, options: argparse.Namespace) -> list[Sample]:
    """Return latents that move smoothly through random patterns, with random prompts."""
    generator = torch.Generator().manual_seed(options.seed)
    config = pipe.transformer.config
    frames, height, width = latent_size(pipe, options)
    samples = []
    for _ in range(options.samples):
        small = torch.randn(1, config.in_channels, 2, 3, 3, generator=generator)
        latents = torch.nn.functional.interpolate(
            small, (frames, height, width), mode="trilinear", align_corners=True
        )
        prompt = torch.randn(16, config.text_dim, generator=generator)
        samples.append(Sample(latents=latents[0], prompt=prompt))
    return samples


def latent_size(pipe: WanPipeline, options: argparse.Namespace) -> tuple[int, int, int]:
    """Return frames, height and width of the latents of a clip."""
    every = pipe.vae_scale_factor_temporal
    if (options.frames - 1) % every:
        nearest = round((options.frames - 1) / every) * every + 1
        got = f"{options.frames}; nearest {nearest}"
        raise UsageError(f"--frames must be a multiple of {every} plus 1, got {got}")
    frames = (options.frames - 1) // every + 1
    scale = pipe.vae_scale_factor_spatial
    multiple = scale * pipe.transformer.config.patch_size[-1]
    if options.height % multiple or options.width % multiple:
        got = f"{options.height} and {options.width}"
        raise UsageError(f"--height and --width must be multiples of {multiple}, got {got}")
    return frames, options.height // scale, options.width // scale


@torch.no_grad()
def encoded(pipe: WanPipeline, options: argparse.Namespace, device: torch.device) -> list[Sample]:
    """Return the clips of a folder as latents, and their prompts as embeddings."""
    if options.data.suffix == ".safetensors":
        return stored(pipe, options)
    latent_size(pipe, options)
    files = []
    if options.data.is_dir():
        files = sorted(x for x in options.data.iterdir() if x.suffix.lower() in CLIPS)
    if not files:
        raise UsageError(
            f"--data must be a folder with clips ({', '.join(CLIPS)}), found none in {options.data}"
        )
    for part in (pipe.vae, pipe.text_encoder):
        part.to(device)
    samples = []
    for path in tqdm(files, desc="encoding", disable=None):
        text = path.with_suffix(".txt")
        if not text.exists():
            raise UsageError(f"{path} must have its prompt in {text.name}, which is missing")
        frames = read_frames(path, options.frames)
        video = pipe.video_processor.preprocess_video(frames, options.height, options.width)
        latents = pipe.vae.encode(video.to(device, pipe.vae.dtype)).latent_dist.mode()
        shape = (1, -1, 1, 1, 1)
        mean, deviation = (
            torch.tensor(x, device=device).view(shape)
            for x in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
        )
        prompt, _ = pipe.encode_prompt(
            text.read_text().strip(), do_classifier_free_guidance=False, device=device
        )
        samples.append(
            Sample(latents=((latents - mean) / deviation)[0].float().cpu(), prompt=prompt[0].cpu())
        )
    for part in (pipe.vae, pipe.text_encoder):
        part.to("cpu")
    return samples


def stored(pipe: WanPipeline, options: argparse.Namespace) -> list[Sample]:
    """Return the samples of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(options.data)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--data must be a file that can be read, got {options.data}: {error}"
        ) from error
    shapes = {
        key: list(found[key].shape) if key in found else None for key in ("latents", "prompts")
    }
    config = pipe.transformer.config
    wanted = [config.in_channels, *latent_size(pipe, options)]
    latents, prompts = shapes["latents"], shapes["prompts"]
    if not (
        latents
        and prompts
        and len(prompts) == 3
        and prompts[0] == latents[0] > 0
        and latents[1:] == wanted
        and prompts[2] == config.text_dim
    ):
        expected = ["N", *wanted], ["N", "L", config.text_dim]
        raise UsageError(
            f"--data must have latents {expected[0]} and prompts {expected[1]}, got {latents} and "
            f"{prompts}; --frames, --height and --width are those of the clips"
        )
    pairs = zip(found["latents"].float(), found["prompts"], strict=True)
    return [Sample(latents=clip, prompt=prompt) for clip, prompt in pairs]


def read_frames(path: Path, count: int) -> list[Any]:
    """Return the first frames of a clip as images."""
    import imageio.v3 as iio
    from PIL import Image

    found: list[Any] = []
    try:
        for frame in iio.imiter(path):
            found.append(Image.fromarray(frame))
            if len(found) == count:
                return found
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{path} must be a clip that can be read, got {type(error).__name__} after "
            f"{len(found)} frames; write it anew, or take it out of --data"
        ) from error
    raise UsageError(f"{path} must have {count} frames at least, got {len(found)}; lower --frames")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """One batch on its way to noise: x = (1 - sigma) latents + sigma noise."""

    inputs: dict[str, torch.Tensor]
    flow: torch.Tensor


def batches(
    samples: Sequence[Sample],
    options: argparse.Namespace,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> Iterator[Noised]:
    """Yield batches for ever, in an order and at noise levels of each process' own."""
    device, seed = accelerator.device, options.seed + 1000 * accelerator.process_index
    order = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        picked = torch.randint(len(samples), (options.batch,), generator=order).tolist()
        latents = torch.stack([samples[i].latents for i in picked]).to(device)
        prompts = torch.stack([samples[i].prompt for i in picked]).to(device, dtype)
        noise = torch.randn(latents.shape, generator=generator, device=device)
        uniform = torch.rand(len(latents), generator=generator, device=device)
        sigma = options.shift * uniform / (1 + (options.shift - 1) * uniform)
        mixed = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        inputs = {
            "hidden_states": mixed.to(dtype),
            "timestep": 1000 * sigma,
            "encoder_hidden_states": prompts,
        }
        yield Noised(inputs=inputs, flow=noise - latents)


def trainable(model: torch.nn.Module, weights: str) -> list[torch.nn.Parameter]:
    """Return what is trained: new parts alone, with a LoRA, or everything."""
    if weights == "lora":
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION_WEIGHTS))
    found = []
    for name, parameter in model.named_parameters():
        is_new = any(f".{part}." in name for part in NEW_PARTS)
        wanted = is_new or weights == "all" or (weights == "lora" and ".lora_" in name)
        parameter.requires_grad_(wanted)
        found += [parameter] if wanted else []
    if not found:
        raise UsageError(
            "--weights new must be given with a backend that makes new parts "
            "(video_sparse_attn, sla_attn), got another; choose lora or all"
        )
    return found


class Run:
    """A model in training.

    Args:
        pipe: the pipeline.
        options: the command line.
        accelerator: of this process.
    """

    def __init__(
        self, pipe: WanPipeline, options: argparse.Namespace, accelerator: Accelerator
    ) -> None:
        self.options, self.accelerator = options, accelerator
        model = pipe.transformer.to(accelerator.device)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.handle = multimodal_gen.apply(
            model,
            attention_backend=options.backend,
            attention_backend_config=options.config or None,
            train=True,
        )
        if options.checkpointing == "on":
            model.enable_gradient_checkpointing()
        parameters = trainable(model, options.weights)
        self.dtypes = [parameter.dtype for parameter in parameters]
        for parameter in parameters:
            # In bfloat16 most steps would be rounded away: it has three digits.
            parameter.data = parameter.data.float()
        optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01)
        self.parameters = parameters
        taken = options.steps // options.accumulate * accelerator.num_processes
        schedule = get_scheduler(
            options.lr_scheduler,
            optimizer,
            num_warmup_steps=0 if options.lr_scheduler == "constant" else taken // 20,
            num_training_steps=taken,
        )
        prepared = accelerator.prepare(model, optimizer, schedule)
        self.model, self.optimizer, self.schedule = prepared
        self.dtype, self.step = self.teacher.dtype, 0

    @torch.no_grad()
    def dense(self, batch: Noised) -> torch.Tensor:
        """Return what the model gave before, with dense attention."""
        out: torch.Tensor = self.teacher(**batch.inputs, return_dict=False)[0]
        return out.float()

    def place(self) -> AbstractContextManager[object]:
        """Return the context of a call at this step, which a sparsity may change by."""
        last = self.options.steps - 1
        return set_forward_context(min(self.step, last), num_steps=self.options.steps)

    @torch.no_grad()
    def gap(self, batch: Noised) -> float:
        """Return the distance from that, relative to it."""
        with self.place():
            out = self.model(**batch.inputs, return_dict=False)[0].float()
        wanted = self.dense(batch)
        return float((out - wanted).norm() / wanted.norm())

    def train(self, batch: Noised) -> tuple[float, float]:
        """Take a step; returns the loss, and the seconds that it took."""
        start = time.monotonic()
        with self.accelerator.accumulate(self.model):
            wanted = self.dense(batch) if self.options.target == "dense" else batch.flow
            with self.place():
                out = self.model(**batch.inputs, return_dict=False)[0]
            loss = (out.float() - wanted.float()).square().mean()
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.parameters, 1.0)
                if not math.isfinite(norm):
                    raise UsageError(
                        f"gradients must be finite, got a norm of {norm} in step {self.step}; "
                        f"lower --lr or look at --data, then --resume from the last state"
                    )
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.step += 1
        return loss.item(), time.monotonic() - start

    def save_state(self, folder: Path) -> None:
        """Save what `--resume` goes on from; a state that is not whole has no step."""
        fresh, old = folder.with_suffix(".new"), folder.with_suffix(".old")
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(fresh, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(fresh))
        self.accelerator.wait_for_everyone()
        if main:
            (fresh / "step.json").write_text(json.dumps({"step": self.step}))
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    def load_state(self, folder: Path) -> None:
        """Go on from a state that was saved."""
        # Between two renames the last state still has the name it was written under.
        states = [x for x in (folder, folder.with_suffix(".new")) if (x / "step.json").exists()]
        if not states:
            raise UsageError(f"--resume needs a state in {folder}, found none; leave it out")
        try:
            self.accelerator.load_state(str(states[0]))
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"--resume must be given with the MODEL, --backend and --weights that the state in "
                f"{states[0]} is of, got others; choose those, or another OUT"
            ) from error
        self.step = json.loads((states[0] / "step.json").read_text())["step"]
        if self.step > self.options.steps:
            got = self.options.steps
            raise UsageError(f"--steps must be at least the {self.step} taken, got {got}")

    def finish(self, pipe: WanPipeline, folder: Path) -> None:
        """Save the pipeline with what was trained, and detach the model."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(self.model)
            if self.options.weights == "lora":
                model.fuse_lora()
                model.unload_lora()
            for parameter, dtype in zip(self.parameters, self.dtypes, strict=True):
                parameter.data = parameter.data.to(dtype)
            pipe.transformer = model
            pipe.save_pretrained(folder)
        self.handle.remove()


def plot(table: Path, picture: Path) -> None:
    """Draw the loss and the gap, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("loss.png is left out: pip install matplotlib", file=sys.stderr)
        return
    with table.open() as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for axes, column, style, label in (
        (above, "loss", "-", "loss: mean squared error"),
        (below, "gap", "o-", "distance from dense, relative"),
    ):
        known = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        axes.plot(*zip(*known, strict=True), style)
        axes.set_ylabel(label)
    below.set_xlabel("step")
    figure.savefig(picture)


def above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads numbers of a kind, and refuses those that are not above 0."""

    def read(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    read.__name__ = kind.__name__  # what argparse calls a number that is none
    return read


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    count, number = above_0(int), above_0(float)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("model", help="folder or name of a Wan text-to-video pipeline")
    add("out", type=Path, help="folder of the result")
    add("--backend", default="video_sparse_attn", help="sparse backend (video_sparse_attn)")
    add("--config", default="", help="its parameters, as k=v,k=v or JSON")
    text = "folder of clips and prompts, or a file of them encoded; a synthetic set without it"
    add("--data", type=Path, help=text)
    add("--samples", type=count, default=8, help="samples of the synthetic set (8)")
    add("--frames", type=count, default=81, help="frames of a clip (81)")
    add("--height", type=count, default=480, help="height in pixels (480)")
    add("--width", type=count, default=832, help="width in pixels (832)")
    add("--weights", choices=("new", "lora", "all"), default="lora", help="what is trained (lora)")
    add("--target", choices=("flow", "dense"), default="flow", help="what is predicted (flow)")
    add("--steps", type=count, default=400, help="training steps (400)")
    add("--batch", type=count, default=1, help="samples per step and process (1)")
    add("--accumulate", type=count, default=1, help="steps whose gradients are added up (1)")
    add("--lr", type=number, default=1e-5, help="learning rate (1e-5)")
    schedules = ("constant", "cosine", "linear")
    text = (
        "how the learning rate goes on after a warm-up of a twentieth; constant has none (constant)"
    )
    add("--lr-scheduler", choices=schedules, default="constant", help=text)
    text = "compute activations again in the backward pass, which saves memory (on)"
    add("--checkpointing", choices=("on", "off"), default="on", help=text)
    add("--shift", type=number, default=3.0, help="shift of the noise levels (3)")
    add("--every", type=count, default=50, help="steps between states and gaps (50)")
    dtypes = ("bfloat16", "float32")
    text = "dtype of the model and of what is computed; what is trained is float32 (bfloat16)"
    add("--dtype", choices=dtypes, default="bfloat16", help=text)
    add("--seed", type=int, default=0, help="seed (0)")
    add("--resume", action="store_true", help="go on from the state in OUT")
    options = parser.parse_args(argv)
    if options.steps % options.accumulate:
        got = f"{options.steps} and {options.accumulate}"
        parser.error(f"--steps must be a multiple of --accumulate, got {got}")
    return options


def load(options: argparse.Namespace) -> WanPipeline:
    """Return the pipeline."""
    try:
        return WanPipeline.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"model must be the folder or the name of a Wan pipeline, got {options.model}: {reason}"
        ) from error


def begin_table(table: Path, taken: int) -> None:
    """Write the head of the table, or keep the rows of the steps that were taken."""
    rows = [["step", "loss", "gap", "seconds"]]
    if taken:
        with table.open(newline="") as file:
            rows += [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) < taken]
    fresh = table.with_suffix(".new")
    with fresh.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    fresh.replace(table)


def expect_own_folder(options: argparse.Namespace) -> None:
    """Raise unless OUT is new or empty, or holds the run that is to go on."""
    out: Path = options.out
    if out.exists() and Path(options.model).exists() and out.samefile(options.model):
        raise UsageError(f"OUT must be another folder than MODEL, got {out} for both")
    holds_run = (out / "loss.csv").exists()
    if holds_run and not options.resume:
        raise UsageError(f"{out} must be a new folder, it holds a run; give --resume")
    if out.is_dir() and not holds_run and any(out.iterdir()):
        raise UsageError(f"OUT must be a new or an empty folder, {out} holds other files")


def train(options: argparse.Namespace) -> None:
    """Train, with everything that is written on the way."""
    state, table = options.out / "state", options.out / "loss.csv"
    expect_own_folder(options)
    precision = "bf16" if options.dtype == "bfloat16" else "no"
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate, mixed_precision=precision
    )
    set_seed(options.seed)
    pipe = load(options)
    device = accelerator.device
    samples = encoded(pipe, options, device) if options.data else synthetic(pipe, options)
    run = Run(pipe, options, accelerator)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        run.load_state(state)
    first, main = run.step, accelerator.is_main_process
    data = batches(samples, options, accelerator, run.dtype)
    held = next(data)
    for _ in range(first):
        next(data)  # as the run before
    if main:
        begin_table(table, first)
    accelerator.wait_for_everyone()
    with table.open("a", newline="") as file:
        writer = csv.writer(file)
        bar = tqdm(range(first, options.steps), initial=first, total=options.steps, disable=None)
        for step in bar:
            gap = run.gap(held) if step % options.every == 0 else None
            loss, seconds = run.train(next(data))
            bar.set_postfix(loss=f"{loss:.4f}")
            if bar.disable and main and gap is not None:  # no terminal, so no bar
                print(
                    f"step {step} of {options.steps}: loss {loss:.4f}, distance {gap:.4f}",
                    flush=True,
                )
            if main:
                writer.writerow((step, loss, "" if gap is None else gap, f"{seconds:.4f}"))
                file.flush()
            if min(run.step % options.every, options.steps - run.step) == 0:  # and at the end
                run.save_state(state)
        gap = run.gap(held)
        if main:
            writer.writerow((options.steps, "", gap, ""))
    run.finish(pipe, options.out)
    if main:
        plot(table, options.out / "loss.png")
        print(f"{options.out}: distance from dense {gap:.4f} after {options.steps} steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: the request cannot be met)."""
    options = parse(argv)
    try:
        train(options)
    except (MultimodalGenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
