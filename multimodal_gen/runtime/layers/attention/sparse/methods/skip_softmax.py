"""Skip-softmax: every score is computed, and what cannot count for much goes no further (BLASST).

A step of the kernel over keys is left out, its softmax and its product with the values, where all
of its weights are at most lambda of the largest that their rows have seen so far
(arXiv:2512.12087). lambda is given, or follows from the number of keys,

    lambda = threshold_scale_factor / keys

or from a share of steps to leave out on a curve that ModelOpt fits to a model and keeps in its
config.json, under `sparse_attention_config`:

    threshold_scale_factor = a * exp(b * target_sparsity)

`skip_below`, which every method has, is the same in decibels: -10 log10(lambda).

What differs from them, or is easily missed:

- All pairs have a score, so densities are 1: the share of steps that are left out is told beside
  them, and `dense_above` is refused.
- A step is 128 queries by 128 keys; kernels that take 64 keys at a time decide for each 64. One row
  that needs a step keeps it for all rows.
- Keys are met in the order of the sequence, those of text last, and the first step is kept. What a
  weight is held against grows on the way: keys met early are kept though later ones dwarf them, and
  a weight left out is at most lambda of the row's largest one in the end, too. Rows of text are
  exact.
- A factor, given or of a curve, is for videos about as long as those it was found on: lambda falls
  with the number of keys. Where it would be 1 or more the call is refused.
- Of `disabled_until_timestep` the level itself is sparse. 0 leaves no step dense in vllm-omni, and
  all steps in TensorRT-LLM; it is refused.
- The curve is read in every form that is known to be written, and refused otherwise. Its `targets`
  and what it says of the phase `decode` are not looked at.
- Rings, causal caches and gradients are refused: the comparison needs all keys in one pass, and a
  backward pass does not know what was left out.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from multimodal_gen.errors import ConfigError, UsageError
from multimodal_gen.kernels.engine import BLOCK_SPARSE
from multimodal_gen.kernels.static_cache import static_cache
from multimodal_gen.runtime.layers.attention.backends.engine import engine_variants
from multimodal_gen.runtime.layers.attention.config import (
    Axis,
    DensePart,
    IndexSelector,
    SigmaSelector,
    SparseConfig,
    StepSet,
    option,
)
from multimodal_gen.runtime.layers.attention.request import Feature
from multimodal_gen.runtime.layers.attention.sparse.method import SparseBackend
from multimodal_gen.runtime.layers.attention.sparse.pattern import Pattern, Patterns
from multimodal_gen.runtime.layers.attention.sparse.router import Cut, Router
from multimodal_gen.runtime.layers.attention.sparse.skip_curve import SkipCurve
from multimodal_gen.runtime.layers.attention.sparse.windows import Window
from multimodal_gen.runtime.managers.forward_context import ForwardContext
from multimodal_gen.runtime.platforms import AttentionBackendEnum

BLOCK = 128  # rows that must agree, and keys that are left out together, as the authors have it

_SETTINGS = ("threshold", "threshold_scale_factor", "target_sparsity", "skip_below")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSoftmaxConfig(SparseConfig):
    """Parameters of `skip_softmax`; one of the first three, or `skip_below`, says how much.

    Attributes:
        threshold: lambda in (0, 1): weights at most this share of the largest one so far.
        threshold_scale_factor: lambda times the number of keys, as NVIDIA's kernels take it.
        target_sparsity: share of steps to leave out, by the curve of `sparse_attention_config`.
        disabled_until_timestep: noise levels above this stay dense, in (0, 1]; those of
            schedulers of flows, which run from 1 to 0.
        sparse_attention_config: what ModelOpt, or `sglang attention calibrate`, found; by default
            that of the checkpoint.
        kernel: which kernel runs; `auto` takes the fastest one supported.

    Raises:
        ConfigError: several settings are given.
    """

    example = "threshold=0.01"

    threshold: float | None = option(
        None, "lambda: weights at most this share of the largest so far are left out", gt=0, lt=1
    )
    threshold_scale_factor: float | None = option(None, "lambda times the number of keys", gt=0)
    target_sparsity: float | None = option(
        None, "share of steps to leave out, by the calibrated curve", ge=0, le=1
    )
    disabled_until_timestep: float | None = option(
        None, "noise levels above this stay dense", gt=0, le=1
    )
    sparse_attention_config: SkipCurve | None = option(
        None, "the calibrated curve, as ModelOpt writes it; by default the checkpoint's"
    )
    kernel: Literal["auto", "gluon", "triton", "reference"] = option("auto", "kernel that runs")

    def check(self) -> None:
        """There is one setting."""
        given = [name for name in _SETTINGS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(f'`{name}`' for name in given)} of skip_softmax say the same, one "
                f"must be given; remove the others"
            )
        if self.dense_above is not None:
            raise ConfigError(
                f"`dense_above` of skip_softmax must be left out, got {self.dense_above:g}: every "
                f"pair has a score"
            )

    def skips(self) -> tuple[str, float] | None:
        """Return the setting that was given, or that of the curve."""
        curve = self.sparse_attention_config
        values = [(name, getattr(self, name)) for name in _SETTINGS]
        values += [("target_sparsity", None if curve is None else curve.target_sparsity)]
        return next((each for each in values if each[1] is not None), None)

    def check_settings(self) -> None:
        """Refuse what does not say how much to leave out, whatever the checkpoint.

        Raises:
            ConfigError: no setting is given, or a share without a curve.
        """
        given, curve = self.skips(), self.sparse_attention_config
        if given is not None and (given[0] != "target_sparsity" or curve is not None):
            return
        got, remedy = "none", "give a `threshold`"
        if given is not None:
            got = f"`target_sparsity` {given[1]:g} without a curve"
            remedy += ", or the file of `sglang attention calibrate`"
        elif curve is not None:
            got, remedy = "a curve alone", "give a `target_sparsity` on it"
        raise ConfigError(
            f"skip_softmax must be told how much to leave out by `threshold`, "
            f"`threshold_scale_factor`, `skip_below`, or by `target_sparsity` with a calibrated "
            f"curve, got {got}; {remedy}"
        )

    def decibels(self, num_keys: int) -> float | None:
        """Return -10 log10(lambda) for so many keys.

        Raises:
            UsageError: lambda would be 0, or 1 or more.
        """
        if self.skip_below is not None:
            return self.skip_below
        share = self.threshold
        factor, given = self.threshold_scale_factor, self.skips()
        if given is not None and given[0] == "target_sparsity":
            assert self.sparse_attention_config is not None, "others are refused"
            factor = self.sparse_attention_config.factor(given[1])
        if factor is not None:
            share = factor / num_keys
            if not 0 < share < 1:
                least = ""
                if 1 <= share < math.inf:
                    least = f", and is for videos of {math.floor(factor) + 1} keys or more"
                raise UsageError(
                    f"`threshold_scale_factor` of skip_softmax, given or of a curve, must be above "
                    f"0 and less than the number of keys, which it is divided by, got {factor:g} "
                    f"for {num_keys} keys{least}; give a `threshold`"
                )
        return None if share is None else -10 * math.log10(share)

    def dense_parts(self, axis: Axis) -> tuple[DensePart, ...]:
        """Add the first steps of a curve, and the noise levels that stay dense."""
        parts, until = SparseConfig.dense_parts(self, axis), self.disabled_until_timestep
        curve = self.sparse_attention_config
        if axis != "steps":
            return parts
        if curve is not None and curve.initial_disabled_steps is not None:
            first = StepSet(indices=IndexSelector(((0, curve.initial_disabled_steps - 1),)))
            given = f"initial_disabled_steps={curve.initial_disabled_steps}"
            parts = (*parts, DensePart(given, first))
        if until is None and curve is not None:
            until = curve.disabled_until_timestep
        if until is None:
            return parts
        noise = StepSet(sigma=SigmaSelector.parse(f">{until:.10g}"))
        return (*parts, DensePart(f"disabled_until_timestep={until:g}", noise))


class SkipSoftmaxRouter(Router[SkipSoftmaxConfig]):
    """Every block."""

    chooses = "pattern"

    def cut(self, settings: SkipSoftmaxConfig, grid: Window) -> Cut:
        """Return pieces of the sequence, in whose order the largest weight is sought."""
        return Cut.rows(BLOCK)

    def pattern(
        self, settings: SkipSoftmaxConfig, grid: Window, heads: slice, context: ForwardContext
    ) -> Patterns:
        """Return the pattern that keeps everything."""
        return (_everything(-(-math.prod(grid) // BLOCK)),)

    def prepare(self, settings: SkipSoftmaxConfig) -> None:
        """Refuse settings that do not say how much to leave out."""
        settings.check_settings()

    def dense_reason(
        self, settings: SkipSoftmaxConfig, tokens: int, frames: int | None
    ) -> str | None:
        """Modules that a curve ignores are dense."""
        curve, site = settings.sparse_attention_config, self.layer.site
        if curve is None or site is None or not curve.ignores(site.component, site.name):
            return None
        return f"{self.layer.label} leaves {site.name} dense (`ignore` of its calibration)"


@static_cache(maxsize=64)
def _everything(num: int) -> Pattern:
    with torch.device("cpu"):
        return Pattern.of_lists(torch.arange(num, dtype=torch.int32).repeat(num, 1))


class SkipSoftmaxBackend(SparseBackend):
    """Skip-softmax."""

    backend = AttentionBackendEnum.SKIP_SOFTMAX
    summary = "Skip-softmax (BLASST): all scores, and only the weights that count"
    config_cls = SkipSoftmaxConfig
    router = SkipSoftmaxRouter
    variants = engine_variants(
        BLOCK_SPARSE, (Feature.GQA, Feature.KEY_MASK), plans=("skip_below",), trains=False
    )
