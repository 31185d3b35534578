"""The text that the tiny tokenizers learn their words from."""

from typing import Final

__all__ = ["DEFAULT_PROMPT", "SENTENCES"]

DEFAULT_PROMPT: Final = "A red fox runs through fresh snow at sunrise"

SENTENCES: Final[tuple[str, ...]] = (
    DEFAULT_PROMPT,
    "A cat sleeps on a warm stone wall while leaves fall around it.",
    "Two dogs chase a yellow ball along the beach, waves behind them.",
    "The camera moves slowly over a green valley with a river.",
    "A woman in a blue coat walks across a busy street in the rain.",
    "Close view of hands shaping wet clay on a spinning wheel.",
    "An old train crosses a high bridge above the clouds.",
    "City lights at night, seen from a boat on dark water.",
    "A small robot waters flowers in a bright glass house.",
    "Snow falls on a quiet village, smoke rises from the houses.",
    "A man reads a book by the window, soft morning light.",
    "Waves break against black rocks under a stormy sky.",
    "A hot air balloon floats over desert hills at sunset.",
    "Children fly kites in a field of tall grass.",
    "A bowl of fruit on a wooden table, oil painting style.",
    "The astronaut plants a flag on a dusty red planet.",
    'A shop window with a sign that says "open" in large letters.',
    "Time lapse of stars turning above a mountain lake.",
    "A chef cuts vegetables fast, steam and fire in the background.",
    "Blurry, low quality, distorted, static, bad anatomy, worst quality.",
)
