"""What is compared: backends with their parameters, as `--backends` names them.

    sliding_tile_attn:window=[3,3,3],skip_time_steps=0;video_sparse_attn:sparsity=0.9;sage_attn

Configurations stand between semicolons; behind a colon are the backend's parameters, in any form
that `--attention-backend-config` takes. Behind a plus there may be a step cache of diffusers, as
`--cache` names it: `video_sparse_attn:sparsity=0.9 + first_block:threshold=0.1`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.comparison.score import Score, read_score
from multimodal_gen.runtime.generator.cache import CACHE_NAMES, Cache, read_cache
from multimodal_gen.runtime.layers.attention.config import config_as_dict, settings_text
from multimodal_gen.runtime.layers.attention.scope import SelectionScope, scope_from
from multimodal_gen.runtime.platforms import AttentionBackendEnum

_DENSE_BLOCKS = "video_sparse_attn:sparsity=0,dense_above=1"

EXACT_KERNELS = (
    "torch_sdpa",
    "triton_attn",
    "torch_cudnn_sdpa",
    "fa",
    _DENSE_BLOCKS,
    "flex_attn",
    "xformers",
    "flashinfer",
)
"""Configurations that leave nothing out and round to no fewer bits than the tensors have, by how
likely they are to add up in another order than those before them."""

ONE_DEVICE = (
    "a comparison must run on one GPU, got several; generate on several GPUs with `sglang generate "
    "--num-gpus`, once for each backend"
)
"""What a comparison on several ranks is told."""

Clip: TypeAlias = tuple[int, int]
"""What is generated: index of the prompt, and the seed."""

# A path may have a plus, too: behind one without a blank before it stands the name of a cache.
_NAMES = "|".join(name.replace("_", "[-_]") for name in CACHE_NAMES)
_CACHE = re.compile(rf"\s\+\s*(?=[A-Za-z])|\+\s*(?=(?:{_NAMES})\b)", re.IGNORECASE)
_CLOSING: Mapping[str, str] = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One configuration.

    Attributes:
        name: short, and unique among those of a comparison.
        text: as it was asked for.
        backend: the backend.
        parameters: all parameters of the backend, JSON values.
        settings: those not at their defaults, with the content of files that they name; and the
            cache.
        scope: what layers select by.
        cache: the step cache, or None.
    """

    name: str
    text: str
    backend: str
    parameters: Mapping[str, Any]
    settings: str
    scope: SelectionScope
    cache: Cache | None = None

    @property
    def asked(self) -> tuple[str, str]:
        """What tells it from others."""
        return self.backend, self.settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        prompts: what is generated, each once.
        seeds: of every prompt.
        reference: what the others are compared with; a dense backend.
        candidates: what is compared with it.
        floor: exact kernels for the noise, of sparse methods those of `EXACT_KERNELS`; none where
            it is empty, None for up to two that this machine has.
        folder: where everything goes.
        resume: go on with what the folder holds.
        replayed_steps: denoising steps whose calls are replayed; 0 for none, None for one in ten,
            up to three.
        layers_for: prompts and seeds whose calls are replayed, one of each prompt first; None for
            all.
        score: what clips are scored by, or None.
        perceptual: whether clips have the metrics of packages of their own.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: Configuration
    candidates: tuple[Configuration, ...]
    floor: tuple[Configuration, ...] | None = None
    folder: Path
    resume: bool = False
    replayed_steps: int | None = None
    layers_for: int | None = None
    score: Score | None = None
    perceptual: bool = True

    def __post_init__(self) -> None:
        if not self.prompts or not self.seeds:
            raise UsageError("a comparison must have at least one prompt and one seed, got none")
        if self.reference.cache is not None:
            raise UsageError(
                f"--reference must have no cache, as others are compared with it, got "
                f"{short(self.reference.text)}"
            )
        if _is_sparse(self.reference):
            raise UsageError(
                f"--reference must be a dense backend, got {short(self.reference.text)}, which "
                f"leaves pairs out; try torch_sdpa"
            )
        for each in self.floor or ():
            if each.asked == self.reference.asked:
                raise UsageError(
                    f"--floor must be other kernels than the reference, got {short(each.text)} for "
                    f"both, whose difference is none; try another, or leave it out"
                )
            exact = (read_configuration(text).asked for text in EXACT_KERNELS)
            if _is_sparse(each) and each.asked not in exact:
                raise UsageError(
                    f"--floor must be exact kernels, got {short(each.text)}, a sparse method, "
                    f"whose difference is not the noise; try triton_attn or {_DENSE_BLOCKS}"
                )

    @property
    def clips(self) -> tuple[Clip, ...]:
        """What is generated."""
        return tuple((prompt, seed) for prompt in range(len(self.prompts)) for seed in self.seeds)

    @property
    def replayed_clips(self) -> tuple[Clip, ...]:
        """Those of them whose calls are replayed."""
        by_seed = [(prompt, seed) for seed in self.seeds for prompt in range(len(self.prompts))]
        return tuple(by_seed[: self.layers_for]) if self.replayed_steps != 0 else ()


def plan_of(
    *,
    prompts: Sequence[str],
    seeds: Sequence[int],
    backends: str | Sequence[str],
    folder: Path,
    reference: str = "torch_sdpa",
    floor: str | Sequence[str] | None = None,
    resume: bool = False,
    replayed_steps: int | None = None,
    layers_for: int | None = None,
    score: object = None,
    perceptual: bool = True,
    spell: Callable[[str], str] = str,
) -> Plan:
    """Return the plan of a comparison; see `Plan`, and `read_configurations` for its texts.

    Args:
        prompts: what is generated; what repeats counts once, as for seeds.
        seeds: of every prompt.
        backends: what is compared.
        folder: where everything goes.
        reference: the dense backend that the others are compared with.
        floor: exact kernels for the noise.
        resume: see `Plan`.
        replayed_steps: see `Plan`.
        layers_for: see `Plan`.
        score: a function, or a text FILE.py:function, as `read_score` takes it; None for no scores.
        perceptual: see `Plan`.
        spell: what messages call an argument of a name; by default that name.
    """
    (dense,) = read_configurations([reference], name=spell("reference"))
    candidates = read_configurations(backends, name=spell("backends"), taken=[dense.name])
    taken = [dense.name, *(each.name for each in candidates)]
    exact: tuple[Configuration, ...] | None = None if floor is None else ()
    if floor:
        exact = read_configurations(floor, name=spell("floor"), taken=taken, is_noise=True)
    return Plan(
        prompts=tuple(dict.fromkeys(prompts)),
        seeds=tuple(dict.fromkeys(seeds)),
        reference=dense,
        candidates=candidates,
        floor=exact,
        folder=folder,
        resume=resume,
        replayed_steps=replayed_steps,
        layers_for=layers_for,
        score=None if score is None else read_score(score, name=spell("score")),
        perceptual=perceptual,
    )


def read_configurations(
    given: str | Sequence[str],
    *,
    name: str = "--backends",
    taken: Sequence[str] = (),
    is_noise: bool = False,
) -> tuple[Configuration, ...]:
    """Return configurations, in their order.

    Args:
        given: text with semicolons, or a text for each.
        name: what messages call it.
        taken: names that others have already.
        is_noise: they are exact kernels, and bear the names of these.

    Raises:
        ConfigError: there is none, one repeats, or a backend or its parameters are wrong.
    """
    texts = list(_split(given, name)) if isinstance(given, str) else list(given)
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ConfigError(f"{name} must name at least one backend, got none; try sage_attn")
    found: list[Configuration] = []
    for text in texts:
        names = [*taken, *(each.name for each in found)]
        configuration = read_configuration(text, name=name, taken=names, is_noise=is_noise)
        if configuration.asked in [each.asked for each in found]:
            raise ConfigError(f"{name} must name each configuration once, got {short(text)} twice")
        found.append(configuration)
    return tuple(found)


def read_configuration(
    text: str, *, name: str = "--backends", taken: Sequence[str] = (), is_noise: bool = False
) -> Configuration:
    """Return one configuration; see `read_configurations`.

    Raises:
        ConfigError: the backend or its parameters are wrong.
    """
    named = cache_of(text)
    cache = None if named is None else read_cache(named, name=name)
    backend, _, parameters = _CACHE.split(text, maxsplit=1)[0].partition(":")
    spelled = {
        "attention_backend": name,
        "attention_backend_config": f"{name}: parameters of {backend.strip()}",
    }
    scope = scope_from(
        attention_backend=backend.strip(),
        attention_backend_config=parameters.strip() or None,
        spell=lambda setting: spelled.get(setting, setting),
    )
    if scope.default is None or scope.default.backend is None:
        raise ConfigError(
            f"{name} must name backends, got {short(text)}, which is an automatic choice"
        )
    asked = scope.default
    # A sparse method that keeps everything is none: what runs is its kernel.
    sparse = is_noise and scope.default.backend.is_sparse
    bare = "block_sparse" if sparse else str(asked.backend)
    bare += "" if cache is None else f"+{cache.name}"
    same = [each for each in taken if each == bare or each.startswith(f"{bare}-")]
    settings = settings_text(asked.config)
    return Configuration(
        name=f"{bare}-{len(same) + 1}" if same else bare,
        text=text.strip(),
        backend=str(asked.backend),
        parameters={} if asked.config is None else config_as_dict(asked.config),
        settings=settings if cache is None else f"{settings} + {cache.text}",
        scope=scope,
        cache=cache,
    )


def _is_sparse(configuration: Configuration) -> bool:
    return AttentionBackendEnum.parse(configuration.backend).is_sparse


def cache_of(text: str) -> str | None:
    """Return the cache that the text of a configuration names, as `--cache` takes it, or None."""
    found = _CACHE.search(text)
    return None if found is None else text[found.end() :].strip()


def _split(text: str, name: str) -> Iterator[str]:
    """Yield what stands between semicolons outside of brackets and quotes."""
    start, waiting_for, at = 0, "", 0
    while at < len(text):
        letter = text[at]
        if waiting_for and letter == waiting_for[-1]:
            waiting_for = waiting_for[:-1]
        elif waiting_for[-1:] in ('"', "'"):
            at += letter == "\\"  # the next letter stands for itself
        elif letter in "\"'":
            waiting_for += letter
        elif letter in _CLOSING:
            waiting_for += _CLOSING[letter]
        elif letter == ";" and not waiting_for:
            yield text[start:at]
            start = at + 1
        at += 1
    if waiting_for:
        raise ConfigError(f"{name} must close every bracket and quote, got {short(text)}")
    yield text[start:]
