"""Tokenizers of the real classes, trained on the spot from a few sentences.

Word pieces are learned by byte pair encoding and the vocabulary is laid out here: the trainer for
unigram models gives different pieces on every run, and a tiny pipeline must not.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from multimodal_gen.testing.tiny_models.family import SENTENCES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE: Final = "\u2581"  # how sentencepiece vocabularies write a space
_PRINTABLE: Final = tuple(chr(code) for code in range(0x21, 0x7F))
_WORDS: Final = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"
_MAX_PIECES: Final = 4096  # far above what the corpus can give: every word becomes one token

_LLAMA_SPECIAL: Final = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<pad>",
)
_QWEN_SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def t5_tokenizer(*, model_max_length: int = 512, sentences: Sequence[str] = SENTENCES) -> Any:
    """Return a `T5Tokenizer`, as T5 and UMT5 text encoders expect it.

    Args:
        model_max_length: Longest prompt in tokens.
        sentences: Texts whose words become single tokens.
    """
    from tokenizers import Tokenizer, models
    from transformers import T5Tokenizer

    backend = T5Tokenizer(extra_ids=0).backend_tokenizer
    alphabet = [_SPACE, *_PRINTABLE]
    merges = _learn_merges(sentences, backend.pre_tokenizer, alphabet)
    pieces = _unique([*alphabet, *(left + right for left, right in merges)])
    segmenter = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, list(merges)))
    segmenter.pre_tokenizer = backend.pre_tokenizer
    counts = Counter(token for text in sentences for token in segmenter.encode(text).tokens)
    total = sum(counts.values()) + len(pieces)
    scores = [(piece, math.log((counts[piece] + 1) / total)) for piece in pieces]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=model_max_length)


def byt5_tokenizer(*, model_max_length: int = 256) -> Any:
    """Return a `ByT5Tokenizer`; its tokens are bytes, so there is nothing to learn.

    Args:
        model_max_length: Longest glyph text in bytes.
    """
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(model_max_length=model_max_length)


def clip_tokenizer(*, model_max_length: int = 77) -> Any:
    """Return a `CLIPTokenizer` with CLIP's context of 77 tokens.

    Args:
        model_max_length: Longest prompt in tokens, with the start and end tokens.
    """
    from transformers import CLIPTokenizer

    backend = CLIPTokenizer().backend_tokenizer
    suffix = "</w>"
    alphabet = _byte_alphabet()
    merges = _learn_merges(
        SENTENCES, backend.pre_tokenizer, alphabet, normalizer=backend.normalizer, suffix=suffix
    )
    # Every byte also in its word-final form: an unknown token would read as the end of the text.
    pieces = [*alphabet, *(char + suffix for char in alphabet), *(a + b for a, b in merges)]
    vocab = _number([*pieces, "<|startoftext|>", "<|endoftext|>"])
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=model_max_length)


def llama_tokenizer(template: str, *, model_max_length: int = 1024) -> Any:
    """Return a `LlamaTokenizer` that knows the words and markers of a prompt template.

    Args:
        template: Prompt template whose words become single tokens, as they are in Llama 3: the
            pipeline crops the template by its token count.
        model_max_length: Longest prompt in tokens.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers import AddedToken, LlamaTokenizer

    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False),
        ]
    )
    alphabet = ["\n", _SPACE, *_PRINTABLE]
    merges = _learn_merges(_with_template(template), words, alphabet)
    byte_fallback = (f"<0x{byte:02X}>" for byte in range(256))
    pieces = [*alphabet, *(a + b for a, b in merges)]
    vocab = _number(["<unk>", *byte_fallback, *pieces, *_LLAMA_SPECIAL])
    return LlamaTokenizer(
        vocab=vocab,
        merges=merges,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<pad>",
        add_prefix_space=False,
        add_bos_token=True,
        padding_side="right",
        model_max_length=model_max_length,
        extra_special_tokens=[AddedToken(token, special=True) for token in _LLAMA_SPECIAL],
    )


def qwen2_tokenizer(template: str, *, model_max_length: int = 2048) -> Any:
    """Return a `Qwen2Tokenizer` with a chat template, that knows the words of a prompt template.

    Args:
        template: Prompt template or system message whose words become single tokens, as they are
            in Qwen2: the pipeline crops the template by its token count.
        model_max_length: Longest prompt in tokens.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    backend = Qwen2Tokenizer().backend_tokenizer
    alphabet = _byte_alphabet()
    corpus = [*_with_template(template), "system\n", "user\n", "assistant\n"]
    merges = _learn_merges(corpus, backend.pre_tokenizer, alphabet, normalizer=backend.normalizer)
    vocab = _number([*alphabet, *(a + b for a, b in merges), *_QWEN_SPECIAL])
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        padding_side="right",
        model_max_length=model_max_length,
        extra_special_tokens=[AddedToken(token, special=True) for token in _QWEN_SPECIAL],
        chat_template=_QWEN_CHAT_TEMPLATE,
    )


def _with_template(template: str) -> list[str]:
    """Return the corpus with the template's text between its markers added."""
    return [*SENTENCES, *(part for part in re.split(r"<\|\w+\|>|\{\}", template) if part)]


def _byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for bytes in byte-level vocabularies."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _learn_merges(
    corpus: Iterable[str],
    pre_tokenizer: Any,
    alphabet: Sequence[str],
    *,
    normalizer: Any = None,
    suffix: str = "",
) -> list[tuple[str, str]]:
    """Return byte-pair merges, in order, that build every word of the corpus."""
    from tokenizers import Tokenizer, models, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        learner.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_PIECES,
        initial_alphabet=list(alphabet),
        end_of_word_suffix=suffix,
        # The trainer numbers word-final characters in hash order, and breaks ties by number.
        special_tokens=[char + suffix for char in alphabet] if suffix else [],
        show_progress=False,
    )
    learner.train_from_iterator(corpus, trainer)
    return [(left, right) for left, right in _model_json(learner)["merges"]]


def _model_json(tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return the serialised model of a tokenizer, the one place where its merges can be read."""
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _unique(pieces: Iterable[str]) -> list[str]:
    """Return the pieces in order, each once: two merges may build the same piece."""
    return list(dict.fromkeys(pieces))


def _number(pieces: Iterable[str]) -> dict[str, int]:
    """Return the vocabulary that numbers the pieces in order."""
    return {piece: index for index, piece in enumerate(_unique(pieces))}
