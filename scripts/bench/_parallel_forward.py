"""One forward of Wan2.1-14B over several GPUs: `apply` against diffusers' context parallelism."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from _harness import DEVICE, Bench, relative_error, version_of
from _ranks import ONE, Contender, Ranks, Reading, sent_bytes
from diffusers import ContextParallelConfig, WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend
from wan_forward import CASES, SMOKE, SPARSE, Case, applied, build, expected_density

from multimodal_gen.runtime.distributed.mesh import Mesh
from multimodal_gen.runtime.layers.attention.report import AttentionReport
from multimodal_gen.runtime.layers.attention.request import AttentionRole

Inputs = dict[str, torch.Tensor]


class Models:
    """Copies of a model that share its weights, each for what would be in the others' way."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        self.plain = model

    def twin(self) -> WanTransformer3DModel:
        """Return another model with the same weights, in the same memory."""
        tensors = (*self.plain.parameters(), *self.plain.buffers())
        return copy.deepcopy(self.plain, {id(x): x for x in tensors})

    def compiled(self, *, smoke: bool) -> WanTransformer3DModel:
        """Return one whose blocks are compiled."""
        twin = self.twin()
        # One GPU and several have other shapes; none should run in a graph made for any shape.
        backend = "eager" if smoke else "inductor"
        twin.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=backend)
        return twin

    def stock_parallel(self, backend: str, mesh: Mesh) -> WanTransformer3DModel:
        """Return one with diffusers' context parallelism."""
        twin = self.twin()
        config = ContextParallelConfig(ulysses_degree=mesh.ulysses, ring_degree=mesh.ring)
        with attention_backend(backend):
            twin.enable_parallelism(config=config)
        return twin


class Runs:
    """Makes contenders that run one forward, and keeps what the last one returned."""

    def __init__(self, ranks: Ranks, case: Case, inputs: Inputs) -> None:
        self._ranks = ranks
        self._case = case
        self._inputs = inputs
        self.output: torch.Tensor | None = None
        self.report: object = None

    def forward(self, model: WanTransformer3DModel) -> None:
        """Run the model."""
        self.output = model(**self._inputs, return_dict=False)[0]

    def stock(
        self, name: str, model: WanTransformer3DModel, backend: str, mesh: Mesh, **more: object
    ) -> Contender:
        """Return a contender that is diffusers' own."""

        @contextmanager
        def around() -> Iterator[Reading]:
            self.report = None
            # No groups of ours: diffusers has its own.
            with self._ranks.sharing(ONE), torch.inference_mode(), attention_backend(backend):
                yield None

        return self._contender(name, model, mesh, around, **more)

    def ours(
        self,
        name: str,
        model: WanTransformer3DModel,
        mesh: Mesh,
        backend: str | None = None,
        **more: object,
    ) -> Contender:
        """Return a contender with `apply`."""

        @contextmanager
        def around() -> Iterator[Reading]:
            with torch.inference_mode(), applied(model, backend) as handle:
                self.report = handle.report
                yield lambda: handle.report().times

        return self._contender(name, model, mesh, around, **more)

    def _contender(
        self,
        name: str,
        model: WanTransformer3DModel,
        mesh: Mesh,
        around: object,
        **more: object,
    ) -> Contender:
        case = self._case
        sent = sent_bytes(mesh, tokens=case.tokens, heads=case.heads, size=128) * case.layers
        return Contender(
            name=name,
            run=lambda: self.forward(model),
            mesh=mesh,
            around=around,
            sent=sent,
            **more,
        )


def dense_contenders(ranks: Ranks, runs: Runs, models: Models, bench: Bench) -> list[Contender]:
    """Return stock and ours on one GPU and in every layout."""
    backend = "_native_cudnn" if DEVICE == "cuda" else "native"
    found = [
        runs.stock("stock, 1 GPU", models.plain, backend, ONE),
        runs.ours("ours, 1 GPU", models.plain, ONE),
    ]
    for layout, mesh in ranks.meshes().items():
        # diffusers knows no context parallelism on the CPU.
        if torch.accelerator.device_count():
            twin = models.stock_parallel(backend, mesh)
            found.append(
                runs.stock(f"stock, {layout}", twin, backend, mesh, one_gpu="stock, 1 GPU")
            )
        ours = {"mesh": mesh, "one_gpu": "ours, 1 GPU"}
        found.append(runs.ours(f"ours, {layout}", models.plain, **ours))
        for chunks in bench.options.chunks if mesh.ring == 1 else ():
            name = f"ours, {layout}, {chunks} chunks"
            found.append(runs.ours(name, models.plain, chunks=chunks, **ours))
    return found


def method_contenders(
    ranks: Ranks,
    runs: Runs,
    model: WanTransformer3DModel,
    bench: Bench,
    method: str | None,
) -> list[Contender]:
    """Return a method of ours on one GPU and with all GPUs as one Ulysses group."""
    mesh = Mesh(ulysses=ranks.size)
    label = method or "dense"
    one = f"{label}, 1 GPU"
    found = [runs.ours(one, model, ONE, method)]
    for chunks in (1, *bench.options.chunks):
        suffix = f", {chunks} chunks" if chunks > 1 else ""
        name = f"{label}, ulysses {ranks.size}{suffix}"
        found.append(runs.ours(name, model, mesh, method, one_gpu=one, chunks=chunks))
    return found


def check_report(ranks: Ranks, case: Case, name: str, report: AttentionReport) -> None:
    """Stop unless every layer ran once, and every self-attention of a sparse method sparse.

    A rank's report speaks of its own heads: the density of a layer is the mean over the ranks.
    """
    idle = [layer.name for layer in report.layers if layer.calls != 1]
    if idle:
        raise SystemExit(f"{case.name}: {name} did not run in {idle}")
    backend = name.partition(",")[0]
    if backend not in SPARSE:
        return
    own = [layer for layer in report.layers if layer.role is AttentionRole.SELF]
    ran = [[e for e in (*x.entries, *x.detours) if e.calls] for x in own]
    others = [str(e.selection.backend) for entries in ran for e in entries]
    if set(others) != {backend}:
        raise SystemExit(f"{case.name}: {name} must run {backend} in every layer, ran {others}")
    densities = torch.tensor([entries[0].density or 0 for entries in ran], dtype=torch.float64)
    dist.all_reduce(densities)
    densities /= ranks.size
    least, most = expected_density(case, backend)
    if not ((least < densities) & (densities < most)).all():
        raise SystemExit(f"{case.name}: {name} has densities {densities.tolist()}")
    ranks.say(f"{case.name}: {name} at density {float(densities.mean()):.4f}")


def check(
    ranks: Ranks, case: Case, runs: Runs, contenders: list[Contender], *, exact: bool
) -> dict[str, float]:
    """Run every contender once and compare it with the first; this warms up, too.

    Args:
        ranks: the processes.
        case: what runs.
        runs: where outputs are.
        contenders: what to run.
        exact: stop where outputs differ by more than bf16 explains. Methods that choose by the
            data may choose otherwise where two blocks are as good, and then only show by how much.
    """
    expected: torch.Tensor | None = None
    errors = {}
    for c in list(contenders):
        with ranks.sharing(c.mesh, c.chunks), c.around():
            try:
                c.run()
            except (RuntimeError, ValueError) as error:
                if runs.report is not None or expected is None:
                    raise
                # Not ours: the rest is worth having without it.
                ranks.fail(f"{case.name}: {c.name}: {error}")
                contenders.remove(c)
                continue
            out, report = runs.output, runs.report
            assert out is not None, "it ran"
            if callable(report):
                check_report(ranks, case, c.name, report())
        if not out.isfinite().all():
            raise SystemExit(f"{case.name}: {c.name} is not finite")
        expected = out if expected is None else expected
        errors[c.name] = ranks.worst(relative_error(out, expected))
        ranks.say(f"{case.name}: {c.name} has relative error {errors[c.name]:.2e}")
        if exact and not errors[c.name] < 5e-2:
            raise SystemExit(f"{case.name}: {c.name} is wrong, error {errors[c.name]:.2e}")
    return errors


def forward_case(ranks: Ranks, bench: Bench) -> None:
    """Dense, then sparse, eager and where asked compiled; each written as it ends."""
    full = SMOKE[0] if bench.options.smoke else next(case for case in CASES if "14B" in case.name)
    heads = ranks.size if bench.options.smoke else full.heads
    layers = bench.options.layers or full.layers
    case = Case(name=full.name, heads=heads, layers=layers, ffn=full.ffn, latent=full.latent)
    model, inputs = build(case)
    dist.barrier()
    ranks.say(f"{case.name}: {layers} layers are built")
    runs, models = Runs(ranks, case, inputs), Models(model)
    for mode in bench.options.modes:
        if mode == "eager" and bench.options.wants("forward dense"):
            contenders = dense_contenders(ranks, runs, models, bench)
            _measure(ranks, bench, case, runs, contenders, "dense, eager", exact=True)
        target = models.compiled(smoke=bench.options.smoke) if mode == "compiled" else model
        for method in bench.options.methods if bench.options.wants("forward methods") else ():
            backend = None if method == "dense" else method
            contenders = method_contenders(ranks, runs, target, bench, backend)
            exact = method in ("dense", "sliding_tile_attn")
            _measure(ranks, bench, case, runs, contenders, f"{method}, {mode}", exact=exact)


def _measure(
    ranks: Ranks,
    bench: Bench,
    case: Case,
    runs: Runs,
    contenders: list[Contender],
    name: str,
    *,
    exact: bool,
) -> None:
    contenders = [c for c in contenders if c.name not in bench.options.skip]
    errors = check(ranks, case, runs, contenders, exact=exact)
    ranks.measure(
        bench,
        contenders,
        rounds=bench.options.rounds,
        case=f"{case.name}, {name}",
        shape=case.shape,
        flop=case.flop,
        flop_formula="4*L*H*S*S*D, self-attention only, as if dense",
        errors=errors,
        versions=version_of("diffusers"),
    )
