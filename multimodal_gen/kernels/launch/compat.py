"""What differs between releases of Triton in Gluon: kernels take from here what has had two names.

Gluon is experimental, and no release promises the next one its interface. What the kernels need is
asked for by name and by parameter, so that an untried release is refused for what it lacks and not
for its number.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia import hopper as host

# Since 3.8 a copy of the copy engine is a load; the old name raises from 3.9 on.
async_load: Any = getattr(tma, "async_load", None) or getattr(
    tma, "async_copy_global_to_shared", None
)


@builtin  # type: ignore[untyped-decorator]
def _async_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Before 3.8 the copy engine's sums in memory have no name.
async_add: Any = getattr(tma, "async_atomic_add", None) or _async_add

# Where a name is looked for -> names, each with the parameters that the kernels give by name, or by
# a place that has had another meaning: before 3.6 `warp_specialize` took arguments apart.
_NEEDED: tuple[tuple[Any, dict[str, tuple[str, ...]]], ...] = (
    (
        gl,
        {
            "allocate_shared_memory": (),
            "convert_layout": ("assert_trivial",),
            "fma": (),
            "inline_asm_elementwise": ("is_pure", "pack"),
            "static_range": (),
            "warp_specialize": ("functions_and_args", "worker_num_warps", "worker_num_regs"),
            "BlockedLayout": (),
            "DotOperandLayout": ("operand_index", "parent", "k_width"),
            "NVMMADistributedLayout": ("version", "warps_per_cta", "instr_shape"),
            "NVMMASharedLayout": ("swizzle_byte_width", "element_bitwidth", "rank"),
            "SliceLayout": (),
        },
    ),
    (
        hopper,
        {
            "fence_async_shared": (),
            "warpgroup_mma": ("use_acc", "is_async"),
            "warpgroup_mma_wait": ("num_outstanding", "deps"),
        },
    ),
    (mbarrier, {"MBarrierLayout": (), "arrive": (), "expect": (), "init": ("count",), "wait": ()}),
    (host, {"TensorDescriptor": ("base", "shape", "strides", "block_shape", "layout")}),
)


def lacking() -> Iterator[str]:
    """Yield what the kernels need of Gluon and the installed Triton has not, as it is written."""
    if async_load is None:
        yield "tma.async_load"
    for owner, names in _NEEDED:
        where = owner.__name__.rpartition(".")[2]
        for name, parameters in names.items():
            found = getattr(owner, name, None)
            if found is None:
                yield f"{where}.{name}"
                continue
            taken = inspect.signature(found).parameters
            missing = [parameter for parameter in parameters if parameter not in taken]
            if missing:
                yield f"{where}.{name}({', '.join(missing)})"
