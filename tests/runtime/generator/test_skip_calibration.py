"""Calibrating skip-softmax: what a lambda would leave out, and the curve through it."""

import math

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.runtime.generator.skip_calibration import (
    SkipRecorder,
    fit_curve,
    skipped_shares,
)
from multimodal_gen.runtime.layers.attention.call import watching
from multimodal_gen.runtime.layers.attention.request import LayerSite
from tests.helpers.methods import method
from tests.helpers.skipping import peaked_inputs
from tests.helpers.sparse import run_sparse, text_places

GRID = (3, 9, 13)
BLOCK = 128


@pytest.mark.parametrize("place", ["no text", "text first", "text last"])
def test_what_is_measured_is_what_the_method_leaves_out(place):
    text = text_places(GRID, 150)[place]
    video = math.prod(GRID)
    q, k, v = peaked_inputs(video + (150 if text else 0), 2, 32, BLOCK)
    first = text.stop if text is not None and text.start == 0 else 0
    parts = [k[0, first : first + video], k[0, :first], k[0, first + video :]]
    lambdas = (0.5, 0.1, 0.01, 1e-4)
    shares = skipped_shares(
        q[0, first : first + video],
        [part for part in parts if len(part)],
        scale=32**-0.5,
        lambdas=lambdas,
        heads=range(2),
        rows=[slice(i, i + BLOCK) for i in range(0, video, BLOCK)],
    )
    for threshold, share in zip(lambdas, shares.tolist(), strict=True):
        layer = method("skip_softmax", dense_above=...).layer(threshold=threshold)
        run_sparse(layer, (q, k, v), GRID, text=text)
        (entry,) = layer.report().entries
        assert entry.skipped == pytest.approx(share, abs=1e-12)
    assert shares[0] > shares[-1]


def test_every_sample_of_a_call_is_looked_at():
    q, k, v = (
        torch.cat(pair)
        for pair in zip(
            peaked_inputs(math.prod(GRID), 2, 32, BLOCK),
            peaked_inputs(math.prod(GRID), 2, 32, BLOCK, seed=1),
            strict=True,
        )
    )
    k[0] = 0  # a branch of guidance whose attention is flat
    means = []
    for some in (slice(0, 1), slice(1, 2), slice(0, 2)):
        recorder = SkipRecorder("transformer")
        site = LayerSite(name="blocks.0.attn1", component="transformer", layer=0, num_layers=1)
        layer = method("skip_softmax", dense_above=...).layer(site=site, threshold=0.1)
        with watching(recorder):
            run_sparse(layer, (q[some], k[some], v[some]), GRID)
        means.append(recorder.mean())
    flat, peaked, both = means
    assert peaked.max() > flat.max() == 0
    torch.testing.assert_close(both, (flat + peaked) / 2)


def test_a_curve_that_is_one_is_found():
    points = [(3.0 * math.exp(4.0 * share), share) for share in (0.0, 0.2, 0.5, 0.8)]
    points.append((1e9, 0.95))  # what lies outside does not count
    a, b = fit_curve(points[1:], 1280)
    assert (a, b) == (pytest.approx(3.0), pytest.approx(4.0))


FLAT = "attention is flat over these 1280 keys"
SHORT = "calibrate on larger or longer videos, of blocks of 128 tokens, or more prompts"


@pytest.mark.parametrize(
    ("shares", "keys", "remedy"),
    [
        ((0.0, 0.0), 1280, FLAT),
        ((0.0, 0.02), 1280, FLAT),
        ((0.0, 0.0), 72, SHORT),  # one block, the first, which is never left out
        ((0.05, 0.5, 0.95), 1280, SHORT),
        ((0.5, 0.5), 1280, SHORT),
        ((0.6, 0.5), 1280, SHORT),
        ((0.3, 0.3001), 1280, SHORT),  # which no coefficient would fit
    ],
)
def test_shares_that_tell_of_no_curve_are_refused(shares, keys, remedy):
    points = [(10.0 ** (i + 1), share) for i, share in enumerate(shares)]
    message = rf"a curve must be fitted to two shares from 0\.1 to 0\.9 .*; {remedy}"
    with pytest.raises(UsageError, match=message):
        fit_curve(points, keys)
