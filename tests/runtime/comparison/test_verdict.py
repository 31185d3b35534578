"""The rules by which figures become words, at their boundaries above all."""

import math
from dataclasses import replace
from typing import Any

import pytest

from multimodal_gen.runtime.comparison.record import (
    Cost,
    Environment,
    FrameMetrics,
    Generation,
    Model,
    Report,
    Run,
)
from multimodal_gen.runtime.comparison.verdict import (
    FACTOR,
    MEASURES,
    MOVES,
    STILL,
    compare_with_noise,
    judge,
    judged,
)

WITHIN = "within the noise of dense kernels"
# A change of a metric that is beyond rounding, and the figure of equal clips.
MEASURED = [
    ("psnr", 40.0, math.inf),
    ("ssim", 0.95, 1.0),
    ("xpsnr", 40.0, math.inf),
    ("vmaf", 80.0, 100.0),
    ("lpips", 0.1, 0.0),
]


def run(*frames: FrameMetrics, latents: tuple[float, ...] = (), **fields: Any) -> Run:
    generations = tuple(
        Generation(prompt=0, seed=seed, frames=each, latents=latents)
        for seed, each in enumerate(frames)
    )
    return Run(
        **{
            "name": "one",
            "configuration": "one",
            "backend": "one",
            "parameters": {},
            "generations": generations,
            **fields,
        }
    )


def distance(name: str, figure: float) -> float:
    (measure,) = (each for each in MEASURES if each.name == name)
    return measure.distance(figure)


def report(floor: tuple[Run, ...], *candidates: Run) -> Report:
    return Report(
        created="2026-01-01T00:00:00Z",
        environment=Environment(device="cpu", versions={}, multimodal_gen="0"),
        model=Model(path="m", pipeline="P", kind="video", dtype="float32", identity="0"),
        settings={},
        prompts=("a fox",),
        seeds=(0,),
        reference=run(name="dense"),
        floor=floor,
        candidates=candidates,
    )


@pytest.mark.parametrize(("name", "noisy", "equal"), MEASURED)
def test_what_is_as_far_as_dense_kernels_is_within_their_noise(
    name: str, noisy: float, equal: float
) -> None:
    floor = [run(FrameMetrics(**{name: noisy}))]
    for figure in (noisy, equal):
        assert judge(run(FrameMetrics(**{name: figure})), floor).word == WITHIN
    assert judge(run(FrameMetrics(**{name: noisy})), [run(FrameMetrics(**{name: equal}))]).word == (
        "visible"
    )


def test_the_boundary_is_twice_the_squared_error_of_the_noise() -> None:
    floor = [run(FrameMetrics(psnr=40.0))]
    limit = 40 - 10 * math.log10(FACTOR)
    assert judge(run(FrameMetrics(psnr=limit)), floor).word == WITHIN
    assert judge(run(FrameMetrics(psnr=limit - 0.1)), floor).word == "visible"


def test_the_boundary_of_errors_is_twice_the_noise_and_rounding() -> None:
    floor = [run(FrameMetrics(lpips=0.1), latents=(9.0, 0.2))]
    for last, word in ((0.4, WITHIN), (0.4001, "visible")):
        assert judge(run(FrameMetrics(lpips=0.1), latents=(0.0, last)), floor).word == word
    for lpips, word in ((0.201, WITHIN), (0.2011, "visible")):
        assert judge(run(FrameMetrics(lpips=lpips), latents=(9.0, 0.2)), floor).word == word


def test_what_differs_by_rounding_only_needs_no_noise() -> None:
    close = FrameMetrics(psnr=60.0, ssim=0.9991, xpsnr=60.0, vmaf=99.0, lpips=0.001)
    assert judge(run(close), []).word == WITHIN
    assert judge(run(close), [run(FrameMetrics(psnr=math.inf, ssim=1.0))]).word == WITHIN
    verdict = judge(run(replace(close, psnr=59.9)), [])
    assert verdict.word == "unknown"
    assert verdict.reasons == (
        "No other exact kernel ran, so there is no noise to compare the figures with.",
        "PSNR 59.9 dB.",
    )


def test_one_measure_beyond_the_noise_is_enough_and_is_named() -> None:
    floor = [run(FrameMetrics(psnr=50.0, vmaf=95.0))]
    verdict = judge(run(FrameMetrics(psnr=50.0, vmaf=60.0)), floor)
    assert verdict.word == "visible"
    assert verdict.reasons == ("VMAF 60.0; dense kernels 95.0.",)


def test_the_farther_of_several_kernels_is_the_noise_of_a_clip() -> None:
    floor = [run(FrameMetrics(psnr=p), FrameMetrics(psnr=q)) for p, q in ((50, 30), (30, 50))]
    (found,) = compare_with_noise(run(FrameMetrics(psnr=31.0), FrameMetrics(psnr=29.0)), floor)
    assert found.noise == 30.0
    assert (found.mean, found.spread) == (30.0, pytest.approx(math.sqrt(2)))
    assert (found.count, found.within) == (2, True)


def test_figures_are_paired_by_prompt_and_seed() -> None:
    """A clip that the noise has no figure of is left out of both."""
    floor = [run(FrameMetrics(psnr=30.0))]
    (found,) = compare_with_noise(run(FrameMetrics(psnr=31.0), FrameMetrics(psnr=5.0)), floor)
    assert (found.count, found.mean, found.noise, found.within) == (1, 31.0, 30.0, True)


def test_flicker_is_judged_by_its_ratio_to_the_references() -> None:
    floor = [run(FrameMetrics(flicker=5.1, flicker_reference=5.0))]
    for flicker, word in ((5.2, WITHIN), (4.8, WITHIN), (6.0, "visible"), (4.0, "visible")):
        assert judge(run(FrameMetrics(flicker=flicker, flicker_reference=5.0)), floor).word == word
    still = run(FrameMetrics(flicker=0.3, flicker_reference=0.0))
    assert compare_with_noise(still, floor) == ()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FrameMetrics(psnr=50.0, non_finite=1), "NaN or infinite values in 1 of 1 clip."),
        (FrameMetrics(psnr=50.0, constant=True), "A frame of one colour in 1 of 1 clip."),
        (
            FrameMetrics(psnr=50.0, flicker=0.0, flicker_reference=3.0),
            "No motion in 1 of 1 clip, where the reference moves.",
        ),
    ],
)
def test_defects_are_broken_whatever_the_figures(broken: FrameMetrics, reason: str) -> None:
    verdict = judge(run(broken), [run(FrameMetrics(psnr=10.0))])
    assert (verdict.word, verdict.reasons) == ("broken", (reason,))


def test_latents_that_diverge_are_broken() -> None:
    sound = FrameMetrics(psnr=50.0)
    assert judge(run(sound, latents=(0.1, math.nan)), []).word == "broken"
    counted = run(sound)
    (generation,) = counted.generations
    counted = replace(counted, generations=(replace(generation, non_finite=3),))
    assert judge(counted, []).word == "broken"


def test_the_boundary_of_standing_still() -> None:
    def word(flicker: float, reference: float) -> str:
        metrics = FrameMetrics(psnr=99.0, flicker=flicker, flicker_reference=reference)
        return judge(run(metrics), [run(metrics)]).word

    assert word(0.0, MOVES - 0.01) == WITHIN
    assert word(0.0, MOVES) == "broken"
    assert word(STILL * 10, 10.0) == WITHIN
    assert word(STILL * 10 - 0.001, 10.0) == "broken"


def test_a_run_that_did_not_finish_is_failed_whatever_its_clips_look_like() -> None:
    equal, noise = FrameMetrics(psnr=math.inf), [run(FrameMetrics(psnr=50.0))]
    for clips in ((), (equal,)):
        verdict = judge(run(*clips, status="out of memory", message="needs 90 GiB"), noise)
        assert (verdict.word, verdict.reasons) == ("failed", ("out of memory: needs 90 GiB",))
    failed = run(FrameMetrics(psnr=20.0), status="failed", message="it")
    assert judge(run(FrameMetrics(psnr=30.0)), [failed]).word == "unknown"  # no noise, either


def test_a_run_without_clips_is_unknown() -> None:
    assert judge(run(), []).reasons == ("No clip was compared.",)


def test_a_broken_exact_kernel_is_no_noise() -> None:
    broken = run(FrameMetrics(psnr=5.0, constant=True), name="other")
    candidate = run(FrameMetrics(psnr=30.0), name="sparse")
    found = judged(report((broken,), candidate))
    assert found.floor[0].verdict is not None
    assert found.floor[0].verdict.word == "broken"
    assert found.candidates[0].verdict is not None
    assert found.candidates[0].verdict.word == "unknown"


def cost(density: float) -> Cost:
    return Cost(
        step_seconds=1.0,
        generation_seconds=2.0,
        warm_up_seconds=0.0,
        peak_memory=None,
        density=density,
        attention_share=0.5,
    )


def test_a_kernel_that_leaves_pairs_out_is_no_noise() -> None:
    sparse = run(FrameMetrics(psnr=20.0), name="other", cost=cost(0.1))
    found = judged(report((sparse,), run(FrameMetrics(psnr=30.0), cost=cost(0.5))))
    verdicts = [each.verdict for each in (*found.floor, *found.candidates)]
    assert [each and each.word for each in verdicts] == ["unknown", "unknown"]
    assert verdicts[0] is not None
    assert verdicts[0].reasons[0].startswith("It leaves pairs out")


def test_a_sparse_method_that_was_dense_throughout_is_said_so() -> None:
    equal, text = FrameMetrics(psnr=math.inf), "It attended to every pair in every layer and step"
    for backend, density, said in (
        ("sliding_tile_attn", 1.0, True),
        ("sliding_tile_attn", 0.3, False),
        ("torch_sdpa", 1.0, False),
    ):
        verdict = judge(run(equal, backend=backend, cost=cost(density)), [])
        assert verdict.word == WITHIN
        assert verdict.reasons[0].startswith(text) is said
    for psnr, word in ((30.0, "unknown"), (math.inf, WITHIN)):
        lines = (
            "transformer.self, layers 0-1: torch_sdpa (math) [settings], 8 calls each; the first "
            "10 steps are dense (`dense_steps`)",
            "transformer.cross, layers 0-1: torch_sdpa (math) [auto], 8 calls each; default",
        )
        dense = run(FrameMetrics(psnr=psnr), backend="sol_attn", cost=cost(1.0), attention=lines)
        verdict = judge(dense, [])
        assert verdict.word == word
        assert verdict.reasons[:2] == (
            "It attended to every pair in every layer and step: this says nothing of the method, "
            "and it is not named the fastest.",
            f"{lines[0]}.",
        )
        assert "cross" not in " ".join(verdict.reasons)


def test_what_is_paired_by_clip_is_in_the_report() -> None:
    def scored(each: Run, scores: tuple[float, ...], seconds: float) -> Run:
        clips = tuple(
            replace(clip, score=score, seconds=seconds, seed=seed)
            for seed, (clip, score) in enumerate(zip(each.generations, scores, strict=True))
        )
        return replace(each, generations=clips)

    frames = [FrameMetrics(psnr=psnr) for psnr in (30.0, 40.0, 50.0)]
    lower = [FrameMetrics(psnr=psnr) for psnr in (28.0, 38.1, 47.9)]
    dense = replace(
        report((scored(run(*frames, name="exact"), (0.5, 0.7, 0.9), 1.0),)),
        candidates=(scored(run(*lower), (0.4, 0.6, 0.8), 0.5),),
        reference=scored(run(*[FrameMetrics()] * 3, name="dense"), (0.5, 0.7, 0.9), 1.0),
    )
    found = judged(dense)
    (candidate,), (exact,) = found.candidates, found.floor
    assert sorted(candidate.differences) == ["psnr", "score"]
    psnr, score = candidate.differences["psnr"], candidate.differences["score"]
    assert (psnr.count, psnr.mean) == (3, pytest.approx(-2.0))
    assert psnr.low is not None
    assert -2.3 < psnr.low < -2
    assert (score.mean, score.low) == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert exact.differences["psnr"].mean == 0.0
    assert candidate.speed is not None
    assert (candidate.speed.mean, candidate.speed.low) == (pytest.approx(2), pytest.approx(2))
    assert found.reference.speed is None  # nothing was made twice
    assert "score" not in " ".join(candidate.verdict.reasons if candidate.verdict else ())


def test_a_broken_reference_is_blamed_itself() -> None:
    broken = replace(
        report((run(),), run(FrameMetrics(psnr=math.inf))),
        reference=run(FrameMetrics(non_finite=3), name="dense"),
    )
    found = judged(broken)
    text = "The reference, dense, is broken: NaN or infinite values in 1 of 1 clip."
    assert found.notes == (text,)
    verdicts = [each.verdict for each in (*found.floor, *found.candidates)]
    assert [each and (each.word, each.reasons) for each in verdicts] == [("unknown", (text,))] * 2


def test_vmaf_alone_asks_for_no_noise() -> None:
    near = FrameMetrics(psnr=90.8, ssim=1.0, vmaf=97.4)  # VMAF gives equal clips as little
    assert judge(run(near), []).word == WITHIN
    assert judge(run(replace(near, psnr=40.0)), []).word == "unknown"


def test_every_run_but_the_reference_gets_a_verdict() -> None:
    dense, sparse = run(FrameMetrics(psnr=45.0)), run(FrameMetrics(psnr=20.0))
    found = judged(report((dense,), dense, sparse))
    assert found.reference.verdict is None
    words = [each.verdict and each.verdict.word for each in found.runs[1:]]
    assert words == [WITHIN, WITHIN, "visible"]
    assert found.floor[0].verdict is not None
    assert found.floor[0].verdict.reasons == ("An exact kernel: its difference is the noise.",)


def test_figures_are_said_with_unit_and_spread() -> None:
    floor = [run(FrameMetrics(psnr=math.inf), FrameMetrics(psnr=math.inf))]
    verdict = judge(run(FrameMetrics(psnr=30.0), FrameMetrics(psnr=34.0)), floor)
    text = "PSNR 32.0 dB (spread 2.8 over 2 clips); dense kernels inf dB"
    # Equal clips count as 100 dB.
    assert verdict.reasons == (f"{text}, by clip -68.0 [-93.4, -42.6].",)


def test_equal_clips_and_small_figures_are_said_in_few_words() -> None:
    floor = [run(FrameMetrics(psnr=90.0), latents=(3e-7,))]
    assert judge(run(FrameMetrics(psnr=math.inf), latents=(0.0,)), floor).reasons == (
        "Every clip equals the reference's.",
    )
    assert judge(run(FrameMetrics(psnr=90.0), latents=(1.234e-6,)), floor).reasons == (
        "PSNR 90.0 dB; dense kernels 90.0 dB.",
        "latents 1.2e-06; dense kernels 3e-07.",
    )


@pytest.mark.parametrize(("name", "noisy", "equal"), MEASURED)
def test_equal_clips_have_no_distance(name: str, noisy: float, equal: float) -> None:
    assert distance(name, equal) == 0.0 < distance(name, noisy)
