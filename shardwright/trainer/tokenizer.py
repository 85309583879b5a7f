"""Tokenizers: those of the hub or a directory, and one of bytes that needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..utils.errors import nearest, nearest_file
from .errors import RecipeError
from .hub import why_not

# How a conversation is written where the tokenizer does not say: ChatML. The answers of the assistant are marked.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>")


def load_tokenizer(name: str | None, model: str | dict[str, Any], chat_template: str | None) -> Any:
    """The tokenizer that a recipe names; RecipeError where there is none."""
    if name is None and isinstance(model, dict):
        raise RecipeError("tokenizer is missing, and a new model has none of its own; give a name, or tokenizer: bytes")
    if name == "bytes":
        tokenizer: Any = byte_tokenizer()
    else:
        source = name or model
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as error:
            key = "tokenizer" if name else "tokenizer is left out, and model"
            first = str(error).strip().split("\n")[0]
            reason = why_not(error, str(source))
            folder = Path(str(source))
            if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*vocab*")):
                first = "the directory has no tokenizer.json, which save_pretrained of a tokenizer writes"
            none = f"{key}={source!r} has no tokenizer that transformers can load ({first})"
            near = nearest(name, ("bytes",)) if name else ""
            raise RecipeError((f"{key}={source!r}: {reason}" if reason else none) + near) from error
    if chat_template is not None:
        path = Path(chat_template)
        readable = len(chat_template) < 256 and path.suffix in (".jinja", ".jinja2", ".txt", ".j2")
        if readable and not path.is_file():
            raise RecipeError(f"chat_template={chat_template!r}: there is no such file{nearest_file(path)}")
        tokenizer.chat_template = path.read_text() if readable else chat_template
        try:  # also where no sample is a conversation: it is saved beside the model
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise RecipeError(f"chat_template is no Jinja template: {error.message} (line {error.lineno})") from None
        except Exception:  # one that wants other roles: the samples tell
            pass
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, and tokens for padding, the end, and the two ends of a message: a vocabulary of 260."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        additional_special_tokens=list(_SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
