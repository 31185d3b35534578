"""What the entry points refuse."""

import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.kernels.linear_attention.api import add_linear, key_means, key_state
from multimodal_gen.kernels.linear_attention.reference import KeyState, Projection
from tests.helpers.inputs import random

X = random(1, 40, 2, 16)
BLOCKS = Blocks.regular(40, 16)
STATE = KeyState(moments=random(1, 2, 16, 16), sums=random(1, 2, 16))
WEIGHT = Projection(weight=random(16, 16))
ROWS = slice(0, 40)


def test_a_feature_map_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match=r"`feature_map` must be one of softmax, elu, relu, got"):
        key_state(X, X, BLOCKS, feature_map="gelu")
    with pytest.raises(UsageError, match=r"`feature_map` must be one of softmax, elu, relu, got"):
        add_linear(X, X, STATE, WEIGHT, rows=ROWS, feature_map="gelu")


def test_keys_must_be_those_that_are_cut():
    with pytest.raises(UsageError, match=r"`key` must be \[B, 40, Hkv, D\], got \[1, 39, 2, 16\]"):
        key_means(X[:, :39], BLOCKS)
    with pytest.raises(UsageError, match=r"`value` must be \[1, 40, 2, 16\] in torch.float32, as"):
        key_state(X, X.half(), BLOCKS, feature_map="relu")


def test_blocks_must_be_the_same_for_all_heads():
    lengths = torch.full((1, 2, 3), 4, dtype=torch.int32)
    blocks = Blocks.ragged(lengths * 0, lengths, total=40, size=16)
    with pytest.raises(UsageError, match="`blocks` must be the same for all heads, got bounds"):
        key_means(X, blocks)


def test_the_output_must_look_like_the_queries():
    with pytest.raises(
        UsageError, match=r"`out` must be \[B, S, H, D\] as query, \[1, 40, 2, 16\]"
    ):
        add_linear(X[:, 1:], X, STATE, WEIGHT, rows=ROWS, feature_map="relu")


def test_the_projection_and_the_state_must_have_the_head_size():
    small = Projection(weight=random(8, 8))
    with pytest.raises(UsageError, match=r"`projection` must have a weight of \[16, 16\], got \[8"):
        add_linear(X, X, STATE, small, rows=ROWS, feature_map="relu")
    state = KeyState(moments=random(1, 3, 16, 16), sums=random(1, 3, 16))
    with pytest.raises(UsageError, match=r"`state` must be of a batch of 1, a divisor of 2 heads"):
        add_linear(X, X, state, WEIGHT, rows=ROWS, feature_map="relu")


def test_a_projection_elsewhere_is_refused():
    there = Projection(weight=torch.empty(16, 16, device="meta"))
    with pytest.raises(UsageError, match="`projection` must lie on cpu, as query, got meta"):
        add_linear(X, X, STATE, there, rows=ROWS, feature_map="relu")
