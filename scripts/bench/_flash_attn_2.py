"""A stand-in for flash-attn 2, which has no wheels, on FlashAttention 3, which has: forward only.

Packages written for flash-attn 2 can so be timed. Their row has to say whose dense parts it timed.

    with standing_in():
        import a_package_that_imports_flash_attn
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

import torch

INSTEAD = "fa3_fwd_interface"
PACKAGE, INTERFACE = "flash_attn", "flash_attn.flash_attn_interface"


def is_installed() -> bool:
    """Whether flash-attn 2 itself is; flash-attn 4 has a package of that name too."""
    return importlib.util.find_spec(PACKAGE) is not None and (
        importlib.util.find_spec(INTERFACE) is not None
    )


@contextmanager
def standing_in() -> Iterator[None]:
    """Let packages that are imported inside find flash-attn 2; afterwards it is gone again."""
    package, interface = (_module(name) for name in (PACKAGE, INTERFACE))
    vars(package).update(flash_attn_varlen_func=_varlen)
    vars(interface).update(
        _flash_attn_varlen_forward=_varlen_forward, _flash_attn_varlen_backward=_varlen_backward
    )
    names = (PACKAGE, INTERFACE)
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update({PACKAGE: package, INTERFACE: interface})
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _module(name: str) -> ModuleType:
    """Return an empty module that `find_spec` takes for an imported one."""
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None)
    return module


def _varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute packed sequences.

    Returns:
        The output [T, H, D], the logarithms of the sums of weights, fp32 [H, T], and what only
        dropout fills: an empty tensor and an int64 [2].
    """
    if dropout_p:
        raise ValueError(f"`dropout_p` must be 0 with {INSTEAD}, got {dropout_p}")
    out, lse = importlib.import_module(INSTEAD).flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        return_attn_probs=True,
    )
    return out, lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Compute packed sequences; returns [T, H, D]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen_forward(q, k, v, *lengths, dropout_p, scale, causal)[0]


def _varlen_backward(*_args: object, **_options: object) -> NoReturn:
    """Refuse."""
    raise NotImplementedError(f"{INSTEAD} has no backward: compute without gradients")
