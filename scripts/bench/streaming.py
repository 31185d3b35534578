"""A causal video transformer chunk by chunk: a cache that never moves against shifted ones.

A Wan-shaped 1.3B transformer with random bf16 weights at 480p: 3 latent frames (4,680 tokens) a
chunk, a window of 21 frames of which 3 are a sink, 4 denoising steps and a clean pass. Contenders
differ in the self-attention and in how the past is kept alone:

* clone-and-shift: keys and values of the window in order; every chunk moves them by its length;
* cache: `CausalCache`, read by a layer of ours on the backend named; `in pieces` sees a chunk less,
  so that its slots are lists on the block-sparse engine; `windows in space` sees 3x3 tiles of 8x8
  around each, of every chunk, and `tall windows in space` 2x3 of 16x8, all of the height, which
  leave fewer of the kernel's steps empty; `video_sparse_attn` chooses a fifth of all; `8 bits`
  keeps bytes, `4 bits` and `2 bits` codes, but of the sink and the newest two chunks; `graph`
  replays a graph;
* no self-attention: the values as they are, and no past: what no attention can be faster than.

Outputs of all are compared after the window has been filled and has moved; then whole chunks are
timed in turns, and one attention call by itself. `chunk 1000` is the same after 1,000 chunks were
begun and committed, of which only the last ones were computed.

Columns: `frames_per_second` of the video, from whole chunks, nan for single calls; `rate_to_fa3`,
FLOP/s of a single call over FlashAttention 3's in the same run, and for chunks that of what
attention and the past add to a chunk without them, over what they add with FlashAttention 3 and a
shifted cache; `cache_gib`, what keys and values of the past take; `peak_gib`, the most memory of
the contender's chunk, all caches of the run included.

    python3 scripts/bench/run.py streaming --commit HASH [--only chunk] [--rounds 5]
    python3 scripts/bench/run.py streaming --commit HASH --smoke    # a tiny model, on any machine
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _attention import FA3, fa3, layer_on, sdpa
from _harness import (
    DEVICE,
    Bench,
    Row,
    capture,
    pattern,
    relative_error,
    time_calls,
    version_of,
)
from _streaming_model import SMOKE, WAN, Attend, Case, CausalModel

from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.causal_cache import (
    CacheSize,
    CausalCache,
    LayerCache,
)
from multimodal_gen.runtime.layers.attention.sparse.windows import pair_density

BOUND = 5e-2
# Codes of a normal distribution: 64 entries reach over about 4.8 deviations, so a step is 0.32 of
# one in 4 bits and 1.6 in 2 bits, and errs by that over sqrt(12), 0.09 and 0.46, in keys and values
# each. That twice; outputs that have nothing to do with each other differ by 1.4.
ROUNDED = {
    "cache, sage_attn": 0.2,
    "cache, 8 bits": 0.2,
    "cache, 4 bits": 0.26,
    "cache, 2 bits": 1.3,
}
IN_PIECES, IN_WINDOWS = "cache, in pieces", "cache, windows in space"
IN_TALL = "cache, tall windows in space"
CHOSEN = "cache, video_sparse_attn"
NOTHING = "no self-attention"
SEE_LESS = (IN_PIECES, IN_WINDOWS, IN_TALL, CHOSEN, NOTHING)
IN_GRAPHS = ("fa3, clone-and-shift", "cache, auto", IN_WINDOWS, IN_TALL, CHOSEN, NOTHING)
SPARSITY = 0.8
FORWARDS = 5  # four denoising steps and a clean pass
FRAMES_OF_LATENT = 4
FLOP = "4*L*H*D*queries*keys of the self-attention, per forward"


class Past:
    """Keeps nothing but how many chunks are past; `gib` is what keys and values take."""

    number = 0
    gib = 0.0

    def reset(self) -> None:
        """Start anew."""
        self.number = 0

    def begin(self) -> None:
        """Make room for the next chunk, and take it."""

    def commit(self, *kept: torch.Tensor) -> None:
        """Make a chunk past; with keys and values, those of every layer, if they are kept."""
        self.number += 1


class ShiftedPast(Past):
    """Keys and values in order; a chunk that does not fit moves those behind the sink."""

    def __init__(self, case: Case) -> None:
        shape = (case.layers, 1, case.keys, case.heads, case.head_size)
        self.case = case
        self.keys, self.values = (
            torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        )
        self.end = 0
        self.gib = 2 * self.keys.numel() * 2 / 2**30

    def reset(self) -> None:
        """Start anew."""
        super().reset()
        self.end = 0

    def begin(self) -> None:
        """Make room for the next chunk, and take it."""
        tokens, first = self.case.tokens, self.case.sink * self.case.tokens
        if self.end + tokens > self.case.keys:
            for past in (self.keys, self.values):
                for layer in past:
                    layer[:, first:-tokens] = layer[:, first + tokens :].clone()
            self.end -= tokens
        self.end += tokens

    def attend(self, attention: Callable[..., torch.Tensor]) -> Attend:
        """Return what writes the chunk and attends to what is seen."""

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = slice(self.end - self.case.tokens, self.end)
            self.keys[layer, :, rows], self.values[layer, :, rows] = k, v
            return attention(q, self.keys[layer, :, : self.end], self.values[layer, :, : self.end])

        return run


class SlottedPast(Past):
    """A `CausalCache` of the package."""

    def __init__(self, case: Case, *, bits: int = 16, tile: tuple[int, int] | None = None) -> None:
        self.case = case
        size = CacheSize(
            num_layers=case.layers,
            batch=1,
            num_kv_heads=case.heads,
            head_size=case.head_size,
            chunk_tokens=case.tokens,
            window=case.window,
            sink=case.sink,
            bits=bits,
            **({} if bits < 8 else {"grid": case.grid[1:], "tile": tile or case.tile}),
        )
        self.cache = CausalCache(size, DEVICE)
        self.gib = size.num_bytes / 2**30

    def reset(self) -> None:
        """Start anew."""
        super().reset()
        self.cache.reset()

    def begin(self) -> None:
        """Place the next chunk."""
        self.cache.begin(self.number * self.case.tokens, self.case.tokens)

    def commit(self, *kept: torch.Tensor) -> None:
        """Make the chunk past."""
        for layer in self.cache.layers if kept else ():
            layer.append(*kept)
        super().commit()
        self.cache.commit()

    def attend(
        self,
        layer: LocalAttention,
        *,
        window: int | None = None,
        space: tuple[int, int] | None = None,
    ) -> Attend:
        """Return what lets a layer write the chunk and attend to what is seen."""
        parts: list[LayerCache] = [x.view(None, window, space) for x in self.cache.layers]
        return lambda i, q, k, v: layer(q, k, v, cache=parts[i])


class Flex:
    """FlexAttention, compiled for a full window, with a block mask; PyTorch's own until then."""

    def __init__(self, case: Case) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.run = torch.compile(flex_attention, dynamic=False)
        keys = self.keys = case.keys
        self.mask = create_block_mask(
            lambda b, h, q, k: k < keys, None, None, case.tokens, keys, device=DEVICE
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention of q over k and v."""
        if k.shape[1] != self.keys:
            return sdpa(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.run(q, k, v, block_mask=self.mask).transpose(1, 2)


def contenders(case: Case) -> tuple[dict[str, tuple[Past, Attend]], dict[str, LocalAttention]]:
    """Return past and attention by name, and the layers of ours among them."""
    shifted, slotted = ShiftedPast(case), SlottedPast(case)
    flash, on_gpu = fa3(), DEVICE == "cuda"
    found: dict[str, tuple[Past, Attend]] = {}
    for name, attention in (
        ("fa3", flash),
        ("sdpa", sdpa),
        ("flex", Flex(case) if on_gpu else None),
    ):
        if attention is not None:
            found[f"{name}, clone-and-shift"] = (shifted, shifted.attend(attention))
    found[NOTHING] = (Past(), lambda i, q, k, v: v)
    chooses = {"sparsity": SPARSITY, "tile_size": [4, *case.tile]}
    layers = {}
    # Name, past, backend, its parameters, and what is seen of the past.
    for name, past, backend, config, seen in (
        ("cache, auto", slotted, None, None, {}),
        (IN_PIECES, slotted, None, None, {"window": case.window - 1}),
        (IN_WINDOWS, slotted, None, None, {"space": case.space}),
        (IN_TALL, SlottedPast(case, tile=case.tall_tile), None, None, {"space": case.tall}),
        (CHOSEN, slotted, "video_sparse_attn", chooses, {}),
        ("cache, triton_attn", slotted, "triton_attn", None, {}),
        ("cache, sage_attn", slotted, "sage_attn", None, {}),
        ("cache, fa", slotted, "fa", None, {}),
        ("cache, 8 bits", SlottedPast(case, bits=8), None, None, {}),
        ("cache, 4 bits", SlottedPast(case, bits=4), None, None, {}),
        ("cache, 2 bits", SlottedPast(case, bits=2), None, None, {}),
    ):
        if backend is None or (on_gpu and (backend != "fa" or flash is not None)):
            layers[name] = layer_on(case, backend, config)
            found[name] = (past, past.attend(layers[name], **seen))
    return found, layers


@dataclass(kw_only=True)
class Run:
    """A video that is made chunk by chunk, by contenders that take turns."""

    case: Case
    model: CausalModel
    found: dict[str, tuple[Past, Attend]]
    text: torch.Tensor
    time: torch.Tensor
    noise: torch.Tensor

    def chunk(
        self,
        name: str,
        *,
        forwards: int = FORWARDS,
        forward: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Make the next chunk of the contender's past, or have `forward` make it."""
        past, attend = self.found[name]
        past.begin()
        self.model.place(past.number)
        for _ in range(forwards):
            out = forward() if forward else self.model(self.noise, self.time, self.text, attend)
        past.commit()
        return out

    def video(self, name: str, chunks: int) -> torch.Tensor:
        """Start anew, and return the last of some chunks, each of one forward on its own noise."""
        self.found[name][0].reset()
        for seed in range(chunks):
            generator = torch.Generator(DEVICE).manual_seed(seed)
            self.noise.normal_(generator=generator)
            out = self.chunk(name, forwards=1)
        return out

    def pasts(self, start: str = "") -> list[Past]:
        """Return the pasts of the contenders whose names start so, each once."""
        found = [past for name, (past, _) in self.found.items() if name.startswith(start)]
        return [*{id(past): past for past in found}.values()]


def prepare(case: Case) -> tuple[Run, dict[str, LocalAttention]]:
    """Return a model with random weights and its contenders."""
    with torch.device(DEVICE):
        model = CausalModel(case).to(torch.bfloat16).eval()
    model.turns = [x.float() for x in model.turns]
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in model.parameters():
        # Outputs of unit variance, so that what attention adds is not small next to the noise.
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    found, layers = contenders(case)
    drawn = {"device": DEVICE, "dtype": torch.bfloat16, "generator": generator}
    run = Run(
        case=case,
        model=model,
        found=found,
        text=torch.randn(1, case.prompt, case.width, **drawn),
        time=torch.randn(6, case.width, **drawn),
        noise=torch.randn(1, case.tokens, case.width, **drawn),
    )
    return run, layers


def check(run: Run) -> tuple[dict[str, float], list[str]]:
    """Return relative errors after the window has moved, and who is wrong and so is not timed.

    Errors are NaN for those that see less by design.
    """
    chunks = run.case.window + run.case.sink + 3
    expected: torch.Tensor | None = None
    errors, wrong = {}, []
    for name in list(run.found):
        out = run.video(name, chunks) - run.noise
        expected = out if expected is None else expected
        error = relative_error(out, expected)
        sees_less = name in SEE_LESS
        errors[name] = math.nan if sees_less else error
        print(f"{name:24} relative error {error:.2e}{', sees less' if sees_less else ''}")
        bound = ROUNDED.get(name, BOUND)
        if not out.isfinite().all() or not (sees_less or error < bound):
            wrong.append(name)
            del run.found[name]
    return errors, wrong


def replayed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return what replays a graph of a call."""
    call()
    replay, out = capture(call)

    def run() -> torch.Tensor:
        replay()
        return out

    return run


def captured(run: Run, name: str) -> Callable[[], torch.Tensor]:
    """Return what makes a chunk by replaying a graph of one forward; slots are its data."""
    past, attend = run.found[name]
    run.chunk(name, forwards=1)
    past.begin()
    forward = replayed(lambda: run.model(run.noise, run.time, run.text, attend))
    forward()
    past.commit()
    return lambda: run.chunk(name, forward=forward)


def check_graph(run: Run, name: str, chunk: Callable[[], torch.Tensor]) -> None:
    """Stop unless replays give what plain calls give, two chunks on."""
    past, attend = run.found[name]
    for _ in range(2):
        out = chunk().clone()
        past.number -= 1
        if isinstance(past, SlottedPast):
            past.begin()  # the chunk that is kept, written anew
        plain = run.model(run.noise, run.time, run.text, attend)
        past.commit()
        error = relative_error(out, plain)
        if not error < BOUND:
            raise SystemExit(f"{name}, graph is wrong: relative error {error:.2e}")


def jump(case: Case, past: SlottedPast, number: int) -> None:
    """Let chunks pass that are not computed, and are written with noise."""
    shape = (1, case.tokens, case.heads, case.head_size)
    noise = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    while past.number < number:
        past.begin()
        past.commit(noise, noise)


def bench_chunks(run: Run, bench: Bench, errors: dict[str, float]) -> None:
    """Time whole chunks of all contenders, then chunk 1,000 of ours, and write their rows."""
    chunks = {name: (lambda name=name: run.chunk(name)) for name in run.found}
    if DEVICE == "cuda":
        for name in (name for name in IN_GRAPHS if name in run.found):
            chunks[f"{name}, graph"] = captured(run, name)
            check_graph(run, name, chunks[f"{name}, graph"])
    c = run.case
    for number, wanted in ((30, ""), (1000, "cache, auto")):
        some = {name: chunk for name, chunk in chunks.items() if name.startswith(wanted)}
        for past in run.pasts(wanted):
            if isinstance(past, SlottedPast):
                jump(c, past, number)
        for chunk in some.values():
            run.noise.normal_()
            chunk()
        times, peaks = time_calls(some, bench.options.rounds)
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        shares = {name: share_seen(c, name) for name in times}

        def more(
            row: Row,
            medians: dict[str, float] = medians,
            shares: dict[str, float] = shares,
            peaks: dict[str, float] = peaks,
        ) -> Row:
            name = row["contender"]
            frames = c.grid[0] * FRAMES_OF_LATENT
            return {
                "frames_per_second": round(1e3 * frames / row["median_ms"], 2),
                "rate_to_fa3": round(shares[name] * added_by_fa3(medians, name), 3),
                "cache_gib": round(run.found[name.removesuffix(", graph")][0].gib, 3),
                "peak_gib": round(peaks[name], 2),
            }

        flop = FORWARDS * c.layers * c.flop_of(c.keys)
        bench.write(
            times,
            case=f"{c.name}, chunk {number}, {FORWARDS} forwards",
            shape=f"B1 H{c.heads} S{c.tokens} K{c.keys} D{c.head_size} L{c.layers} bf16",
            flop={name: flop * share for name, share in shares.items()},
            flop_formula=FLOP,
            errors=errors,
            more=more,
        )


def share_seen(case: Case, contender: str) -> float:
    """Return the share of the window's keys that a contender's queries see, as a mean."""
    contender = contender.removesuffix(", graph")
    if contender == IN_PIECES:
        return 1 - case.tokens / case.keys
    if contender in (IN_WINDOWS, IN_TALL):
        space, tile = case.space, case.tile
        if contender == IN_TALL:
            space, tile = case.tall, case.tall_tile
        return pair_density((1, *space), (1, *case.grid[1:]), (1, *tile))
    return {CHOSEN: 1 - SPARSITY, NOTHING: 0.0}.get(contender, 1.0)


def added_by_fa3(medians: dict[str, float], contender: str) -> float:
    """Return how much more FlashAttention 3 adds to a chunk without attention than a contender.

    Args:
        medians: milliseconds of a chunk by contender.
        contender: compared as a graph if it is one; nan where there is nothing to compare with.
    """
    kind = ", graph" if contender.endswith(", graph") else ""
    base = medians.get(f"{NOTHING}{kind}", math.nan)
    added = medians[contender] - base
    return (medians.get(f"fa3, clone-and-shift{kind}", math.nan) - base) / (added or math.nan)


def bench_attention(run: Run, bench: Bench) -> None:
    """Time and write one layer's attention over a full window, writing the chunk included."""
    c = run.case
    drawn = {"device": DEVICE, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, c.tokens, c.heads, c.head_size, **drawn) for _ in range(3))
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for past in run.pasts():
        past.begin()
    for name, (_, attend) in run.found.items():
        if name == NOTHING:
            continue
        calls[name] = lambda attend=attend: attend(0, q, k, v)
        if DEVICE == "cuda" and name in IN_GRAPHS:
            calls[f"{name}, graph"] = replayed(calls[name])
    flash = fa3()
    if flash is not None:
        keys, values = (torch.randn(1, c.keys, c.heads, c.head_size, **drawn) for _ in range(2))
        calls[FA3] = lambda: flash(q, keys, values)
    times = bench.time(calls, block_ms=60.0)
    for past in run.pasts():
        past.commit(k, v)
    medians = {name: statistics.median(t) for name, t in times.items()}
    fastest = medians.get(FA3, math.nan) / c.flop_of(c.keys)
    seen = {name: round(c.keys * share_seen(c, name)) for name in times}

    def more(row: Row) -> Row:
        name = row["contender"]
        return {
            "shape": f"B1 H{c.heads} S{c.tokens} K{seen[name]} D{c.head_size} bf16",
            "frames_per_second": math.nan,
            "rate_to_fa3": round(fastest / (medians[name] / c.flop_of(seen[name])), 3),
            "cache_gib": math.nan,
            "peak_gib": math.nan,
        }

    bench.write(
        times,
        case=f"{c.name}, one call",
        shape="",
        flop={name: c.flop_of(keys) for name, keys in seen.items()},
        flop_formula="4*H*D*queries*keys",
        versions={FA3: version_of("fa3-fwd")},
        more=more,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark alone."""
    parser.add_argument(
        "--contenders", type=pattern, default="", help="their pattern; the first one is right"
    )


def main(bench: Bench) -> None:
    """Check, time, and append to `streaming.csv`."""
    options = bench.options
    attention, chunks = bench.wants("one call"), bench.wants("chunk")
    run, layers = prepare(SMOKE if options.smoke else WAN)
    run.found = {n: pair for n, pair in run.found.items() if bench.wants(n, "contenders")}
    if not run.found:
        return
    with torch.inference_mode():
        errors, wrong = check(run)
        if attention:
            bench_attention(run, bench)
        if chunks:
            bench_chunks(run, bench, errors)
    for name, layer in layers.items():
        report = layer.report()
        ran = [e for e in (*report.entries, *report.detours) if e.calls]
        print(name, [(e.selection.label, e.calls) for e in ran], flush=True)
    if wrong:
        raise SystemExit(f"wrong, and not timed: {', '.join(wrong)}")
