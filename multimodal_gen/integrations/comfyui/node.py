"""The nodes of ComfyUI: a backend for a MODEL's attention, and the report of what ran.

ComfyUI loads this file through `__init__.py`; `comfy_api` exists in its process alone.
"""

from collections import Counter
from types import MappingProxyType
from typing import Any

import torch
from comfy_api.latest import ComfyExtension, io, ui

from multimodal_gen.integrations.comfyui.takeover import KEY, Settings, Takeover, take_over
from multimodal_gen.runtime.attention_report import AttentionReport as Report
from multimodal_gen.runtime.platforms import AttentionBackendEnum


class AttentionBackend(io.ComfyNode):  # type: ignore[misc]  # untyped base
    """MODEL -> MODEL: its attention layers run on a backend of multimodal_gen."""

    @classmethod
    def define_schema(cls) -> Any:
        """Return the inputs and outputs."""
        schema = io.Schema(
            node_id="MultimodalGenAttentionBackend",
            display_name="Attention backend",
            category="model/attention",
            description=(
                "Runs the attention of a model on a backend of multimodal_gen, sparse or dense, "
                "and says what ran in every layer."
            ),
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "backend",
                    options=["auto", *(str(member) for member in AttentionBackendEnum)],
                    default="auto",
                    tooltip="`sglang attention list` says which of them run on this machine.",
                ),
                io.String.Input(
                    "config",
                    default="",
                    multiline=True,
                    tooltip=(
                        "Parameters of the backend: sparsity=0.9,dense_layers=0-1, a JSON object, "
                        "or the path of a JSON or YAML file. `sglang attention describe NAME` "
                        "lists them."
                    ),
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Steps before this share of the noise schedule run dense.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Steps after this share of the noise schedule run dense.",
                ),
                io.Boolean.Input(
                    "strict",
                    default=False,
                    tooltip="Stop with the reason where a call would fall back to another backend.",
                ),
            ],
            outputs=[io.Model.Output(), io.String.Output(display_name="plan")],
            hidden=[io.Hidden.unique_id],
        )
        # No argument: ComfyUI before 0.9 has none of that name.
        schema.search_aliases = ["sparse attention", "sage attention", "multimodal_gen"]
        return schema

    @classmethod
    def execute(
        cls,
        model: Any,
        backend: str,
        config: str,
        start_percent: float,
        end_percent: float,
        strict: bool,
    ) -> Any:
        """Return a clone of the model that is taken over, and what will run in it."""
        settings = Settings(
            backend=backend,
            config=config,
            start_percent=start_percent,
            end_percent=end_percent,
            strict=strict,
        )
        node_id = cls.hidden.unique_id
        taken = take_over(model, settings, lambda _: _show(_in_short(takeover.report()), node_id))
        takeover: Takeover = taken.get_attachment(KEY)
        denoiser = taken.get_model_object("diffusion_model")
        sampling = taken.get_model_object("model_sampling")
        plan = takeover.plan(denoiser, _dtype(taken), sampling)
        return io.NodeOutput(taken, plan.summary())


class AttentionReport(io.ComfyNode):  # type: ignore[misc]  # untyped base
    """What ran in every attention layer of a MODEL in its last sampling run."""

    @classmethod
    def define_schema(cls) -> Any:
        """Return the inputs and outputs."""
        return io.Schema(
            node_id="MultimodalGenAttentionReport",
            display_name="Attention report",
            category="model/attention",
            description=(
                "Says which backend ran in every attention layer. `after` takes what the sampler "
                "made, so that the report is made behind it."
            ),
            inputs=[
                io.Model.Input("model", tooltip="What Attention backend returned."),
                io.AnyType.Input("after", tooltip="The LATENT of the sampler, or what follows it."),
            ],
            outputs=[io.String.Output(display_name="report")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model: Any, after: Any) -> Any:
        """Return the report as text."""
        del after
        takeover = model.get_attachment(KEY)
        text = "the node Attention backend is not part of this model"
        if isinstance(takeover, Takeover):
            text = takeover.report().summary()
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def _dtype(model: Any) -> torch.dtype:
    """Return what a model computes in."""
    tell = getattr(model.model, "get_dtype_inference", None)
    found = None if tell is None else tell()
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()


def _in_short(report: Report) -> str:
    """Return what the two lines have room for that a node shows."""
    ran = Counter(
        label
        for layer in report.layers
        for label in {entry.selection.label for entry in layer.entries if entry.calls}
    )
    counts = ", ".join(f"{label} in {count} layers" for label, count in ran.most_common())
    return f"{counts or 'no layer ran'}\nin full: Attention report, or the log"


def _show(text: str, node_id: object) -> None:
    """Show text on a node, where a server runs."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None and node_id is not None:
        server.send_progress_text(text, node_id)


class AttentionExtension(ComfyExtension):  # type: ignore[misc]  # untyped base
    """What ComfyUI loads."""

    async def get_node_list(self) -> list[type]:
        """Return the nodes."""
        return [AttentionBackend, AttentionReport]


async def comfy_entrypoint() -> AttentionExtension:
    """Return the nodes, for ComfyUI."""
    return AttentionExtension()


NODE_CLASS_MAPPINGS = MappingProxyType(
    {
        "MultimodalGenAttentionBackend": AttentionBackend,
        "MultimodalGenAttentionReport": AttentionReport,
    }
)
NODE_DISPLAY_NAME_MAPPINGS = MappingProxyType(
    {
        "MultimodalGenAttentionBackend": "Attention backend",
        "MultimodalGenAttentionReport": "Attention report",
    }
)
