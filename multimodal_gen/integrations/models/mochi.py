"""Mochi: joint attention with the text, its padding left out, behind the video."""

from multimodal_gen.integrations.models.adapter import ModelAdapter, latents_grid, text_behind

MOCHI = ModelAdapter(
    classes=("MochiTransformer3DModel",),
    grid=latents_grid,
    text_span=text_behind(latents_grid, "encoder_hidden_states"),
    split="makes a call for each sample, with as many tokens of text as that has",
)
