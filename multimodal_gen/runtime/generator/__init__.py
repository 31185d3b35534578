"""Runs a diffusers pipeline from its folder to a file: load, attach attention, run, save.

Importing this package imports torch, and diffusers only when a pipeline is read.
"""

from multimodal_gen.runtime.generator.index import PipelineIndex
from multimodal_gen.runtime.generator.load import pick_device, pick_dtype
from multimodal_gen.runtime.generator.passthrough import DiffusersAttention, choose_backend
from multimodal_gen.runtime.generator.ranks import join_ranks, plan_ranks
from multimodal_gen.runtime.generator.run import (
    Attach,
    Generated,
    Handle,
    OnStep,
    Report,
    Session,
    find_done,
    prepare,
)
from multimodal_gen.runtime.generator.skeleton import load_skeleton
from multimodal_gen.runtime.generator.stream import Give, StreamedChunk

__all__ = [
    "Attach",
    "DiffusersAttention",
    "Generated",
    "Give",
    "Handle",
    "OnStep",
    "PipelineIndex",
    "Report",
    "Session",
    "StreamedChunk",
    "choose_backend",
    "find_done",
    "join_ranks",
    "load_skeleton",
    "pick_device",
    "pick_dtype",
    "plan_ranks",
    "prepare",
]
