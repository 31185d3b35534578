"""One forward of Wan2.1-14B over several GPUs: `apply` against diffusers' context parallelism."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from _harness import DEVICE, Bench, version_of
from _ranks import ONE, Contender, Ranks, sent_bytes
from diffusers import ContextParallelConfig, WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend
from wan_forward import CASES, SMOKE, Case, applied, build, check_report, twin_of

from multimodal_gen import AttentionHandle
from multimodal_gen.runtime.attention_report import AttentionReport
from multimodal_gen.runtime.distributed.mesh import Mesh

EXACT = 5e-2  # what bf16 explains


class Models:
    """Contenders of one forward, on copies of a model that share its weights.

    Args:
        ranks: the processes.
        case: the model.
        smoke: whether nothing is compiled.
    """

    def __init__(self, ranks: Ranks, case: Case, *, smoke: bool) -> None:
        self.ranks, self.case, self.smoke = ranks, case, smoke
        self.plain, self.inputs = build(case)

    def compiled(self) -> WanTransformer3DModel:
        """Return one whose blocks are compiled."""
        twin = twin_of(self.plain)
        # One GPU and several have other shapes; none should run in a graph made for any shape.
        backend = "eager" if self.smoke else "inductor"
        twin.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=backend)
        return twin

    def stock(self, name: str, mesh: Mesh, **more: object) -> Contender:
        """Return a contender that is diffusers' own, with its context parallelism."""
        backend = "_native_cudnn" if DEVICE == "cuda" else "native"
        model = self.plain if mesh == ONE else twin_of(self.plain)
        if mesh != ONE:
            config = ContextParallelConfig(ulysses_degree=mesh.ulysses, ring_degree=mesh.ring)
            with attention_backend(backend):
                model.enable_parallelism(config=config)

        @contextmanager
        def around() -> Iterator[None]:
            # No groups of ours: diffusers has its own.
            with self.ranks.sharing(ONE), torch.inference_mode(), attention_backend(backend):
                yield

        return self._contender(name, model, mesh, around=around, **more)

    def ours(
        self,
        name: str,
        mesh: Mesh,
        backend: str | None = None,
        model: WanTransformer3DModel | None = None,
        **more: object,
    ) -> Contender:
        """Return a contender with `apply`."""
        model = model or self.plain

        @contextmanager
        def around() -> Iterator[AttentionHandle]:
            with torch.inference_mode(), applied(model, backend) as handle:
                yield handle

        def check(report: AttentionReport) -> None:
            check_report(self.case, name, report, mean=mean_over_ranks, say=self.ranks.say)

        return self._contender(name, model, mesh, around=around, check=check, **more)

    def _contender(
        self, name: str, model: WanTransformer3DModel, mesh: Mesh, **more: object
    ) -> Contender:
        case = self.case
        sent = sent_bytes(mesh, tokens=case.tokens, heads=case.heads, size=128) * case.layers

        def run() -> torch.Tensor:
            return model(**self.inputs, return_dict=False)[0]

        return Contender(name=name, run=run, mesh=mesh, sent=sent, **more)


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return the means of what every rank has."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def dense_contenders(ranks: Ranks, models: Models, bench: Bench) -> list[Contender]:
    """Return stock and ours on one GPU and in every layout."""
    found = [models.stock("stock, 1 GPU", ONE), models.ours("ours, 1 GPU", ONE)]
    for layout, mesh in ranks.meshes().items():
        # diffusers knows no context parallelism on the CPU.
        if torch.accelerator.device_count():
            found.append(models.stock(f"stock, {layout}", mesh, one_gpu="stock, 1 GPU"))
        for chunks in (1, *bench.options.chunks) if mesh.ring == 1 else (1,):
            name = f"ours, {layout}" + (f", {chunks} chunks" if chunks > 1 else "")
            found.append(models.ours(name, mesh, one_gpu="ours, 1 GPU", chunks=chunks))
    return found


def method_contenders(
    ranks: Ranks, models: Models, model: WanTransformer3DModel, bench: Bench, method: str
) -> list[Contender]:
    """Return a method of ours on one GPU and with all GPUs as one Ulysses group."""
    ours = {"backend": None if method == "dense" else method, "model": model}
    found = [models.ours(f"{method}, 1 GPU", ONE, **ours)]
    for chunks in (1, *bench.options.chunks):
        name = f"{method}, ulysses {ranks.size}" + (f", {chunks} chunks" if chunks > 1 else "")
        more = {"one_gpu": f"{method}, 1 GPU", "chunks": chunks}
        found.append(models.ours(name, Mesh(ulysses=ranks.size), **ours, **more))
    return found


def forward_case(ranks: Ranks, bench: Bench) -> None:
    """Dense, then sparse, eager and where asked compiled; each written as it ends."""
    options = bench.options
    full = SMOKE[0] if options.smoke else next(case for case in CASES if "14B" in case.name)
    heads = ranks.size if options.smoke else full.heads
    case = replace(full, heads=heads, layers=options.layers or full.layers)
    models = Models(ranks, case, smoke=options.smoke)
    dist.barrier()
    ranks.say(f"{case.name}: {case.layers} layers are built")

    def measure(contenders: list[Contender], name: str, bound: float) -> None:
        ranks.measure(
            bench,
            [c for c in contenders if c.name not in options.skip],
            bound=bound,
            rounds=options.rounds,
            case=f"{case.name}, {name}",
            shape=case.shape,
            flop=case.flop,
            flop_formula="4*L*H*S*S*D, self-attention only, as if dense",
            versions=version_of("diffusers"),
        )

    for mode in options.modes:
        if mode == "eager" and options.wants("forward dense"):
            measure(dense_contenders(ranks, models, bench), "dense, eager", EXACT)
        target = models.compiled() if mode == "compiled" else models.plain
        for method in options.methods if options.wants("forward methods") else ():
            contenders = method_contenders(ranks, models, target, bench, method)
            # Methods that choose by the data may choose otherwise where two blocks are as good.
            bound = EXACT if method in ("dense", "sliding_tile_attn") else math.inf
            measure(contenders, f"{method}, {mode}", bound)
