"""The text encoder's own training: to tell from every word what the caption says of its shape.

Trained with the transformer alone, it can end as a bag of words, whose attention is on one word
whatever the order: then "up then left" is "left then up", and of two shapes nobody can say which is
the red one. Nothing in the loss of a clip leads out of that, so reading is learnt first.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from clips import COLOURS, KINDS, Scene, draw_scenes, motions
from models import tokens_of

SEED = 600_000
"""Of the captions that reading is learnt on; those it is tested on have the next one."""
CAPTIONS = 16_384
TESTED = 256
BATCH = 128
RATE = 1e-3
_NAMES = tuple(COLOURS), KINDS, tuple(map(str, motions()))
_NOTHING = -100  # `cross_entropy` leaves out such targets


def learn_to_read(text_encoder: Any, tokenizer: Any, steps: int) -> float:
    """Train a text encoder; return the share of words that tell all of their shape afterwards.

    Linear layers, which are thrown away, tell from each word's state which of the shapes it belongs
    to, and the shape's colour, kind and motion.

    Args:
        text_encoder: on any device; its parameters are trained in place.
        tokenizer: a word of a caption is one token.
        steps: how many.
    """
    device = text_encoder.device
    scenes = draw_scenes(SEED, min(CAPTIONS, BATCH * steps), frames=2)
    tokens, real, targets = _lesson(tokenizer, scenes, device)
    sizes = [2, *map(len, _NAMES)]
    heads = torch.nn.Linear(text_encoder.config.d_model, sum(sizes), device=device)
    optimiser = torch.optim.AdamW([*text_encoder.parameters(), *heads.parameters()], lr=RATE)
    drawn = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        share = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.param_groups[0]["lr"] = RATE * share
        few = torch.randint(len(tokens), (BATCH,), generator=drawn).to(device)
        told = heads(text_encoder(tokens[few], real[few]).last_hidden_state).split(sizes, -1)
        loss = sum(
            F.cross_entropy(each.flatten(0, 1), wanted.flatten(), ignore_index=_NOTHING)
            for each, wanted in zip(told, targets[few].unbind(-1), strict=True)
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    scenes = draw_scenes(SEED + 1, TESTED, frames=2)
    tokens, real, targets = _lesson(tokenizer, scenes, device)
    with torch.no_grad():
        told = heads(text_encoder(tokens, real).last_hidden_state).split(sizes, -1)
    found = torch.stack([each.argmax(-1) for each in told], -1)
    asked = (targets != _NOTHING).all(-1)
    return (found == targets).all(-1)[asked].float().mean().item()


def _lesson(
    tokenizer: Any, scenes: Sequence[Scene], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [B, L], which are real, and what each tells: place, colour, kind, motion."""
    tokens, real = tokens_of(tokenizer, [scene.caption for scene in scenes], str(device))
    longest = int(real.sum(1).max())
    tokens, real = tokens[:, :longest], real[:, :longest]
    targets = torch.full((*tokens.shape, 1 + len(_NAMES)), _NOTHING)
    for row, scene in zip(targets, scenes, strict=True):
        start = 0
        for place, shape in enumerate(scene.shapes):
            end = start + len(str(shape).split())
            said = shape.colour, shape.kind, str(shape.motion)
            told = [names.index(name) for names, name in zip(_NAMES, said, strict=True)]
            row[start:end] = torch.tensor([place, *told])
            start = end + 1  # behind "and"
    return tokens, real, targets.to(device)
