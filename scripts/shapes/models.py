"""The parts of the shapes model, of the real classes, and the pipeline folder that they make."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clips import captions

from multimodal_gen.testing.tiny_models.tokenizers import t5_tokenizer

TEXT_TOKENS = 512
"""Tokens that `WanPipeline` pads a prompt to, with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the transformer is trained on for some of its steps.

    Attributes:
        frames: T of a clip, 1 and a multiple of four.
        height: pixels, a multiple of eight times a token's latents.
        width: pixels, the same.
        batch: clips of a step.
        clips: clips that are drawn for a run of the script.
        steps: how many.
        rate: the highest learning rate, which falls to 0 over the steps.
        shift: of the noise levels.
        keep: tokens along time, height and width that a step has; default: all.
    """

    frames: int
    height: int
    width: int
    batch: int
    clips: int
    steps: int
    rate: float = 1e-3
    shift: float = 3.0
    keep: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Dimensions of a model, and of the clips it is trained on.

    Attributes:
        heads: of the transformer.
        head_size: channels of a head.
        layers: of the transformer.
        ffn: channels inside of its feed-forward layers.
        text: channels of the text encoder.
        latent: channels of a latent.
        vae: channels of the autoencoder's first stage, which has half of the sides.
        patch: latents of a token, along time, height and width.
        stages: of the transformer's training; the last one has the clips that it generates, and the
            first one those of the autoencoder.
        muon: whether the transformer's blocks are trained by Muon, not by AdamW.
        reading: steps in which the text encoder learns to read, after which it stays as it is; 0
            where it is trained with the transformer.
    """

    heads: int
    head_size: int
    layers: int
    ffn: int
    text: int
    latent: int
    vae: int
    patch: tuple[int, int, int]
    stages: tuple[Stage, ...]
    muon: bool = False
    reading: int = 0


SIZES = {
    "small": Size(
        heads=3, head_size=64, layers=6, ffn=512, text=96, latent=12, vae=16, patch=(1, 1, 1),
        stages=(Stage(frames=17, height=128, width=128, batch=64, clips=12_288, steps=18_000),),
    ),
    # Its autoencoder is that of the small one. What captions mean is learnt on short, small clips,
    # of which a step holds many; then some tokens of large clips, then all: those of Wan's 480p.
    "large": Size(
        heads=3, head_size=128, layers=6, ffn=1024, text=128, latent=12, vae=16, patch=(1, 2, 2),
        muon=True, reading=1500,
        stages=(
            Stage(
                frames=17, height=128, width=224, batch=128, clips=16_384, steps=16_000, shift=5
            ),
            Stage(
                frames=33, height=240, width=416, batch=64, clips=8192, steps=2500,
                rate=6e-4, shift=8,
            ),
            Stage(
                frames=81, height=480, width=832, batch=32, clips=1536, steps=2800,
                rate=5e-4, shift=10, keep=(11, 18, 30),
            ),
            Stage(
                frames=81, height=480, width=832, batch=8, clips=1536, steps=400,
                rate=4e-4, shift=10,
            ),
        ),
    ),
    "smoke": Size(
        heads=1, head_size=32, layers=1, ffn=32, text=32, latent=4, vae=4, patch=(1, 1, 1),
        reading=2,
        stages=(
            Stage(frames=5, height=32, width=32, batch=2, clips=4, steps=2),
            Stage(frames=9, height=32, width=48, batch=1, clips=2, steps=2, keep=(2, 3, 4)),
            Stage(frames=9, height=32, width=48, batch=1, clips=2, steps=2),
        ),
    ),
}  # fmt: skip


def make_vae(size: Size) -> Any:
    """Return an untrained `AutoencoderKLWan` that divides time by 4 and each side by 8."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=size.vae,
        z_dim=size.latent,
        dim_mult=[1, 2, 3],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,  # four pixels are one: a side is divided by 8 in two stages
        in_channels=12,
        out_channels=12,
        latents_mean=[0.0] * size.latent,
        latents_std=[1.0] * size.latent,
    )


def make_tokenizer() -> Any:
    """Return a `T5Tokenizer` in which every word of a caption is one token."""
    return t5_tokenizer(sentences=tuple(captions()))


def make_text_encoder(size: Size, vocabulary: int) -> Any:
    """Return an untrained `UMT5EncoderModel`."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=size.text,
        d_kv=32,
        d_ff=2 * size.text,
        num_heads=size.text // 32,
        num_layers=2,
        dropout_rate=0.0,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return UMT5EncoderModel(config)


def make_transformer(size: Size) -> Any:
    """Return an untrained `WanTransformer3DModel`."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=size.patch,
        num_attention_heads=size.heads,
        attention_head_dim=size.head_size,
        in_channels=size.latent,
        out_channels=size.latent,
        text_dim=size.text,
        ffn_dim=size.ffn,
        num_layers=size.layers,
        rope_max_seq_len=128,
    )


def tokens_of(
    tokenizer: Any, prompts: Sequence[str], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of prompts, [B, 64], and which of them are real."""
    found = tokenizer(
        list(prompts), padding="max_length", max_length=64, truncation=True, return_tensors="pt"
    ).to(device)
    return found.input_ids, found.attention_mask


def embedded(text_encoder: Any, tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return what `WanPipeline` makes of tokens: [B, 512, C], zeros behind each prompt."""
    hidden = text_encoder(tokens, real).last_hidden_state * real.unsqueeze(-1)
    return torch.nn.functional.pad(hidden, (0, 0, 0, TEXT_TOKENS - tokens.shape[1]))


def make_scheduler(shift: float) -> Any:
    """Return the scheduler of the pipeline."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def make_pipeline(
    tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, *, shift: float
) -> Any:
    """Return a `WanPipeline` of the parts."""
    from diffusers import WanPipeline

    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=make_scheduler(shift),
    )


def save(pipeline: Any, folder: Path) -> None:
    """Write a pipeline folder with weights of 16 bits."""
    pipeline.to(dtype=torch.float16).save_pretrained(folder)
    words = folder / "tokenizer" / "tokenizer.json"  # in ASCII, as all texts of the repository
    words.write_text(json.dumps(json.loads(words.read_text("utf-8")), indent=2) + "\n")
