"""The report names the kernel that ran, on every machine that the declarations tell apart.

Kernels are stand-ins that record their names. A machine is a platform, a compute capability and a
version, or none, of every package that a backend declares; layers differ in head size and dtype.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import MappingProxyType, ModuleType
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from multimodal_gen.errors import UnsupportedBackendError
from multimodal_gen.kernels.block_sparse import api as block_sparse
from multimodal_gen.kernels.engine import QUANTIZED
from multimodal_gen.kernels.kmeans.api import Clusters, kmeans
from multimodal_gen.kernels.quantized_attention import api as quantized_attention
from multimodal_gen.kernels.requirements import HeadSizes, PackageProbe
from multimodal_gen.runtime.layers.attention import LocalAttention, attention_layer
from multimodal_gen.runtime.layers.attention.backends import flex_attn, sage_attn, sdpa
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.backends.declaration import SAGE, Variant
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.binding import Demand, ScheduleEntry, bind_schedule
from multimodal_gen.runtime.layers.attention.call import LayerGeometry
from multimodal_gen.runtime.layers.attention.config import BackendConfig, parameters_of
from multimodal_gen.runtime.layers.attention.report import ReportEntry
from multimodal_gen.runtime.layers.attention.request import AttentionRequest, Environment
from multimodal_gen.runtime.layers.attention.scope import (
    BackendPreference,
    LayerSite,
    SelectionScope,
    Source,
)
from multimodal_gen.runtime.layers.attention.sparse.methods import sla, sparge, svg2, vmoba, vsa
from multimodal_gen.runtime.layers.attention.sparse.methods.sta import router as sta
from multimodal_gen.runtime.managers.forward_context import set_forward_context
from multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    DeviceCapability,
    PlatformEnum,
)
from tests.helpers.fakes import machine_with

HEADS = 2

# Module of a package -> variant or variants that call it.
PACKAGES = MappingProxyType(
    {
        "flash_attn_interface": ("fa3", "fa3_fp8", "musa"),
        "fa3_fwd_interface": ("fa3_fwd", "fa3_fwd_fp8"),
        "flash_attn.cute": ("fa4", "fa4_fwd", "fa4_sm100"),
        "flash_attn": ("fa2",),
        "sgl_kernel.flash_attn": ("xpu",),
        "torch_npu": ("npu",),
        "sageattention": ("sage1", "sage2", "musa"),
        "sageattn3": ("sage3",),
        "aiter": ("aiter",),
        "aiter.ops.triton.attention.fav3_sage": ("aiter_sage",),
        "flashinfer": ("flashinfer",),
        "xformers.ops": ("xformers",),
        "cudnn": ("fp8",),
    }
)

# Parameters that a method must have, or that make its first step sparse.
PARAMETERS = MappingProxyType(
    {
        "sliding_tile_attn": {"window": (1, 1, 3), "skip_time_steps": 0},
        "video_sparse_attn": {"sparsity": 0.5},
        "video_sparse_attn_h3": {"sparsity": 0.5},
        "sol_attn": {"dense_steps": None, "dense_layers": None},
        "subblock_sparse_attn": {"skip_first_steps": 0, "min_seq_len": 0},
        "skip_softmax": {"threshold": 0.1},
        "nabla_attn": {"tile_size": [4, 4, 4]},
        "draft_attn": {"pool_h": 8, "pool_w": 8},
        "sparse_video_gen_2_attn": {
            "svg2_num_q_centroids": 3,
            "svg2_num_k_centroids": 3,
            "svg2_kmeans_iter_init": 1,
            "svg2_first_layers_fp": 0,
            "svg2_first_times_fp": 0,
        },
        "vmoba_attn": {
            "st_chunk_size": (2, 4, 4),
            "temporal_layer": 0,
            "spatial_layer": 0,
            "first_full_step": 0,
        },
    }
)
WHOLE, RAGGED = (4, 4, 8), (3, 5, 7)
LARGER = {"draft_attn": (2, 8, 8)}  # of blocks in one frame, which a kernel wants of 64 tokens


class Recorder(ModuleType):
    """A package whose functions tell the name of the package, and return zeros."""

    def __init__(self, name: str, ran: list[str]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._ran = ran

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def run(*tensors: torch.Tensor, **options: Any) -> Any:
            self._ran.append(self.__name__)
            out = torch.zeros_like(tensors[0])
            return (out, out[..., :1]) if "softmax_lse_flag" in options else out

        return run


def stand_in(ran: list[str], name: str) -> Callable[..., torch.Tensor]:
    """Return a function of queries, or of a call, that records `name` and gives zeros."""

    def run(given: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        ran.append(name)
        return torch.zeros_like(getattr(given, "query", given))

    return run


def kmeans_by_reference(*arguments: Any, **options: Any) -> Clusters:
    return kmeans(*arguments, **options | {"kernel": "reference"})


def engine_kernels(
    ran: list[str], names: tuple[str, ...], ending: str
) -> MappingProxyType[str, Any]:
    """Return stand-ins for the kernels of an engine, which record their names with an ending."""

    def recorder(name: str) -> Callable[[Any], Any]:
        def run(call: Any) -> Any:
            ran.append(f"{name}{ending}")
            q = call.q
            lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
            return torch.zeros_like(q), lse if call.return_lse else None

        return run

    return MappingProxyType({name: recorder(name) for name in names})


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Put stand-ins in place of every kernel; return the names of those that ran."""
    ran: list[str] = []
    with ExitStack() as stack:
        modules: dict[str, ModuleType] = {}
        for dotted in PACKAGES:
            parts = dotted.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in modules:
                    modules[name] = Recorder(name, ran)
                    if end > 1:
                        setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[name])
        clusters = ModuleType("cluster_attention_kernel")
        clusters.attend = lambda q, *_, **__: ran.append("gluon") or (torch.zeros_like(q), None)
        modules["multimodal_gen.kernels.cluster_attention.cluster_attention_kernel"] = clusters
        stack.enter_context(patch.dict(sys.modules, modules))
        for module, ending in ((block_sparse, ""), (quantized_attention, SAGE)):
            kernels = engine_kernels(ran, tuple(module.RUN), ending)
            stack.enter_context(patch.object(module, "RUN", kernels))
        for module in (sta, vsa, sla, svg2, vmoba):
            fake = stand_in(ran, "upstream")
            stack.enter_context(patch.object(module, "attend_upstream", fake))
        for module in (sage_attn, sla, sparge):
            fake = stand_in(ran, "spas_sage_attn")
            stack.enter_context(patch.object(module, "attend_spas_sage", fake))
        stack.enter_context(patch.object(svg2, "kmeans", kmeans_by_reference))
        dense = stand_in(ran, "torch")
        stack.enter_context(patch.object(sdpa.F, "scaled_dot_product_attention", dense))
        stack.enter_context(patch.object(flex_attn, "_unfused", dense))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        stack.enter_context(patch.object(cudnn, "default", lambda q, *_, **__: (dense(q), None)))
        graph = stand_in(ran, "cudnn")
        by_graph = lambda _, q, *__, **___: (graph(q), None)  # noqa: E731
        stack.enter_context(patch.object(sdpa, "attend_e4m3", by_graph))
        fp64 = type("Properties", (), {"has_fp64": True})
        stack.enter_context(patch("torch.xpu.get_device_properties", lambda *_: fp64))
        yield ran


@dataclass(frozen=True)
class Machine:
    """A machine that a layer may run on, and what varies between layers."""

    platform: PlatformEnum
    capability: tuple[int, int] | None
    versions: tuple[tuple[str, str, str], ...]
    head_size: int
    dtype: torch.dtype

    def request(self) -> AttentionRequest:
        capability = self.capability
        environment = Environment(
            platform=self.platform,
            capability=None if capability is None else DeviceCapability(*capability),
            packages=frozenset(self.versions),
        )
        return AttentionRequest(
            environment=environment,
            head_size=self.head_size,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            dtype=self.dtype,
        )


def capabilities(variants: tuple[Variant, ...]) -> list[tuple[int, int]]:
    """Return the compute capabilities that declarations tell apart, and one below them all."""
    found = {(7, 5)}
    for variant in variants:
        bounds = variant.capability
        found.update(bounds.exact)
        found.update(c for c in (bounds.minimum, bounds.below) if c and c > (0, 0))
    return sorted(found)


def versions_of(probes: set[PackageProbe]) -> list[str | None]:
    """Return the versions of a package that its probes tell apart, and None for none."""
    bounds = [bound for probe in probes for bound in (probe.minimum, probe.below) if bound]
    found = [*bounds, "0.0.1"] if bounds else ["1.0"]
    if bounds == ["4.0.0b36"]:
        found = ["4.0.0b20", *bounds, "4.0.0"]
    return [None, *sorted(set(found))]


def sizes_of(head_sizes: HeadSizes) -> set[int]:
    """Return the smallest and the largest head size, and those beside them."""
    taken = [size for size in range(1, 600) if size in head_sizes]
    return {taken[0], 64, *(size + step for size in (taken[0], taken[-1]) for step in (0, 8))}


def packages_of(variants: tuple[Variant, ...]) -> Iterator[dict[str, str]]:
    """Yield the versions of packages that variants tell apart, by distribution.

    Packages of a sparse method's authors are there all or none: nothing is chosen by them.
    """
    probes = {probe for variant in variants for probe in variant.packages}
    engines = {probe for v in variants if v.kernel is not None for probe in v.packages}
    bounded = {probe for probe in probes if probe.minimum or probe.below}
    varied = sorted({probe.distribution for probe in (engines | bounded if engines else probes)})
    others = {probe.distribution for probe in probes} - set(varied)
    choices = [versions_of({p for p in probes if p.distribution == name}) for name in varied]
    for versions, more in product(product(*choices), (False, True) if others else (False,)):
        found = dict.fromkeys(others, "1.0") if more else {}
        found.update((n, v) for n, v in zip(varied, versions, strict=True) if v is not None)
        yield found


def machines(variants: tuple[Variant, ...]) -> Iterator[Machine]:
    """Yield every machine and layer that declarations tell apart."""
    probes = {probe for variant in variants for probe in variant.packages}
    sizes = sorted({size for v in variants for size in sizes_of(v.head_sizes) if size <= 264})
    dtypes = sorted({dtype for v in variants for dtype in v.dtypes}, key=str)
    platforms = sorted({name for v in variants for name in v.platforms}, key=str)
    for platform in platforms:
        if platform is PlatformEnum.OOT:
            continue
        on_cuda = platform is PlatformEnum.CUDA
        places = capabilities(variants) if on_cuda else [None]
        installed = list(packages_of(variants))
        for place, versions in product(places, installed if on_cuda else installed[-1:]):
            packages = tuple(
                sorted(
                    (probe.module, probe.distribution, versions[probe.distribution])
                    for probe in probes
                    if probe.distribution in versions
                )
            )
            for size, dtype in product(sizes, dtypes):
                yield Machine(platform, place, packages, size, dtype)


def asked_for(name: AttentionBackendEnum, cls: type[AttentionBackend]) -> list[BackendPreference]:
    """Return a request for a backend by its name, and one for each of its kernels by theirs."""
    kernel = parameters_of(cls.config_cls).get("kernel")
    kernels = ["auto"]
    if kernel is not None and cls.config_cls is not sage_attn.SageAttnConfig:
        kernels = [*get_args(kernel.annotation)]
    parameters = PARAMETERS.get(str(name), {})
    configs: list[BackendConfig | None] = [None]
    if parameters or len(kernels) > 1:
        configs = [cls.config_cls(**parameters, kernel=kernel) for kernel in kernels]
    if "compute_mode" in parameters_of(cls.config_cls):
        given: dict[str, Any] = {**parameters, "compute_mode": "sage_bf16"}
        configs += [cls.config_cls(**given, kernel=x) for x in ("auto", *QUANTIZED.names)]
    return [
        BackendPreference(source=Source.SETTINGS, backend=name, config=config) for config in configs
    ]


def kernel_of(cls: type[AttentionBackend], variant: Variant) -> str:
    """Return what the stand-in of a variant's kernel records."""
    if variant.kernel in QUANTIZED.kernels:
        return f"{variant.kernel.name}{SAGE}"
    if variant.kernel is not None or variant.name == "spas_sage_attn":
        return variant.name
    if cls.backend.is_sparse:
        return "upstream"
    called = [module for module, names in PACKAGES.items() if variant.name in names]
    modules = {probe.module for probe in variant.packages}
    return next((m for m in called if any(x.startswith(m) for x in modules)), "torch")


def reported(entry: ScheduleEntry) -> Counter[str]:
    """Return how many calls each variant served, as the report says."""
    entries, detours = entry.entries()
    found: Counter[str] = Counter()
    for part in (*entries, *detours):
        found[part.selection.variant] += part.calls
    return found


def said_and_ran(
    entry: ScheduleEntry, machine: Machine, grid: tuple[int, int, int], ran: list[str]
) -> tuple[set[str], set[str]]:
    """Call a layer; return the variants that the report adds, and the kernels that ran."""
    ran.clear()
    before = reported(entry)
    tokens = grid[0] * grid[1] * grid[2]
    q, k, v = torch.ones(3, 1, tokens, HEADS, machine.head_size, dtype=machine.dtype)
    with set_forward_context(0, latent_grid=grid, num_steps=1) as context:
        entry.primary.calls += 1
        entry.primary.impl.forward(q, k, v, context)
    return set(reported(entry) - before), set(ran)


def is_named(asked: BackendPreference) -> bool:
    """Whether a user names the kernel."""
    return getattr(asked.config, "kernel", "auto") != "auto"


def layers_to_run(
    cls: type[AttentionBackend], asked: BackendPreference, *, every: bool
) -> Iterator[tuple[Machine, str]]:
    """Yield machines with the variant that is selected there.

    Args:
        cls: the backend.
        asked: what is asked for.
        every: whether to yield them all; else, for each variant and place, every head size, dtype
            and version of a package at least once; one machine for a kernel that is named, and
            for other makers' GPUs.
    """
    seen = set()
    for machine in machines(cls.variants_for(asked.config)):
        chosen = cls.choose_variant(machine.request(), asked.config)
        if chosen is None:
            continue
        variant = chosen.name
        place = variant, machine.platform, machine.capability
        values = (machine.head_size, machine.dtype, *machine.versions)
        alone = is_named(asked) or machine.platform is not PlatformEnum.CUDA
        facets = {(*place, value) for value in ((None,) if alone else values)}
        if every or not facets <= seen:
            yield machine, variant
        seen |= facets


DECLARED = [(name, cls) for name in AttentionBackendEnum for cls in backends_of(name)]


@pytest.mark.slow_cases(
    "False-CubeBackend",
    "False-PisaBackend",
    "False-SpargeBackend",
    "False-StaticBackend",
    "False-SubblockBackend",
)
@pytest.mark.parametrize(("name", "cls"), [pytest.param(n, c, id=c.__name__) for n, c in DECLARED])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernel_that_runs_is_the_one_that_is_reported(
    name: AttentionBackendEnum, cls: type[AttentionBackend], ran: list[str], every: bool
) -> None:
    kernels = {variant.name: kernel_of(cls, variant) for variant in cls.variants}
    seen, ragged = set(), set()
    for asked in asked_for(name, cls):
        named = is_named(asked)
        for machine, variant in layers_to_run(cls, asked, every=every):
            seen.add(variant)
            packages = {distribution: version for _, distribution, version in machine.versions}
            geometry = LayerGeometry(
                num_heads=HEADS,
                head_size=machine.head_size,
                num_kv_heads=HEADS,
                softmax_scale=machine.head_size**-0.5,
                causal=False,
                site=LayerSite(layer=0, num_layers=1),
            )
            with machine_with(packages, (str(machine.platform), machine.capability)):
                demand = Demand(request=machine.request(), geometry=geometry, strict=True)
                (entry,) = bind_schedule(((None, asked),), demand)
                assert entry.primary.selection.variant == variant
                whole = LARGER.get(str(name), WHOLE)
                said, have_run = said_and_ran(entry, machine, whole, ran)
                assert {kernels[v] for v in said} == have_run, (machine, asked.config)
                assert said == {variant} or not named
                # What a ragged grid takes depends on none of the other facets.
                place = variant, named, machine.platform, machine.capability
                if not cls.backend.is_sparse or (place in ragged and not every):
                    continue
                ragged.add(place)
                try:
                    said, have_run = said_and_ran(entry, machine, RAGGED, ran)
                except UnsupportedBackendError:
                    assert named, "only who names a kernel is refused"
                    continue
                assert {kernels[v] for v in said} == have_run, (machine, asked.config)
                assert said == {variant} or not named
    assert seen == set(kernels), "no machine of the test selects the others"


# How a layer is made, and the mask of its call.
CALLS: MappingProxyType[str, tuple[dict[str, Any], Callable[[int], torch.Tensor | None]]] = (
    MappingProxyType(
        {
            "plain": ({}, lambda _: None),
            "key mask": ({}, lambda n: torch.arange(n)[None] < n - 3),
            "other mask": ({}, lambda n: torch.ones(1, n, n).tril() > 0),
            "causal": ({"causal": True}, lambda _: None),
            "fewer key heads": ({"num_kv_heads": 1}, lambda _: None),
        }
    )
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "cls"), [pytest.param(n, c, id=c.__name__) for n, c in DECLARED])
def test_a_layer_reports_the_kernel_that_ran_whatever_the_call(
    name: AttentionBackendEnum,
    cls: type[AttentionBackend],
    call: str,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, make_mask = CALLS[call]
    asked, *_ = asked_for(name, cls)
    # The tensors lie on the CPU, the layer is to think otherwise.
    monkeypatch.setattr(attention_layer, "environment_for", lambda _, environment: environment)
    ran_on = []
    for machine in one_machine_per_variant(cls, asked.config):
        packages = {distribution: version for _, distribution, version in machine.versions}
        tokens = WHOLE[0] * WHOLE[1] * WHOLE[2]
        q = torch.ones(1, tokens, HEADS, machine.head_size, dtype=machine.dtype)
        k, v = (q[:, :, : given.get("num_kv_heads", HEADS)] for _ in "kv")
        ran.clear()
        with (
            machine_with(packages, (str(machine.platform), machine.capability)),
            set_forward_context(0, latent_grid=WHOLE, num_steps=1),
        ):
            layer = LocalAttention(
                HEADS,
                machine.head_size,
                site=LayerSite(layer=0, num_layers=1),
                scope=SelectionScope(default=asked),
                **given,
            )
            layer(q, k, v, make_mask(tokens))
            report = layer.report()
        served = [part for part in (*report.entries, *report.detours) if part.calls]
        assert sum(part.calls for part in served) == 1
        assert {recorded_by(part) for part in served} == set(ran), (machine, str(report))
        ran_on.append(machine)
    assert ran_on


@cache
def one_machine_per_variant(
    cls: type[AttentionBackend], config: BackendConfig | None
) -> list[Machine]:
    """Return a machine for every variant that is selected on some machine at head size 64."""
    found: dict[str, Machine] = {}
    for machine in machines(cls.variants):
        if machine.head_size == 64:
            variant = cls.choose_variant(machine.request(), config)
            if variant is not None:
                found.setdefault(variant.name, machine)
    return list(found.values())


def recorded_by(part: ReportEntry) -> str:
    """Return what the stand-in of the kernel that an entry of a report names records."""
    kernels = [
        kernel_of(cls, variant)
        for cls in backends_of(part.selection.backend)
        for variant in cls.variants
        if variant.name == part.selection.variant
    ]
    return kernels[0]
