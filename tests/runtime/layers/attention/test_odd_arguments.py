"""Odd arguments of what is made before a call: one clear error, which quotes little of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from multimodal_gen.errors import UsageError
from multimodal_gen.kernels.block_sparse.layouts import chunk_causal_plan, frame_causal_plan
from multimodal_gen.kernels.block_sparse.plan import Blocks
from multimodal_gen.runtime.layers.attention import LocalAttention
from multimodal_gen.runtime.layers.attention.causal_cache import CacheSize, CausalCache
from multimodal_gen.runtime.layers.attention.scope import scope_from

ARRAY = np.array([1, 2])


def size(**changes: object) -> CacheSize:
    held = {"num_layers": 1, "batch": 1, "num_kv_heads": 1, "head_size": 8}
    return CacheSize(**{**held, "chunk_tokens": 4, "window": 2, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scope_from(strict="no"), "strict must be true or false, got 'no'"),
        (lambda: scope_from(strict={}), "strict must be true or false, got {}"),
        (lambda: LocalAttention(4, 16, prepare=3), "prepare must be a function of a layer and"),
        (lambda: Blocks.regular(16, int), "`size` must be of type int, got <class 'int'>"),
        (lambda: Blocks.regular(16, ARRAY), "`size` must be of type int, got array"),
        (lambda: Blocks.regular(ARRAY, 16), "`total` must be of type int, got array"),
        (lambda: chunk_causal_plan(b"x"), "`chunks` must be a list of lengths in tokens, got b'x'"),
        (lambda: chunk_causal_plan([4], device=[16]), "`device` must be a torch device of this"),
        (lambda: frame_causal_plan(1, 4, device="nosuch"), "`device` must be a torch device of "),
        (lambda: CausalCache(size(), 2**70), "`device` must be a torch device of this machine"),
        (lambda: CausalCache(size(), positions=ARRAY), 'positions must be "start" or "window", '),
        (lambda: CausalCache(size(), positions="x" * 5000), 'positions must be "start" or "wi'),
        (lambda: size(head_size="x" * 5000), "head_size must be a whole number >= 1, got 'xx"),
        (lambda: size(bits=ARRAY), "bits must be 2, 4 or 8, or 16 "),
        (lambda: size(dtype=ARRAY), "dtype must be that of what layers bring, one of "),
        (lambda: scope_from(attention_auto_table="x" * 3000), "attention_auto_table 'xxx"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_plan_for_a_device_that_is_missing_is_refused() -> None:
    with pytest.raises(UsageError, match="`device` must be a torch device of this machine, got"):
        chunk_causal_plan([4], device="cuda")


def test_whole_numbers_of_other_libraries_cut_blocks() -> None:
    assert Blocks.regular(np.int64(16), torch.tensor(8)).num == 2
