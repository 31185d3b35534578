"""diffusers' caches over a sparse method that goes on from step to step: nothing is mixed up.

Every call is witnessed: which module it is of by the module that runs, its step by the steps that
the scheduler took, its branch by what the pipeline calls it. What the method keeps from step to
step is computed a second time, by those.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    LayerSkipConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
    apply_layer_skip,
)
from diffusers.models.cache_utils import CacheMixin

from multimodal_gen.errors import UsageError
from multimodal_gen.integrations import forward_hooks
from multimodal_gen.integrations.diffusers import apply
from multimodal_gen.integrations.models.adapter import ModelAdapter
from multimodal_gen.integrations.steps import StepTracker
from multimodal_gen.kernels.kmeans.api import Clusters, by_similarity, initial_centroids, kmeans
from multimodal_gen.runtime.layers.attention.sparse.methods.svg2 import SVG2Router
from tests.integrations.conftest import generate

STEPS = 6
AT_STEP, AT_FIRST = 1, 3  # iterations of k-means
SVG2 = {
    "svg2_num_q_centroids": 3,
    "svg2_num_k_centroids": 5,
    "svg2_top_p_kmeans": 1,
    "svg2_first_layers_fp": 0,
    "svg2_first_times_fp": 0,
    "svg2_kmeans_iter_step": AT_STEP,
    "svg2_kmeans_iter_init": AT_FIRST,
}
SVG2_ASKED = {"attention_backend": "sparse_video_gen_2_attn", "attention_backend_config": SVG2}
EVERY = (-1, 1001)  # timesteps


def faster(pipe: Any) -> FasterCacheConfig:
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=EVERY,
        unconditional_batch_skip_range=3,
        unconditional_batch_timestep_skip_range=EVERY,
        attention_weight_callback=lambda _: 0.5,
        tensor_format="BFCHW",
        current_timestep_callback=lambda: int(pipe._current_timestep),
    )


def pyramid(pipe: Any) -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=EVERY,
        current_timestep_callback=lambda: int(pipe._current_timestep),
    )


def taylor(first: int) -> TaylorSeerCacheConfig:
    return TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=first,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"blocks\.\d+\.attn1"],  # those of diffusers match none of Wan's
    )


def skip_layer(**what: bool) -> Callable[[Any], None]:
    return lambda pipe: apply_layer_skip(pipe.transformer, LayerSkipConfig([1], **what))


def cache_dit(pipe: Any) -> None:
    package = pytest.importorskip("cache_dit", reason="needs `pip install cache-dit`")
    config = package.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=2,
        max_continuous_cached_steps=1,
        residual_diff_threshold=10.0,
    )
    package.enable_cache(pipe, cache_config=config)


# By name: the family, what sets the hook, and whether some layer then misses some call.
CACHES: dict[str, tuple[str, Callable[[Any], Any], bool]] = {
    "first block": ("wan", lambda pipe: FirstBlockCacheConfig(threshold=10.0), True),
    "mag": (
        "wan",
        lambda pipe: MagCacheConfig(
            mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS, max_skip_steps=1
        ),
        True,
    ),
    "taylor": (
        "wan",
        lambda pipe: taylor(2),
        True,
    ),
    "taylor of two experts": (
        "wan22",
        lambda pipe: taylor(1),
        True,
    ),
    "sea": ("wan", lambda pipe: SeaCacheConfig(threshold=100.0), True),
    "pyramid": ("wan", pyramid, True),
    "faster": ("cogvideox", faster, True),
    "text keys": ("wan", lambda pipe: TextKVCacheConfig(), False),
    "skipped block": ("wan", skip_layer(), True),
    "skipped scores": (
        "qwen_image",
        skip_layer(skip_attention=False, skip_attention_scores=True, skip_ff=False),
        True,
    ),
    "cache-dit": ("wan", cache_dit, True),
}
# The others take longer than they tell, as long as these pass.
QUICK = ("first block", "taylor of two experts", "faster", "skipped scores")


@dataclass
class Witness:
    """What the calls of a pipeline are, by nothing that `apply` puts into it.

    Attributes:
        steps: how often the scheduler stepped in this run.
        branch: what the pipeline calls the running call.
        modules: names of the attention modules around the running code, the innermost last.
        ran: modules that ran, by step, in all calls.
        calls: calls of the denoisers, by component and step.
        wrong: what was not as it should be.
        compared: how many clusterings were.
        kept: the centroids of the last step, by module and branch.
    """

    steps: int = 0
    branch: str | None = None
    modules: list[str] = field(default_factory=list)
    ran: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    kept: dict[Any, tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def follow(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        step, context = type(pipe.scheduler).step, CacheMixin.cache_context

        def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return step(scheduler, *args, **kwargs)

        @contextmanager
        def noted(model: Any, name: str, **kwargs: Any) -> Iterator[None]:
            self.branch = name
            with context(model, name, **kwargs):
                yield
            self.branch = None

        monkeypatch.setattr(SVG2Router, "group", self.group(SVG2Router.group))
        monkeypatch.setattr(type(pipe.scheduler), "step", stepped)
        monkeypatch.setattr(CacheMixin, "cache_context", noted)
        for component in ("transformer", "transformer_2"):
            model = getattr(pipe, component, None)
            if model is None:
                continue
            model.register_forward_pre_hook(self._called(component))
            for name, module in model.named_modules():
                if hasattr(module, "processor"):
                    module.register_forward_pre_hook(self._entered(f"{component}.{name}"))
                    module.register_forward_hook(self._left)

    def _called(self, component: str) -> Callable[..., None]:
        return lambda *_: self.calls.update([(component, self.steps)])

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda *_: self.modules.append(name)

    def _left(self, *_: object) -> None:
        self.modules.pop()

    def group(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def checked(router, settings, query, key, token_mask, context):
            found = own(router, settings, query, key, token_mask, context)
            whole = "both" if len(query) == 2 else self.branch
            branch = "cond" if self.branch == "cond_uncond" and len(query) == 1 else whole
            site = f"{router.layer.site.component}.{router.layer.site.name}"
            truth = (self.modules[-1], self.steps)
            if (site, context.current_timestep) != truth:
                self.wrong.append(f"{truth} was called {(site, context.current_timestep)}")
            told = {"cond_uncond": "both"}.get(branch, branch)
            if context.cfg_branch not in (told, None):
                self.wrong.append(f"{truth}, {branch} was called {context.cfg_branch}")
            self.ran.update([(*truth[0].split(".", 1), truth[1])])
            self._recompute((truth[0], branch), query, key, found, token_mask)
            return found

        return checked

    def _recompute(self, place, query, key, found: tuple[Clusters, Clusters], token_mask) -> None:
        before = self.kept.get(place)
        ends = []
        for index, x in enumerate((query, key)):
            num = (SVG2["svg2_num_q_centroids"], SVG2["svg2_num_k_centroids"])[index]
            if before is None:
                start, count = by_similarity(initial_centroids(x, num, mask=token_mask)), AT_FIRST
            else:
                start = before[1 + index]
                count = min((self.steps - before[0]) * AT_STEP, AT_FIRST)
            again = kmeans(x, start, iterations=count, mask=token_mask)
            self.compared += 1
            if not torch.equal(again.centroids, found[index].centroids):
                self.wrong.append(f"{place} at step {self.steps} began from something else")
            ends.append(again.centroids.to(query.dtype))
        if before is None:
            ends[1] = by_similarity(ends[1])
        self.kept[place] = (self.steps, ends[0], ends[1])


def named(name: str) -> Any:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture
def pipelines_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what cache-dit does to the class of a pipeline."""
    monkeypatch.setattr(WanPipeline, "__call__", WanPipeline.__call__)
    monkeypatch.setattr(WanPipeline, "_is_cached", False, raising=False)


def set_up(pipe: Any, cache: str) -> None:
    for component in ("transformer", "transformer_2"):
        model = getattr(pipe, component, None)
        config = None if model is None else CACHES[cache][1](pipe)
        if config is not None:
            model.enable_cache(config)


@pytest.mark.slow_cases("first block", "taylor of two experts")
@pytest.mark.filterwarnings("ignore:torch.meshgrid")  # in FasterCache
@pytest.mark.usefixtures("pipelines_as_they_were")
@pytest.mark.parametrize("cache", [named(name) for name in CACHES])
def test_under_a_cache_no_step_layer_or_branch_is_taken_for_another(cache, fresh, monkeypatch):
    family, _, misses = CACHES[cache]
    stock = fresh(family)
    set_up(stock, cache)
    expected = generate(stock, family, num_inference_steps=STEPS)
    pipe, witness = fresh(family), Witness()
    first = [*CACHES].index(cache) % 2  # caches may be enabled before `apply`, and after it
    if first:
        set_up(pipe, cache)
    witness.follow(pipe, monkeypatch)
    with apply(pipe, **SVG2_ASKED) as handle:
        if not first:
            set_up(pipe, cache)
        latents = generate(pipe, family, num_inference_steps=STEPS)
        report = handle.report()
    assert witness.wrong == []
    assert witness.compared
    assert (latents - expected).abs().max() <= 1e-3  # with all of the mass, it is dense attention
    assert_says_what_did_not_run(report, witness)
    assert ("did not run: transformer.self" in report.summary()) == misses
    assert ("one output per module for all guidance" in report.summary()) == (cache == "pyramid")


def assert_says_what_did_not_run(report: Any, witness: Witness) -> None:
    for layer in report.layers:
        if str(layer.role) != "self":
            continue
        ran = {
            step: count
            for (component, name, step), count in witness.ran.items()
            if (component, name) == (layer.component, layer.name)
        }
        calls = {
            step: count
            for (component, step), count in witness.calls.items()
            if component == layer.component
        }
        missed = {step: calls[step] - ran.get(step, 0) for step in calls}
        missed = {step: count for step, count in missed.items() if count}
        told = {} if layer.not_run is None else dict(layer.not_run.by_step)
        assert told == missed
        assert layer.calls == sum(ran.values())
        if layer.not_run is not None:
            assert layer.not_run.total == sum(calls.values())


def test_calls_that_the_pipeline_gives_no_name_are_told_apart_all_the_same(fresh, monkeypatch):
    pipe, witness = fresh("wan"), Witness()
    witness.follow(pipe, monkeypatch)
    monkeypatch.setattr(forward_hooks, "branch_name", lambda: None)
    attention = pipe.transformer.blocks[1].attn1
    own = attention.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # As a cache might: one branch of one step goes without the layer.
        if (witness.steps, witness.branch) == (1, "cond"):
            return torch.zeros_like(hidden_states)
        return own(hidden_states, *args, **kwargs)

    attention.forward = forward
    with apply(pipe, **SVG2_ASKED) as handle:
        generate(pipe, "wan", num_inference_steps=3)
        text = handle.report().summary()
    assert witness.wrong == []
    assert (
        "did not run: transformer.self, layers 1, in 1 of 6 calls of the model, in step 1" in text
    )


def test_a_second_generation_begins_anew(fresh, monkeypatch):
    pipe, witness = fresh("wan"), Witness()
    pipe.transformer.enable_cache(taylor(1))
    witness.follow(pipe, monkeypatch)
    with apply(pipe, **SVG2_ASKED):
        for _ in range(2):
            witness.steps, witness.kept = 0, {}
            generate(pipe, "wan", num_inference_steps=4)
    assert witness.wrong == []


def test_ranks_that_share_tokens_refuse_a_cache_that_each_would_decide_by_its_own():
    model = torch.nn.Identity()
    model._cache_config = FirstBlockCacheConfig(threshold=0.1)
    hooks = forward_hooks.DenoiserHooks(
        model, ModelAdapter(classes=()), "transformer", StepTracker(), splitter=object()
    )
    for _ in range(2):
        with pytest.raises(UsageError, match="transformer must not have a FirstBlockCacheConfig"):
            hooks._look_at_cache(model)
    model._cache_config = MagCacheConfig(mag_ratios=[1.0], num_inference_steps=1)
    hooks._look_at_cache(model)
    assert list(hooks.caches) == ["MagCacheConfig(num_inference_steps=1) was enabled"]


@pytest.mark.parametrize(("branch", "batch"), [("uncond", 2), ("cond", 1), (None, 1)])
def test_a_cache_that_halves_batches_is_refused_where_they_hold_one_branch(branch, batch):
    model = torch.nn.Identity()
    hooks = forward_hooks.DenoiserHooks(
        model, ModelAdapter(classes=()), "transformer", StepTracker()
    )
    hooks._branch = lambda: branch
    model._cache_config = FasterCacheConfig()
    with pytest.raises(UsageError, match="must be called with both branches of guidance in one"):
        hooks._look_at_cache(model, batch)
    model._cache_config = FasterCacheConfig(is_guidance_distilled=True)
    hooks._look_at_cache(model, batch)
    assert list(hooks.caches) == ["FasterCacheConfig(is_guidance_distilled=True) was enabled"]
