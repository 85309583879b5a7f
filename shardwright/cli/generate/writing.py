"""What loads the model and writes. The words are those of transformers' own `generate` on one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    TextStreamer,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from ...booster import Booster
from ...cluster import launch, launch_from_torch
from ...lazy import LazyInitContext
from ...plugins import HybridParallelPlugin
from ...utils.device import get_current_device
from ...utils.errors import counted
from ...utils.versions import is_installed
from .files import GenerateError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Ways of choosing words that transformers leaves to code on the hub, and what in generation_config.json asks for them.
_ELSEWHERE = {
    "contrastive_search": "penalty_alpha",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints",
    "dola_generation": "dola_layers",
}
Request = Mapping[str, Any]


def check(request: Request, device: str) -> None:
    """GenerateError for what can be known before weights are read."""
    config = _config(request)
    _check_choice(request)
    _check_devices(request["tp"], device)
    tokens = encode(request, load_tokenizer(request))["input_ids"].shape[1]
    if not tokens:
        raise GenerateError("the prompt is empty, and the tokenizer puts no token before it; give some text")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    # The text of an encoder-decoder has positions of its own, behind the token that it starts with.
    beside = 1 if config.is_encoder_decoder else tokens
    wanted = beside + request["options"]["max_new_tokens"]
    if 1 < longest < max(wanted, tokens):
        room = longest - beside
        fix = f"give --max-new-tokens {room}" if room > 0 and tokens <= longest else "give a shorter prompt"
        raise GenerateError(
            f"the prompt has {counted(tokens, 'token')}, which with --max-new-tokens {wanted - beside} is more "
            f"than the model's {longest} positions; {fix}"
        )
    if request["tp"] > 1:
        _check_layout(config, request["tp"])


def write(request: Request) -> int:
    """Load the model in this process, and print."""
    _write(request, load_model(request).to(get_current_device()).eval(), prints=True)
    return 0


def write_on_ranks(request: Request) -> int:
    """The same on the ranks that a launcher started, each with its part of every layer."""
    launch_from_torch(seed=request["seed"])
    try:
        model: Any = load_model(request)
        precision = next((name for name, dtype in _DTYPES.items() if dtype == model.dtype), "fp32")
        booster = Booster(plugin=HybridParallelPlugin(tp_size=request["tp"], precision=precision))
        model, *_ = booster.boost(model)
        model.eval()
        _write(request, model, prints=dist.get_rank() == 0)
    finally:
        dist.destroy_process_group()
    return 0


def load_tokenizer(request: Request) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"])
    except Exception as error:  # transformers and tokenizers say it in many ways
        raise GenerateError(
            f"the tokenizer of {request['tokenizer']} cannot be loaded ({_first_line(error)})"
        ) from error
    if request["chat"] and tokenizer.chat_template is None:
        raise GenerateError(f"the tokenizer of {request['tokenizer']} has no chat template; leave out --chat")
    return tokenizer


def encode(request: Request, tokenizer: Any) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of the prompt, [1, tokens]."""
    if request["chat"]:
        messages = [{"role": "user", "content": request["prompt"]}]
        if request["system"] is not None:
            messages.insert(0, {"role": "system", "content": request["system"]})
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    else:
        found = tokenizer(request["prompt"], return_tensors="pt")
    ids = found["input_ids"].long()  # of no text the tokenizer makes floats
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load_model(request: Request) -> Any:
    """The model of transformers, with adapters merged into its weights."""
    disable_progress_bar()
    dtype = _DTYPES.get(request["dtype"], "auto")
    writer = _writer_of(AutoConfig.from_pretrained(request["model"]))
    assert writer is not None, "`check` has seen that there is one"
    model: Any = writer.from_pretrained(request["model"], dtype=dtype)
    if request["adapters"] is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, request["adapters"]).merge_and_unload()
    return model


def _write(request: Request, model: Any, prints: bool) -> None:
    tokenizer = load_tokenizer(request)
    asked = {name: tensor.to(get_current_device()) for name, tensor in encode(request, tokenizer).items()}
    # The model's own generation_config may ask for stop strings, which need the tokenizer, and for more than words.
    options = {**request["options"], "tokenizer": tokenizer, "return_dict_in_generate": False}
    if model.generation_config.pad_token_id is None:  # one prompt has no padding; transformers asks for a token anyway
        options["pad_token_id"] = next(
            (one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0
        )
    texts = options.get("num_beams", model.generation_config.num_beams or 1)
    texts *= model.generation_config.num_return_sequences or 1  # of which the first is told
    flows = prints and not request["json"] and texts == 1
    if flows:
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    set_seed(request["seed"])  # of ranks, so that all draw the same words
    with torch.no_grad():
        found = model.generate(**asked, **options)[0]
    # An encoder-decoder writes behind a token of its own, other models behind the prompt.
    written = found[1 if model.config.is_encoder_decoder else asked["input_ids"].shape[1] :]
    if flows or not prints:
        return
    text = tokenizer.decode(written, skip_special_tokens=True)
    told = {"prompt": request["prompt"], "text": text, "tokens": len(written)}
    print(json.dumps(told) if request["json"] else text, flush=True)


def _config(request: Request) -> Any:
    """The config of a model of transformers that writes text."""
    try:
        config = AutoConfig.from_pretrained(request["model"])
    except Exception as error:  # of many kinds
        raise GenerateError(
            f"{request['model']}/config.json is none that transformers knows ({_first_line(error)})"
        ) from error
    if _writer_of(config) is None:
        what = (config.architectures or [config.model_type])[0]
        raise GenerateError(
            f"{request['model']} holds a {what}, which is neither a causal language model nor an encoder-decoder "
            "with a head for one; it writes no text"
        )
    if request["adapters"] is not None and not is_installed("peft"):
        raise GenerateError(f"{request['adapters']} holds adapters, which need peft: pip install peft")
    return config


def _writer_of(config: Any) -> Any:
    """The class that loads a model that writes text, which is a causal one or an encoder-decoder; None for others."""
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        classes: Any = auto._model_mapping.get(type(config), ())
        names = [one.__name__ for one in (classes if isinstance(classes, (tuple, list)) else (classes,))]
        if set(config.architectures or names) & set(names):
            return auto
    return None


def _check_choice(request: Request) -> None:
    """Whether transformers can choose words as the model's generation_config.json and the options ask for."""
    file = f"{request['model']}/generation_config.json"
    try:
        asked = GenerationConfig.from_pretrained(request["model"])
    except OSError as error:
        if Path(file).exists():
            raise GenerateError(f"{file} cannot be read ({_first_line(error)}); mend it, or take it away") from error
        return
    except Exception as error:  # values that do not go together, said in many ways
        raise GenerateError(f"{file} cannot be taken ({_first_line(error)}); mend it, or take it away") from error
    asked.update(**request["options"])
    mode = asked.get_generation_mode().value
    if mode in _ELSEWHERE:
        raise GenerateError(
            f"{file} asks for {mode.replace('_', ' ')}, which transformers leaves to code on the hub; take "
            f"{_ELSEWHERE[mode]} out of it"
        )


def _check_devices(tp: int, device: str) -> None:
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise GenerateError(
            "--device cuda, but torch sees no CUDA device here; leave it out, or see `shardwright doctor`"
        )
    if gpus and tp > gpus:
        raise GenerateError(
            f"--tp {tp} needs as many GPUs, there are {gpus}; ask for at most {gpus}, or add --device cpu"
        )


def _check_layout(config: Any, tp: int) -> None:
    """Whether the layers can be shared by so many ranks."""
    launch(0, tp, None, None, backend="fake")
    try:
        with LazyInitContext():
            model: Any = _writer_of(config).from_config(config)
        HybridParallelPlugin(tp_size=tp, precision="fp32").preflight(model, None)
    except ValueError as error:
        raise GenerateError(f"--tp {tp}: {_first_line(error)}") from error
    finally:
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0] or type(error).__name__
