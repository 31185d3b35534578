"""Tiny text encoders of the real transformers classes."""

from typing import Any, Final

from multimodal_gen.testing.tiny_models.family import initialise

TEXT_WIDTH: Final = 64
"""Channels of every encoder's output."""

_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_SIZE: Final = 16
_FFN_WIDTH: Final = 128

# Pipelines read the hidden states two layers before the last; a third layer makes that one real.
_DECODER_LAYERS: Final = 3


def _t5_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_WIDTH,
        "d_kv": _HEAD_SIZE,
        "d_ff": _FFN_WIDTH,
        "num_layers": 2,
        "num_heads": _HEADS,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }


def t5(tokenizer: Any) -> Any:
    """Return a `T5EncoderModel` with the weights T5's own initialisation draws."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_config(tokenizer))).eval()


def umt5(tokenizer: Any) -> Any:
    """Return a `UMT5EncoderModel` with the weights UMT5's own initialisation draws."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_config(tokenizer))).eval()


def clip_text(tokenizer: Any) -> Any:
    """Return a `CLIPTextModel` for prompts as long as the tokenizer allows."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=_FFN_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return initialise(CLIPTextModel(config))


def _decoder_config(tokenizer: Any) -> dict[str, Any]:
    """Return the sizes of a decoder with grouped-query attention (4 heads, 2 key/value heads)."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": _FFN_WIDTH,
        "num_hidden_layers": _DECODER_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": False,
    }


def _qwen_config(tokenizer: Any) -> dict[str, Any]:
    return {
        **_decoder_config(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }


def _qwen25_vl_text_config(tokenizer: Any) -> dict[str, Any]:
    # Rotary channel pairs for time, height and width; they add up to half the head size.
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [2, 3, 3]}
    return {**_qwen_config(tokenizer), "rope_parameters": rope}


def llama(tokenizer: Any) -> Any:
    """Return a `LlamaModel`."""
    from transformers import LlamaConfig, LlamaModel

    return initialise(LlamaModel(LlamaConfig(**_decoder_config(tokenizer))))


def qwen25_vl_text(tokenizer: Any) -> Any:
    """Return a `Qwen2_5_VLTextModel`, the language half alone."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    config = Qwen2_5_VLTextConfig(**_qwen25_vl_text_config(tokenizer))
    return initialise(Qwen2_5_VLTextModel(config))


def qwen25_vl(tokenizer: Any) -> Any:
    """Return a `Qwen2_5_VLForConditionalGeneration` with its vision tower and language head."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=_qwen25_vl_text_config(tokenizer),
        vision_config={
            "depth": 2,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": _FFN_WIDTH,
            "num_heads": _HEADS,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return initialise(Qwen2_5_VLForConditionalGeneration(config))


def qwen3(tokenizer: Any, *, num_layers: int) -> Any:
    """Return a `Qwen3ForCausalLM`, narrower than the others, as its pipelines need it deep.

    Args:
        tokenizer: A Qwen2 tokenizer.
        num_layers: Decoder layers.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    narrow = {
        "hidden_size": TEXT_WIDTH // 2,
        "intermediate_size": _FFN_WIDTH // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS // 2,
        "num_key_value_heads": _KV_HEADS // 2,
        "head_dim": _HEAD_SIZE,
    }
    return initialise(Qwen3ForCausalLM(Qwen3Config(**{**_qwen_config(tokenizer), **narrow})))
