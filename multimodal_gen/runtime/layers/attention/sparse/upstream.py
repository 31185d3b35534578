"""What methods share that can run on their authors' own packages.

Packages serve what their authors needed. What nearly all of them lack is here; what a single one
lacks is where it is called.
"""

from multimodal_gen.runtime.layers.attention.sparse.tiles import SparseCall


def shape_reasons(*, heads: int, kv_heads: int, head_size: int, scale: float) -> list[str]:
    """Return why a package without grouped heads and without a scale cannot serve a layer.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        head_size: channels per head.
        scale: factor of the scores.
    """
    found = []
    if abs(scale * head_size**0.5 - 1) > 1e-6:
        found.append(
            f"needs the inverse root of the head size as scale, got {scale:.6g} for {head_size}"
        )
    if kv_heads != heads:
        found.append(f"needs as many key heads as the {heads}, got {kv_heads}")
    return found


def text_reasons(text: int) -> list[str]:
    """Return why a package without joint sequences cannot serve so many text tokens."""
    return [f"needs sequences without text, got {text} text tokens"] if text else []


def call_reasons(call: SparseCall, *, takes_text: bool = False) -> list[str]:
    """Return why a package without key masks, and as `shape_reasons` says, cannot serve a call.

    Args:
        call: the call.
        takes_text: whether the package takes joint sequences of some kind.
    """
    layout = call.layout
    text = max(layout.num_queries, layout.num_keys) - layout.num_video
    found = [] if takes_text else text_reasons(text)
    if call.mask is not None:
        found.append("has no key mask, and keys are masked")
    heads, head_size = call.query.shape[2:]
    kv_heads = call.key.shape[2]
    return found + shape_reasons(
        heads=heads, kv_heads=kv_heads, head_size=head_size, scale=call.scale
    )
