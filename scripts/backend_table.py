"""Write the tables of the documentation that follow from declarations: see `pages`.

    python scripts/backend_table.py [--check]

A page has a place for each table, between `<!-- NAME: generated -->` and `<!-- NAME: end -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

# A checkout works without being installed, and a script wherever it is run from.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measured_tables import update

from multimodal_gen.errors import ConfigError
from multimodal_gen.integrations.models.registry import ADAPTERS
from multimodal_gen.runtime.layers.attention.backends.attention_backend import AttentionBackend
from multimodal_gen.runtime.layers.attention.backends.declaration import ALL_ROLES, SAGE, Variant
from multimodal_gen.runtime.layers.attention.backends.registry import backends_of
from multimodal_gen.runtime.layers.attention.config import (
    SparseConfig,
    build_config,
    parameters_of,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.selector import FALLBACKS, FALLBACKS_FIRST
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.platforms import (
    BUILTIN_PLATFORMS,
    AttentionBackendEnum,
    DeviceCapability,
    Platform,
    PlatformEnum,
)
from multimodal_gen.settings import Parameter, read_mapping

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "docs" / "pages"
EXAMPLES = REPOSITORY / "configs/attention"

# This package's own kernels: the layers of these methods run the first on a GPU and the last on a
# CPU; the others get plans like theirs, in tests/gpu/kernels/block_sparse/test_block_sparse.py and
# test_quantized_attention.py.
OWN_KERNELS = {"gluon": "SM90", "triton": "SM90", "reference": "CPU"}
SPARSE = tuple(str(name) for name in AttentionBackendEnum if name.is_sparse)
# Variants the tests run for real; the others are called against stand-ins with the same signature.
RUN_FOR_REAL = {
    **{(method, kernel): device for method in SPARSE for kernel, device in OWN_KERNELS.items()},
    ("torch_sdpa", "torch_sdpa"): "CPU, SM90",
    ("torch_cudnn_sdpa", "torch_cudnn_sdpa"): "SM90",
    ("torch_cudnn_sdpa", "fp8"): "SM90",
    ("flex_attn", "flex_attn"): "SM90",
    ("flex_attn", "unfused"): "CPU",
    ("fa", "fa3_fwd"): "SM90",
    ("fa", "fa3_fwd_fp8"): "SM90",
    ("fa", "fa4"): "SM90",
    ("fa", "fa4_fwd"): "SM90",
    ("sage_attn", "gluon"): "SM90",
    ("sage_attn", "sage1"): "SM90",
    ("sage_attn", "triton"): "SM90",
    ("triton_attn", "gluon"): "SM90",
    ("triton_attn", "triton"): "SM90",
    # The kernel on these methods' plans.
    ("sliding_tile_attn", "fa4"): "SM90",
    ("video_sparse_attn", "fa4"): "SM90",
}
# Models without softmax self-attention, which is left to them.
LINEAR = ("SanaVideoTransformer3DModel",)
# Models without a split plan of this package, which the tests of splits run all the same.
SPLIT_BY_DIFFUSERS = {"ChronoEditTransformer3DModel": "yes, by the plan of diffusers"}
CUDA_CAPABILITIES = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))
FEATURES = {
    Feature.GQA: "gqa",
    Feature.CAUSAL: "causal",
    Feature.KEY_MASK: "key mask",
    Feature.DENSE_MASK: "dense mask",
    Feature.VARLEN: "varlen",
    Feature.LSE: "lse",
    Feature.BACKWARD: "backward",
    Feature.RING: "ring",
}
COLUMNS = (
    *("backend", "variant", "dtypes", "head sizes", "roles", *FEATURES.values()),
    *("capability", "platforms", "tested on", "package"),
)
PARAMETER = ["parameter", "takes", "default", "meaning"]
# What no declaration says of a method, on its page: what its blocks are, what chooses them, and
# whether a model must be trained for it.
IN_WORDS = re.compile(r"<!-- in words: (.*) -->")
LIMITS = {
    "ulysses": "Ulysses",
    "ring": "ring",
    "ring_gradients": "gradients in a ring",
    "cache": "blocks of a cache",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (1: `--check` found differences)."""
    parser = argparse.ArgumentParser(description="Write the tables that declarations give.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args(argv)
    tables = pages()

    def fill(text: str, name: str) -> str:
        return filled_in(text, tables[name], Path(name).name)

    files = (PAGES / name for name in tables)
    return update(files, fill, base=PAGES, check=args.check, script=Path(__file__).name)


def pages() -> dict[str, dict[str, Iterable[Sequence[str]]]]:
    """Return the tables of each page, below docs/pages."""
    tables: dict[str, dict[str, Iterable[Sequence[str]]]] = {
        "concepts/selection.md": {"fallbacks": fallbacks(), "automatic": automatic()},
        "methods/index.md": {"methods": methods(), "common": common(), "limits": limits()},
        "methods/dense.md": {"dense": dense(), "dense parameters": dense_parameters()},
        "reference/models.md": {"models": models()},
        "reference/support.md": {"support": support()},
    }
    for name in SPARSE:
        (backend,) = backends_of(AttentionBackendEnum.parse(name))
        parts = {"parameters": parameters(backend), "kernels": kernels(backend)}
        tables[f"methods/{name}.md"] = parts
    return tables


def filled_in(text: str, tables: Mapping[str, Iterable[Sequence[str]]], page: str) -> str:
    """Return a page with every table between its markers replaced."""
    for name, rows in tables.items():
        start, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        head, found, rest = text.partition(start)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"error: {page} must hold the markers of the table {name!r}")
        text = f"{head}{start}{markdown(rows)}{end}{tail}"
    return text


def models() -> Iterator[Sequence[str]]:
    """Yield one row per model class with an adapter."""
    yield ["class", "dense", "sparse", "split over GPUs", "trained gates (VSA)"]
    for name, adapter in ADAPTERS.items():
        sparse = "no: its self-attention is linear" if name in LINEAR else "yes"
        split = SPLIT_BY_DIFFUSERS.get(name, "no") if adapter.split is None else "yes"
        if isinstance(adapter.split, str):
            split = f"no: it {adapter.split}"
        dense = "cross-attention" if name in LINEAR else "yes"
        yield [f"`{name}`", dense, sparse, split, "yes" if adapter.gated else "no"]


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table; the first is the heading."""
    heading, *body = rows
    lines = [heading, ["---"] * len(heading), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def support() -> Iterator[Sequence[str]]:
    """Yield one row per variant."""
    yield COLUMNS
    for name in AttentionBackendEnum:
        for backend in backends_of(name):
            if backend.__module__.startswith("multimodal_gen."):
                yield from (row(backend, variant) for variant in backend.variants)


def row(backend: type[AttentionBackend], variant: Variant) -> Sequence[str]:
    """Return the cells of one variant."""
    roles = "all" if variant.roles == ALL_ROLES else joined(variant.roles)
    marks = ["yes" if feature in variant.features else "no" for feature in FEATURES]
    cuda = PlatformEnum.CUDA in variant.platforms
    kernel = variant.name.removesuffix(SAGE)
    tested = RUN_FOR_REAL.get((str(backend.backend), kernel), "simulation")
    return [
        str(backend.backend),
        variant.name,
        ", ".join(sorted(short(dtype) for dtype in variant.dtypes)),
        str(variant.head_sizes),
        roles,
        *marks,
        str(variant.capability) if cuda else "-",
        joined(variant.platforms),
        tested,
        "; ".join(f"`{p.module}` ({p.install})" for p in variant.packages) or "torch",
    ]


def methods() -> Iterator[Sequence[str]]:
    """Yield one row per sparse method."""
    yield ["backend", "blocks of", "chosen by", "trains", "needs training"]
    for name in SPARSE:
        (backend,) = backends_of(AttentionBackendEnum.parse(name))
        trains = any(Feature.BACKWARD in variant.features for variant in backend.variants)
        words = IN_WORDS.search((PAGES / "methods" / f"{name}.md").read_text("utf-8"))
        if words is None:
            raise SystemExit(f"error: {name}.md must say `<!-- in words: ... | ... | ... -->`")
        blocks, chosen, trained = words[1].split(" | ")
        yield [f"[`{name}`]({name}.md)", blocks, chosen, "yes" if trains else "no", trained]


def common() -> Iterator[Sequence[str]]:
    """Yield the parameters that every sparse method has."""
    yield PARAMETER
    yield from map(described, parameters_of(SparseConfig).values())


def parameters(backend: type[AttentionBackend]) -> Iterator[Sequence[str]]:
    """Yield the parameters of a method, as `sglang attention describe` lists them."""
    yield PARAMETER
    known = parameters_of(SparseConfig)
    for name, parameter in parameters_of(backend.config_cls).items():
        if known.get(name) != parameter:
            yield described(parameter)


def dense_parameters() -> Iterator[Sequence[str]]:
    """Yield the parameters of dense backends, few of which have any."""
    yield ["backend", *PARAMETER]
    for backend in dense_backends():
        for parameter in parameters_of(backend.config_cls).values():
            yield [f"`{backend.backend}`", *described(parameter)]


def described(parameter: Parameter) -> Sequence[str]:
    """Return the cells of one parameter."""
    default = parameter.default
    shown = "must be given" if parameter.required else f"`{json.dumps(plain(default))}`"
    also = f"; also `{'`, `'.join(parameter.aliases)}`" if parameter.aliases else ""
    return [f"`{parameter.name}`", parameter.expected, shown, f"{parameter.help}{also}"]


def plain(value: object) -> object:
    """Return a default as JSON has it; a selector as the text that gives it."""
    known = isinstance(value, bool | int | float | str | tuple | type(None))
    return value if known else str(value)


def kernels(backend: type[AttentionBackend]) -> Iterator[Sequence[str]]:
    """Yield what each kernel of a method can do."""
    features = [Feature.GQA, Feature.KEY_MASK, Feature.BACKWARD, Feature.RING]
    yield [
        *("kernel", "GPU", "dtypes", "head sizes"),
        *(FEATURES[feature] for feature in features),
        *("tested on", "needs"),
    ]
    for variant in backend.variants:
        cells = dict(zip(COLUMNS, row(backend, variant), strict=True))
        where = "any, and CPUs" if PlatformEnum.CPU in variant.platforms else cells["platforms"]
        if "cuda" in where:
            where = where.replace("cuda", f"cuda {cells['capability']}")
        yield [
            f"`{variant.name}`",
            where,
            cells["dtypes"],
            cells["head sizes"],
            *("yes" if feature in variant.features else "no" for feature in features),
            cells["tested on"],
            cells["package"],
        ]


def dense_backends() -> Iterator[type[AttentionBackend]]:
    """Yield the dense backends, each once."""
    for name in AttentionBackendEnum:
        found = () if name.is_sparse else backends_of(name)
        yield from [b for b in found if b.__module__.startswith("multimodal_gen.")][:1]


def dense() -> Iterator[Sequence[str]]:
    """Yield one row per dense backend."""
    yield ["backend", "what it is", "platforms", "8 bits or fewer", "key mask", "lse", "backward"]
    for backend in dense_backends():
        variants = [v for b in backends_of(backend.backend) for v in b.variants]
        found = {feature for variant in variants for feature in variant.features}
        marks = (Feature.KEY_MASK, Feature.LSE, Feature.BACKWARD)
        where_asked = any(variant.operand_bits < 16 for variant in variants)
        rounds = "with `kernel=fp8`" if where_asked else "no"
        yield [
            f"`{backend.backend}`",
            backend.summary,
            joined({platform for variant in variants for platform in variant.platforms}),
            "yes" if backend.operand_bits < 16 else rounds,
            *("yes" if mark in found else "no" for mark in marks),
        ]


def limits() -> Iterator[Sequence[str]]:
    """Yield one row per sparse method: what its layers can be part of, or why they cannot."""
    yield ["backend", *LIMITS.values()]
    for name in SPARSE:
        for backend in backends_of(AttentionBackendEnum.parse(name)):
            assert issubclass(backend, SparseBackend)
            yield [f"`{name}`", *(limit(backend, field) for field in LIMITS)]


def limit(backend: type[SparseBackend], field: str) -> str:
    """Return "yes" or the reason, of the example and where a choice of a parameter changes it."""
    name = str(backend.backend)
    example = build_config(
        backend.config_cls, read_mapping(EXAMPLES / f"{name}.yaml"), backend=name
    )
    usual = getattr(backend.limits(example), field)
    in_ring = field == "ring_gradients"
    if in_ring and backend.limits(example).ring:
        usual = "no ring"
    cell = [str(usual or "yes")]
    for option, choice in choices(backend):
        try:
            config = replace(example, **{option: choice})
        except ConfigError:  # which needs other parameters too
            continue
        reason = getattr(backend.limits(config), field)
        if reason != usual and not (in_ring and backend.limits(config).ring):
            cell.append(f"with `{option}={str(choice).lower()}`: {reason or 'yes'}")
    return "; ".join(cell)


def choices(backend: type[SparseBackend]) -> Iterator[tuple[str, str | bool | float]]:
    """Yield the parameters with a few choices, and each choice of them; not that of a kernel.

    Of numbers, the largest one where there is any.
    """
    hints, parameters = get_type_hints(backend.config_cls), parameters_of(backend.config_cls)
    for field in fields(backend.config_cls):
        hint, largest = hints[field.name], parameters[field.name].le
        if largest is not None:
            yield field.name, largest
        for choice in (True, False) if hint is bool else get_args(hint):
            if isinstance(choice, str | bool) and field.name != "kernel":
                yield field.name, choice


def fallbacks() -> Iterator[Sequence[str]]:
    """Yield one row per documented fallback."""
    yield ["asked for", "where", "runs instead"]
    where = [
        platform.name
        for platform in BUILTIN_PLATFORMS
        if platform.name in FALLBACKS_FIRST or not (platform.always or platform.dense_fallback)
    ]
    for asked, instead in FALLBACKS.items():
        yield [f"`{asked}`", joined(where), f"`{instead}`"]
    for platform in BUILTIN_PLATFORMS:
        if platform.always:
            yield ["any", str(platform.name), f"`{platform.always}`, always"]
        elif platform.dense_fallback:
            which = "any other" if platform.name in where else "any"
            yield [which, str(platform.name), f"`{platform.dense_fallback}`"]


def automatic() -> Iterator[Sequence[str]]:
    """Yield the automatic choices of each platform."""
    yield ["platform", "compute capability", "tried in order"]
    for cls in BUILTIN_PLATFORMS:
        platform = cls()
        if platform.name is not PlatformEnum.CUDA:
            yield [str(platform.name), "-", order(platform, None)]
            continue
        for capability in CUDA_CAPABILITIES:
            found = DeviceCapability(*capability)
            yield [str(platform.name), found.as_version_str(), order(platform, found)]


def order(platform: Platform, capability: DeviceCapability | None) -> str:
    """Return the names of the automatic choices."""
    return ", ".join(f"`{name}`" for name in platform.attention_priority(capability))


def joined(values: Iterable[object]) -> str:
    """Return names in alphabetical order."""
    return ", ".join(sorted(str(value) for value in values))


def short(dtype: object) -> str:
    """Return "bf16" for torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")


if __name__ == "__main__":
    sys.exit(main())
