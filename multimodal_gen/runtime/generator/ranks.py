"""Several GPUs: what is settled before any rank starts, and what differs on each of them."""

import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import torch

from multimodal_gen.errors import ConfigError, UsageError, short
from multimodal_gen.runtime.distributed.groups import (
    broadcast_object,
    check_same_on_ranks,
    join_parallel,
    join_world,
    parallel_groups,
)
from multimodal_gen.runtime.distributed.mesh import Mesh, plan_mesh
from multimodal_gen.runtime.generator.load import pick_device
from multimodal_gen.runtime.generator.skeleton import denoiser_configs
from multimodal_gen.runtime.platforms import current_platform
from multimodal_gen.runtime.server_args import ServerArgs
from multimodal_gen.settings import as_flag

_FLAGS = ("num_gpus", "sp_degree", "ulysses_degree", "ring_degree", "cfg_parallel")

_MOST_ON_CPUS = 64

# What each host may have its own of, and what only rank 0 looks at.
_OWN = frozenset({"model_path", "output_path", "record_attention", "overwrite", "num_gpus"})


def plan_ranks(args: ServerArgs) -> Mesh:
    """Return the mesh of the ranks that are to be started on this host; one rank for one GPU.

    Raises:
        ConfigError: the degrees do not fit each other, the heads or the GPUs.
        UsageError: what is asked for runs on one GPU only.
    """
    flags: dict[str, Any] = {name: getattr(args, name) for name in _FLAGS}
    if not args.cfg_parallel and all(flag in (None, False, 1) for flag in flags.values()):
        return Mesh()
    device_type = _device_type(args)
    _refuse_check(args)
    mesh = plan_mesh(
        num_heads=_fewest_heads(args),
        gpus_per_host=torch.cuda.device_count() if device_type == "cuda" else None,
        **flags,
    )
    if device_type == "cpu" and mesh.world_size > _MOST_ON_CPUS:
        raise ConfigError(
            f"--num-gpus must be at most {_MOST_ON_CPUS} on CPUs, a process each, got "
            f"{mesh.world_size}; use --num-gpus {_MOST_ON_CPUS}, or GPUs"
        )
    return mesh


def join_ranks(asked: Sequence[ServerArgs], num_ranks: int) -> tuple[ServerArgs, ...]:
    """Join the ranks that were started, where there are several; return the arguments with seeds.

    Args:
        asked: the arguments of each generation; what concerns loading is the same in all.
        num_ranks: how many ranks there are.

    Raises:
        ConfigError: the degrees do not fit each other, the heads or the ranks.
        UsageError: the ranks were given different arguments, or what is asked for runs on one GPU
            only.
    """
    first = asked[0]
    degrees: dict[str, Any] = {name: getattr(first, name) for name in _FLAGS}
    if num_ranks == 1:
        plan_mesh(world_size=1, **degrees)
        return tuple(asked)
    device_type = _device_type(first)
    for args in asked:
        _refuse_check(args)
    join_world(device_type)
    names = [field.name for field in fields(first) if field.name not in _OWN]
    given = {as_flag(name): [getattr(args, name) for args in asked] for name in names}
    # Of one generation, messages show the value itself.
    check_same_on_ranks({n: v if len(v) > 1 else v[0] for n, v in given.items()})
    join_parallel(
        {**degrees, "num_heads": _fewest_heads(first)},
        device_type=device_type,
        rank_timeout=first.rank_timeout,
    )
    drawn = broadcast_object([secrets.randbelow(2**32) for _ in asked])
    return tuple(
        replace(args, seed=seed) if args.seed is None else args
        for args, seed in zip(asked, drawn, strict=True)
    )


def rank_device(device: str | None) -> torch.device:
    """Return the device of this process: on several GPUs, that of its rank.

    Args:
        device: `--device`, or None for this machine's accelerator.

    Raises:
        UsageError: torch does not know the device, or the machine does not have it.
    """
    chosen = pick_device(device)
    if parallel_groups() is not None and chosen.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


@contextmanager
def ending_signals_raise() -> Iterator[None]:
    """On a rank, let the signals that end it raise in the `with` block, so that it cleans up."""
    main = threading.current_thread() is threading.main_thread()
    if parallel_groups() is None or not main:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_check(args: ServerArgs) -> None:
    if args.check_attention:
        raise UsageError(
            f"--check-attention must be 0 on several GPUs, none of which has all keys of a call, "
            f"got {args.check_attention}; leave it out, or run on one GPU"
        )
    if args.cuda_graph:
        raise UsageError(
            "--cuda-graph must be left out on several GPUs, which exchange with the host's help, "
            "got both; leave it out, or run on one GPU"
        )
    if args.compile_ahead:
        raise UsageError(
            "--compile-ahead must be left out on several GPUs, each of which launches another "
            "share, got both; leave it out, or run on one GPU"
        )


def _device_type(args: ServerArgs) -> str:
    """Return the kind of device that ranks run on; refuse what several cannot do."""
    if args.backend == "diffusers":
        named = args.attention_backend
        asked = "" if named is None else f" for --attention-backend {named}"
        raise UsageError(
            f"--backend must be sglang on several GPUs, got diffusers{asked}, whose attention is "
            f"not split here; leave --backend and --attention-backend out, or run on one GPU"
        )
    if args.device is None:
        device = torch.device(current_platform().device_type)
    else:
        try:
            device = torch.device(args.device)
        except RuntimeError:
            device = pick_device(args.device)  # raises, and says why
    if device.index is not None:
        raise UsageError(
            f"--device must name no single device where several ranks run, got "
            f"{short(args.device)}; use --device {device.type}"
        )
    if device.type not in ("cuda", "cpu"):
        raise UsageError(
            f"--device must be cuda or cpu where several ranks run, got {device.type}; "
            f"leave --num-gpus and the degrees out"
        )
    if device.type == "cuda" and not torch.cuda.device_count():
        pick_device(args.device)  # raises, and says why
    return device.type


def _fewest_heads(args: ServerArgs) -> int | None:
    """Return the fewest heads of any denoiser, by its configuration; None where none tells."""
    configs = denoiser_configs(args.model_path).values()
    found = [config.get("num_attention_heads") for config in configs]
    return min((heads for heads in found if isinstance(heads, int)), default=None)
