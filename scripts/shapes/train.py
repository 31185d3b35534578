#!/usr/bin/env python3
"""Train the shapes model from nothing: the autoencoder, then the transformer and its text encoder.

    python scripts/shapes/train.py vae --size small --out STATE [--folder FOLDER]
    python scripts/shapes/train.py transformer --size small --out STATE [--seconds 450]
    python scripts/shapes/train.py export --size small --out STATE --folder FOLDER
    python scripts/shapes/train.py pack --out STATE --folder FOLDER

`pack` writes FOLDER/weights.safetensors, a quarter of a state, and `--start FILE` begins with one.
`--vae FOLDER` takes an autoencoder that is there already, as `scripts/shapes/small/vae` is. On
several GPUs, which share every batch, start `transformer` by `python -m torch.distributed.run
--nproc-per-node N`.

A run stops after `--seconds` and leaves its state in STATE, with which the next one goes on. Clips
are made on the device. Seeds are fixed, and so is the result for runs that stop at the same steps
only: the transformer's clips are drawn anew when a run begins, by a seed that has the step at which
it did, and the optimiser's moments begin anew. The curve of the loss is in STATE/vae.csv and
STATE/transformer.csv, there beside the loss on clips that are not trained on: where that one no
longer falls, what is missing is clips and not steps.

A large model's text encoder learns to read first (`reading.py`), and is then left as it is.

The transformer is trained by flow matching (Lipman et al. 2023; Esser et al. 2024, eq. 13): at
noise s a latent is x_s = (1 - s) x + s e, and the model predicts e - x; s is uniform, shifted as
the pipeline's scheduler does. A tenth of the captions is left out, for guidance.

Later stages have larger grids. So that what captions mean need not be learnt again, positions of a
smaller grid are stretched over the last one, as far as its clips are the same in time and space;
and the more tokens show the same thing, the more noise it takes to hide it, so the shift grows
(Esser et al. 2024, eq. 23, has the root of the ratio of tokens). Some stages see a part of the
tokens, drawn anew in each step, which saves most of attention's work (Zheng et al. 2023, "Fast
training of diffusion models with masked transformers", drop half of them).
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# A checkout works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clips import Scene, draw_scenes, render
from models import (
    SIZES,
    Size,
    Stage,
    embedded,
    make_pipeline,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
    save,
    tokens_of,
)
from reading import learn_to_read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_CAPTION = 0.1
AVERAGE = 0.999
TRAINING_SEEDS = 1_000_000
"""The first seed of clips that are trained on; those of evaluations are below."""
EVALUATION_SEEDS = 500_000
"""The first seed of clips that are evaluated, a seed for as many as are drawn at once.

Far from `study.SEED`: a model that is chosen by its evaluations is chosen by no caption of
the study.
"""
STEPS_OF_VAE = 12_000
RATE_OF_MUON = 5.0
"""In shares of AdamW's: after 500 steps of the large model the loss is 0.293, with 2.0 it is 0.312,
and with AdamW alone 0.384."""
HELD_OUT_SEEDS = 700_000
"""The first seed of clips on which the loss is measured and nothing is trained."""
HELD_OUT = 64
"""Clips that are held out of a stage."""
HELD_OUT_STEPS = 4
"""Draws of clips and noise, the same ones each time on as many GPUs, of which the loss is the mean.

They take the memory of a step that is no graph, beside that of the one that is.
"""
CURVE_EVERY = 50
PIXELS = 64 * 17 * 128 * 128
"""Of the clips that are made at once, of which there are at least `LEAST_CLIPS`."""
LEAST_CLIPS = 8
"""Large clips one at a time have a GPU wait for launches."""


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_ranks() -> None:
    """Begin to work with the other processes, where `torch.distributed.run` has started several."""
    if dist.is_torchelastic_launched():
        if DEVICE == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group()


def leave_ranks() -> int:
    """End that; return the number that this process had."""
    number = rank()
    if dist.is_initialized():
        dist.destroy_process_group()
    return number


class Training:
    """Steps with a warm-up and a cosine, an average of the weights, and a state on disk.

    The optimiser is AdamW. Where it is asked for, Muon (Jordan et al. 2024) has the matrices of the
    transformer's blocks, in steps as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM
    training", eq. 4). Moments are not in the state: every run makes them anew, hence its warm-up.
    On a GPU a step is one CUDA graph: the models are so small that launches would take longer.

    Ranks, if there are several, average their gradients and stop together; the first one writes.

    Args:
        modules: what is trained, by name.
        path: the file of the state; the curve is a CSV file next to it.
        steps: steps in all.
        muon: whether blocks are trained by Muon.
        start: packed weights to begin with where there is no state.
    """

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        path: Path,
        *,
        steps: int,
        muon: bool = False,
        start: Path | None = None,
    ) -> None:
        self.path, self.steps, self.step = path, steps, 0
        self._named = {
            f"{name}.{key}": value
            for name, module in modules.items()
            for key, value in module.named_parameters()
        }
        self._average = {key: value.detach().clone() for key, value in self._named.items()}
        self._rate = torch.zeros((), device=DEVICE)
        on_gpu = DEVICE == "cuda"
        self._matrices = [
            value
            for key, value in self._named.items()
            if muon and value.ndim == 2 and key.startswith("transformer.blocks.")
        ]
        chosen = {id(value) for value in self._matrices}
        self._adamw = torch.optim.AdamW(
            [value for value in self._named.values() if id(value) not in chosen],
            lr=self._rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=on_gpu or None,
            capturable=on_gpu,
        )
        self._muon: torch.optim.Optimizer | None = None
        if self._matrices:
            self._muon = torch.optim.Muon(
                self._matrices, lr=RATE_OF_MUON, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            )
        self._loss = torch.zeros((), device=DEVICE)
        self._since = 0
        if path.exists():
            self._load(torch.load(path, map_location=DEVICE), path)
        elif start is not None:
            self._load(unpacked(start), start)

    def run(
        self,
        feed: Callable[[int], None],
        loss_of: Callable[[], torch.Tensor],
        seconds: float,
        *,
        rate: float,
        until: int | None = None,
        cosine: range | None = None,
        held_out: Callable[[], float] | None = None,
    ) -> None:
        """Train until all steps are done, or the time is over; then write the state.

        Args:
            feed: writes what a step is trained on to where `loss_of` reads it.
            loss_of: gives the loss.
            seconds: when to stop.
            rate: the highest learning rate.
            until: the step to stop at; default: all steps.
            cosine: the steps over which the rate falls to 0; default: all.
            held_out: gives the loss on clips that are not trained on; default: it is not noted.
        """
        start, last, began = time.monotonic(), min(self.steps, until or self.steps), self.step
        cosine = cosine or range(self.steps)
        if began == cosine.start:  # weights of another stage have no part in the average
            for key, value in self._named.items():
                self._average[key].copy_(value.detach())
        take: Callable[[], None] | None = None
        while self.step < last and not self._is_late(time.monotonic() - start > seconds):
            warm = min(1.0, (self.step - began + 1) / 200)
            self._rate.fill_(rate * warm * self._share_of_rate(cosine))
            feed(self.step)
            take = take or self._captured(loss_of)
            take()
            self.step += 1
            self._since += 1
            if self.step % CURVE_EVERY == 0:
                self._note(time.monotonic() - start, held_out)
        if self.step > began and rank() == 0:
            self.save()
        print(f"{self.step} of {self.steps} steps, {time.monotonic() - start:.0f} s", flush=True)

    def use_average(self) -> None:
        """Put the average of the weights in the place of the weights."""
        with torch.no_grad():
            for key, value in self._named.items():
                value.copy_(self._average[key])

    def _is_late(self, late: bool) -> bool:
        """Whether the first rank's time is over; several ask now and then only."""
        if ranks() == 1:
            return late
        if self.step % CURVE_EVERY:
            return False
        told = torch.tensor(float(late), device=DEVICE)
        dist.broadcast(told, 0)
        return bool(told)

    def _captured(self, loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
        """Return one step; on a GPU it is run three times before it is captured."""

        def backward() -> None:
            for value in self._named.values():
                value.grad = None
            loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()

        def step() -> None:
            backward()
            self._share_gradients()
            self._update()

        if DEVICE != "cuda":
            return step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self._loss.zero_()
        self._since = 0
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, part in zip(graphs, (backward, self._update), strict=True):
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                part()

        def replay() -> None:
            graphs[0].replay()
            self._share_gradients()
            graphs[1].replay()

        return replay

    @torch.no_grad()
    def _update(self) -> None:
        """Take a step along the gradients."""
        parameters = [x for x in self._named.values() if x.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._adamw.step()
        if self._muon is not None:
            # Its rate is a number, which a graph keeps: it steps at full rate, and a part is taken.
            before = [x.clone() for x in self._matrices]
            self._muon.step()
            for value, old in zip(self._matrices, before, strict=True):
                value.copy_(torch.lerp(old, value, self._rate))
        averages = list(self._average.values())
        torch._foreach_lerp_(averages, list(self._named.values()), 1 - AVERAGE)

    @torch.no_grad()
    def _share_gradients(self) -> None:
        """Average the gradients over the ranks."""
        if ranks() == 1:
            return
        gradients = [x.grad for x in self._named.values() if x.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients]) / ranks()
        dist.all_reduce(flat)
        parts = flat.split([each.numel() for each in gradients])
        torch._foreach_copy_(
            gradients, [x.view_as(y) for x, y in zip(parts, gradients, strict=True)]
        )

    def _share_of_rate(self, cosine: range) -> float:
        return 0.5 * (1 + math.cos(math.pi * (self.step - cosine.start) / len(cosine)))

    def _note(self, seconds: float, held_out: Callable[[], float] | None) -> None:
        loss = self._loss.item() / max(self._since, 1)
        self._loss.zero_()
        self._since = 0
        if rank():
            return
        seldom = self.step % (10 * CURVE_EVERY) == 0
        apart = f"{held_out():.5f}" if seldom and held_out is not None else ""
        row = {"step": self.step, "loss": f"{loss:.5f}", "held_out": apart}
        columns = ["step", "loss", *(["held_out"] if held_out is not None else [])]
        curve = self.path.with_suffix(".csv")
        curve.parent.mkdir(parents=True, exist_ok=True)
        with curve.open("a+", newline="") as file:
            file.seek(0)
            found = csv.DictReader(file).fieldnames  # of a state that is gone on with
            writer = csv.DictWriter(
                file, found or columns, extrasaction="ignore", lineterminator="\n"
            )
            if not found:
                writer.writeheader()
            writer.writerow(row)
        if seldom:
            shown = f"loss {loss:.4f}" + (f", held out {apart}" if apart else "")
            print(f"step {self.step}: {shown}, {seconds:.0f} s", flush=True)
            self.save()  # a run may be ended from outside

    def save(self) -> None:
        """Write the state: weights and their average in 16 bits."""
        state = {
            "step": self.step,
            "weights": {key: value.detach().half().cpu() for key, value in self._named.items()},
            "average": {key: value.half().cpu() for key, value in self._average.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def _load(self, state: dict[str, Any], source: Path) -> None:
        shapes, found = (
            {key: list(value.shape) for key, value in each.items()}
            for each in (self._named, state["average"])
        )
        for key in sorted(shapes.keys() | found.keys()):
            if shapes.get(key) != found.get(key):
                raise ValueError(
                    f"{source} must have {key} of shape {shapes.get(key)}, got {found.get(key)}; "
                    "pass the --size it was made with"
                )
        self.step = state["step"]
        with torch.no_grad():
            for key, value in self._named.items():
                value.copy_(state["weights"][key])
                self._average[key].copy_(state["average"][key])


def pack(state: Path, packed: Path) -> None:
    """Write a state's average: matrices in 8 bits, with a scale for each row, the rest in 16."""
    from safetensors.torch import save_file

    found, tensors = torch.load(state, map_location="cpu"), {}
    for key, value in found["average"].items():
        if value.ndim < 2:
            tensors[key] = value
            continue
        rows = value.float().flatten(1)
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        tensors[key] = (rows / scales).round().char().view_as(value)
        tensors[f"{key}.scales"] = scales
    packed.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, packed, metadata={"step": str(found["step"])})


def unpacked(packed: Path) -> dict[str, Any]:
    """Return what `pack` has written, as a state whose weights are their average."""
    from safetensors import safe_open

    with safe_open(packed, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        step = int(file.metadata()["step"])
    average = {}
    for key, value in tensors.items():
        if not key.endswith(".scales"):
            scales = tensors.get(f"{key}.scales")
            whole = value if scales is None else (value.flatten(1) * scales).view_as(value)
            average[key] = whole.to(DEVICE)
    return {"step": step, "weights": average, "average": average}


def clips_of(stage: Stage, seed: int, count: int) -> tuple[list[Scene], torch.Tensor]:
    """Return scenes and their clips, [N, 3, T, H, W] in [-1, 1]."""
    scenes = draw_scenes(seed, count, frames=stage.frames, aspect=stage.width / stage.height)
    clips = render(scenes, height=stage.height, width=stage.width, device=DEVICE)
    return scenes, clips * 2 - 1


def clips_at_once(stage: Stage, count: int) -> int:
    """Return how many of `count` clips are made at once, by one seed."""
    return min(count, max(LEAST_CLIPS, PIXELS // (stage.frames * stage.height * stage.width)))


def autocast() -> torch.autocast:
    """Return the context of all passes: bfloat16 where a GPU multiplies matrices."""
    on_gpu = DEVICE == "cuda"
    return torch.autocast(DEVICE, torch.bfloat16, enabled=on_gpu, cache_enabled=False)


def train_vae(size: Size, state: Path, options: argparse.Namespace) -> Any:
    """Train the autoencoder: L1 and a little KL, on crops; return it with its average.

    The first three quarters of the steps see five frames, which is quick, the others whole clips:
    without these, colours drift in later frames.
    """
    torch.manual_seed(0)
    vae = make_vae(size).to(DEVICE)
    training = Training({"vae": vae}, state / "vae.pt", steps=options.steps or STEPS_OF_VAE)
    stage, left = size.stages[0], options.seconds
    side, short = min(64, stage.height), min(5, stage.frames)
    for frames, until in ((short, training.steps * 3 // 4), (stage.frames, training.steps)):
        count = max(1, stage.batch * short // frames)
        given = torch.empty(count, 3, frames, side, side, device=DEVICE)

        def feed(step: int, given: torch.Tensor = given) -> None:
            count, _, *part = given.shape
            _, clips = clips_of(stage, TRAINING_SEEDS + step, count)
            places = torch.rand(3, generator=torch.Generator().manual_seed(step)).tolist()
            for axis, (place, length) in enumerate(zip(places, part, strict=True), 2):
                start = int(place * (clips.shape[axis] - length + 1))
                clips = clips.narrow(axis, start, length)
            given.copy_(clips)

        def loss_of(given: torch.Tensor = given) -> torch.Tensor:
            with autocast():
                posterior = vae.encode(given).latent_dist
                found = vae.decode(posterior.sample()).sample
            return F.l1_loss(found.float(), given) + 1e-6 * posterior.kl().mean() / 1024

        start = time.monotonic()
        training.run(feed, loss_of, left, rate=3e-3, until=until)
        left -= time.monotonic() - start
    training.use_average()
    return vae.requires_grad_(False)


@torch.no_grad()
def normalise(vae: Any, size: Size) -> None:
    """Note mean and deviation of the latents in the autoencoder's configuration."""
    _, clips = clips_of(size.stages[0], 1, min(64, size.stages[0].clips))
    with autocast():
        mean = vae.encode(clips).latent_dist.mean
        found = vae.decode(mean).sample.float()
    latents = mean.float().transpose(0, 1).flatten(1)
    vae.register_to_config(
        latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist()
    )
    errors = (found - clips).square().mean((0, 1, 3, 4))
    of_clip, of_last = (10 * math.log10(4 / x.item()) for x in (errors.mean(), errors[-1]))
    print(f"autoencoder: PSNR {of_clip:.1f} dB, last frame {of_last:.1f} dB", flush=True)


def make_autoencoder(size: Size, options: argparse.Namespace) -> None:
    """Train the autoencoder, and save it where a folder is given."""
    vae = train_vae(size, options.out, options)
    normalise(vae, size)
    if options.folder is not None:
        vae.half().save_pretrained(options.folder)


def autoencoder(size: Size, state: Path, options: argparse.Namespace) -> Any:
    """Return the autoencoder of a folder where one is given, or that of the state."""
    if options.vae is not None:
        from diffusers import AutoencoderKLWan

        vae = AutoencoderKLWan.from_pretrained(options.vae)
        return vae.to(DEVICE).requires_grad_(False)
    vae = train_vae(size, state, argparse.Namespace(**{**vars(options), "seconds": 0}))
    normalise(vae, size)
    return vae


class Pool:
    """Latents of clips with their captions, made once for a run; each rank has a part of its own.

    Args:
        vae: the autoencoder.
        tokenizer: of the captions.
        stage: the clips.
        seed: the seed of the first ones.
    """

    def __init__(self, vae: Any, tokenizer: Any, stage: Stage, seed: int) -> None:
        start = time.monotonic()
        self._stage = stage
        at_once = clips_at_once(stage, stage.clips)
        mean, deviation = (
            torch.tensor(x, device=DEVICE).view(1, -1, 1, 1, 1)
            for x in (vae.config.latents_mean, vae.config.latents_std)
        )
        found, captions = [], []
        every = -(-stage.clips // (at_once * ranks()))
        for number in range(every * rank(), every * (rank() + 1)):
            scenes, clips = clips_of(stage, seed + number, at_once)
            with torch.no_grad(), autocast():
                latents = vae.encode(clips).latent_dist.mean.float()
            found.append(((latents - mean) / deviation).bfloat16())
            captions += [scene.caption for scene in scenes]
        self.latents = torch.cat(found)
        # The last one is no caption at all.
        self.tokens, self.real = tokens_of(tokenizer, [*captions, ""], DEVICE)
        print(f"{len(captions)} clips, {time.monotonic() - start:.0f} s", flush=True)

    def serves(self, stage: Stage) -> bool:
        """Whether the clips are those of another stage, too."""
        own, clips = self._stage, (stage.frames, stage.height, stage.width, stage.clips)
        return (own.frames, own.height, own.width, own.clips) == clips


def train_transformer(size: Size, state: Path, options: argparse.Namespace) -> Any:
    """Train transformer and text encoder; return the pipeline with the average of both.

    A text encoder that learns to read does so when the training begins, and is trained no more.
    """
    vae = autoencoder(size, state, options)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    text_encoder = make_text_encoder(size, len(tokenizer)).to(DEVICE)
    if size.reading:
        if options.start is None and not (state / "transformer.pt").exists():
            read = learn_to_read(text_encoder, tokenizer, size.reading)
            print(f"text encoder: reads {read:.3f} of words", flush=True)
            for value in text_encoder.parameters() if ranks() > 1 else ():
                dist.broadcast(value.data, 0)  # ranks may differ in the last bits
        text_encoder.requires_grad_(False)
    transformer = make_transformer(size).to(DEVICE)
    if DEVICE == "cuda":
        # 2.4 times as many steps a second on the smaller grids; shapes are those of a few stages.
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    training = Training(
        {"transformer": transformer, "text_encoder": text_encoder},
        state / "transformer.pt",
        steps=sum(stage.steps for stage in size.stages),
        muon=size.muon,
        start=options.start,
    )
    end, last, rope = time.monotonic() + options.seconds, 0, transformer.rope
    pool: Pool | None = None
    held: Pool | None = None
    for stage in size.stages:
        first, last = last, last + stage.steps
        if training.step < last and time.monotonic() < end:
            if pool is None or held is None or not pool.serves(stage):
                pool = Pool(vae, tokenizer, stage, TRAINING_SEEDS + 100_000 + training.step)
                few = replace(stage, clips=min(stage.clips, HELD_OUT))
                held = Pool(vae, tokenizer, few, HELD_OUT_SEEDS)
            place_tokens(rope, *stretched_positions(rope, stage, size.stages[-1]))
            feed, loss_of = flow_matching(transformer, text_encoder, pool, stage)
            training.run(
                feed,
                loss_of,
                end - time.monotonic(),
                rate=stage.rate,
                until=last,
                cosine=range(first, last),
                held_out=mean_loss(*flow_matching(transformer, text_encoder, held, stage)),
            )
    place_tokens(rope, *stretched_positions(rope, size.stages[-1], size.stages[-1]))
    training.use_average()
    modules = (text_encoder, vae, transformer)
    shift = size.stages[-1].shift
    return make_pipeline(tokenizer, *(module.eval() for module in modules), shift=shift)


def place_tokens(rope: Any, *positions: torch.Tensor) -> None:
    """Have a transformer place the first tokens along time, height and width at these positions."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    start = 0
    for dim, places in zip((rope.t_dim, rope.h_dim, rope.w_dim), positions, strict=True):
        tables = get_1d_rotary_pos_embed(
            dim,
            places.double(),
            use_real=True,
            repeat_interleave_real=True,
            freqs_dtype=torch.float64,
        )
        for buffer, table in zip((rope.freqs_cos, rope.freqs_sin), tables, strict=True):
            buffer[: len(places), start : start + dim].copy_(table)
        start += dim


def stretched_positions(rope: Any, stage: Stage, last: Stage) -> list[torch.Tensor]:
    """Return positions at which the grid of a stage is as large as that of the last one."""
    grids = [((x.frames + 3) // 4, x.height, x.width) for x in (stage, last)]
    tokens = torch.arange(rope.max_seq_len, device=DEVICE, dtype=torch.float64)
    return [tokens * (whole / part) for part, whole in zip(*grids, strict=True)]


def drawn_positions(
    grid: Sequence[int], keep: Sequence[int], drawn: torch.Generator
) -> list[torch.Tensor]:
    """Return ascending positions of as many tokens as are kept along each axis of a grid.

    An axis is cut in as many even parts; of each one token is drawn.
    """
    positions = []
    for whole, few in zip(grid, keep, strict=True):
        parts = torch.arange(few, device=DEVICE) + torch.rand(few, generator=drawn, device=DEVICE)
        positions.append((parts * (whole / few)).long().clamp(max=whole - 1))
    return positions


def tokens_at(
    latents: torch.Tensor, patch: Sequence[int], positions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the latents [N, C, t, h, w] of the tokens at these positions of three axes."""
    for axis, (size, places) in enumerate(zip(patch, positions, strict=True), 2):
        of_tokens = latents.unflatten(axis, (-1, size))
        latents = of_tokens.index_select(axis, places).flatten(axis, axis + 1)
    return latents


def flow_matching(
    transformer: Any, text_encoder: Any, pool: Pool, stage: Stage
) -> tuple[Callable[[int], None], Callable[[], torch.Tensor]]:
    """Return what draws the noise and the clips of a step, and the loss on them."""
    batch, shift = max(1, stage.batch // ranks()), stage.shift
    patch = transformer.config.patch_size
    grid = [
        length // of_token for length, of_token in zip(pool.latents.shape[2:], patch, strict=True)
    ]
    kept = [few * of_token for few, of_token in zip(stage.keep or grid, patch, strict=True)]
    latents = torch.empty(batch, pool.latents.shape[1], *kept, device=DEVICE)
    noise, sigma = torch.empty_like(latents), torch.empty(batch, device=DEVICE)
    tokens, real = (x.new_empty(batch, *x.shape[1:]) for x in (pool.tokens, pool.real))

    def feed(step: int) -> None:
        drawn = torch.Generator(DEVICE).manual_seed(step * ranks() + rank())
        draws = torch.rand(3, batch, generator=drawn, device=DEVICE)
        chosen = (draws[0] * len(pool.latents)).long()
        said = torch.where(draws[1] < NO_CAPTION, len(pool.latents), chosen)
        clips = pool.latents[chosen]
        if stage.keep is not None:
            positions = drawn_positions(grid, stage.keep, drawn)
            place_tokens(transformer.rope, *positions)
            clips = tokens_at(clips, patch, positions)
        latents.copy_(clips)
        tokens.copy_(pool.tokens[said])
        real.copy_(pool.real[said])
        noise.normal_(generator=drawn)
        sigma.copy_(shift * draws[2] / (1 + (shift - 1) * draws[2]))

    def loss_of() -> torch.Tensor:
        mixed = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        with autocast():
            text = embedded(text_encoder, tokens, real)
            found = transformer(mixed, 1000 * sigma, text, return_dict=False)[0]
        return F.mse_loss(found.float(), noise - latents)

    return feed, loss_of


def mean_loss(
    feed: Callable[[int], None], loss_of: Callable[[], torch.Tensor]
) -> Callable[[], float]:
    """Return what gives the mean of the loss over draws that are the same each time."""

    def loss() -> float:
        found = []
        for number in range(HELD_OUT_STEPS):
            feed(number)
            # With gradients, though none is taken: without, what is compiled is compiled again.
            found.append(loss_of().item())
        return sum(found) / len(found)

    return loss


@torch.no_grad()
def evaluate(pipeline: Any, size: Size, count: int, steps: int) -> None:
    """Print the share of facts that generated clips hold, and that real ones do."""
    from score import facts

    pipeline.set_progress_bar_config(disable=True)
    stage = size.stages[-1]
    held: dict[str, dict[str, list[bool]]] = {"generated": {}, "real": {}}
    at_once = clips_at_once(stage, count)
    for number in range(-(-count // at_once)):
        scenes, real = clips_of(stage, EVALUATION_SEEDS + number, at_once)
        captions = [scene.caption for scene in scenes]
        with autocast():
            made = pipeline(
                captions,
                height=stage.height,
                width=stage.width,
                num_frames=stage.frames,
                num_inference_steps=steps,
                guidance_scale=3.0,
                generator=torch.Generator("cpu").manual_seed(number),
                output_type="np",
            ).frames
        shown = ((real + 1) / 2).permute(0, 2, 3, 4, 1).cpu().numpy()
        for which, clips in (("generated", made), ("real", shown)):
            for clip, caption in zip(clips, captions, strict=True):
                for kind, holds in facts(clip, caption).items():
                    held[which].setdefault(kind, []).extend(holds)
    for which, kinds in held.items():
        every = [holds for kind in kinds.values() for holds in kind]
        shares = [f"{kind} {_share(holds)}" for kind, holds in kinds.items()]
        print(f"{which}: {_share(every)} of facts; {', '.join(shares)}", flush=True)


def _share(holds: Sequence[bool]) -> str:
    return f"{sum(holds) / len(holds):.3f}" if holds else "none"


def require_trained(size: Size, options: argparse.Namespace) -> None:
    """Raise a ValueError where what is exported, packed, or trained on is not there."""
    wanted = {}
    if options.part == "pack":
        state = options.out / "transformer.pt"
        if options.folder is None or not state.exists():
            raise ValueError(f"pack must have a --folder, and {state}; train transformer first")
        return
    if options.part == "export":
        wanted["transformer"] = sum(stage.steps for stage in size.stages)
    if options.vae is None:
        wanted["vae"] = options.steps or STEPS_OF_VAE
    for part, steps in wanted.items():
        path = options.out / f"{part}.pt"
        found = torch.load(path, map_location="cpu", mmap=True)["step"] if path.exists() else None
        if found is None or found < steps:
            got = "no such file" if found is None else f"{found:,}"
            raise ValueError(f"{path} must have all {steps:,} steps, got {got}; train {part} first")
    if options.start is not None and not options.start.is_file():
        raise ValueError(f"--start must be a file that `pack` has written, got {options.start}")


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options."""
    yield "--size", {"choices": sorted(SIZES), "default": "small"}
    yield "--out", {"type": Path, "required": True, "help": "folder of the state"}
    yield "--seconds", {"type": float, "default": math.inf, "help": "stop after so long"}
    yield "--steps", {"type": int, "help": "steps of the autoencoder in all"}
    yield "--vae", {"type": Path, "help": "folder of a trained autoencoder"}
    yield "--start", {"type": Path, "help": "file of packed weights to begin with"}
    yield "--folder", {"type": Path, "help": "where the autoencoder or the pipeline is written"}
    yield "--evaluate", {"type": int, "default": 0, "help": "clips to generate and score"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("vae", "transformer", "export", "pack"))
    for name, more in options():
        parser.add_argument(name, **more)
    given = parser.parse_args(argv)
    size = SIZES[given.size]
    join_ranks()
    if given.part == "vae":
        make_autoencoder(size, given)
        return 0
    try:
        require_trained(size, given)
    except ValueError as error:
        parser.error(str(error))
    if given.part == "pack":
        pack(given.out / "transformer.pt", given.folder / "weights.safetensors")
        return 0
    if given.part == "export":
        given.seconds = 0
    pipeline = train_transformer(size, given.out, given)
    if leave_ranks():
        return 0
    if given.evaluate:
        evaluate(pipeline, size, given.evaluate, 20)
    if given.folder is not None:
        save(pipeline, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
