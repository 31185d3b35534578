"""Attention processors as users write them; it imports diffusers, so tests import it late."""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn


class Regional:
    """A processor of a user's own that lets no image token see the text."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        del kwargs
        length = encoder_hidden_states.shape[1]
        image = [f(hidden_states) for f in (attn.to_q, attn.to_k, attn.to_v)]
        text = [
            f(encoder_hidden_states) for f in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        ]
        query, key, value = (
            torch.cat(pair, dim=1).unflatten(-1, (attn.heads, -1))
            for pair in zip(text, image, strict=True)
        )
        mask = torch.ones(1, 1, query.shape[1], key.shape[1], dtype=torch.bool)
        mask[:, :, length:, :length] = False
        out = dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=self._attention_backend
        ).flatten(2)
        return attn.to_out[0](out[:, length:]), attn.to_add_out(out[:, :length])
