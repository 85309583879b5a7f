"""The verb: the prompt, how words are chosen, and the start of further ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..relaunch import inside_launcher, relaunch
from .files import GenerateError, Model, find_model

HELP = (
    "let a trained language model go on from a prompt, as transformers would, on one process or tensor-parallel ranks"
)

# Options that are arguments of transformers' generate; left out, each is as the model's generation_config.json says.
_CHOICE = {
    "temperature": (float, "X", "of the softmax that words are drawn from; 0: always the likeliest word"),
    "top_k": (int, "N", "draw from the N likeliest words"),
    "top_p": (float, "X", "draw from the likeliest words that have this share of probability"),
    "repetition_penalty": (float, "X", "above 1: words that were there are less likely"),
    "num_beams": (int, "N", "beams of a beam search"),
}
_DRAWING = ("temperature", "top_k", "top_p")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="model with its tokenizer, or what a run left")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", default=argparse.SUPPRESS, help="what it goes on from")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=Path,
        default=argparse.SUPPRESS,
        help="the same from a file; -: from stdin; of either, a line's end at the very end is left out",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message, written as its chat template says"
    )
    parser.add_argument("--system", metavar="TEXT", default=argparse.SUPPRESS, help="with --chat, a message before it")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens at most")
    parser.add_argument("--sample", action="store_true", help="draw words; --temperature, --top-k and --top-p imply it")
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest words, whatever the model's files say"
    )
    for name, (kind, metavar, doc) in _CHOICE.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=doc)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=argparse.SUPPRESS, help="end behind this text"
    )
    parser.add_argument("--seed", type=int, default=42, help="of what is drawn")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share every layer")
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="of the weights; auto: as they are saved",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes GPUs if there are any"
    )
    parser.add_argument("--json", action="store_true", help="print an object with prompt, text and number of tokens")
    parser.add_argument("--request", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # for ranks


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if hasattr(sys.stdout, "reconfigure"):  # what the terminal cannot show is a question mark, and no end of the run
        sys.stdout.reconfigure(errors="replace")
    if hasattr(args, "request") and inside_launcher():
        from .writing import write_on_ranks  # imports torch, for which `--help` does not wait

        return write_on_ranks(json.loads(args.request.read_text()))
    try:
        return _generate(args)
    except GenerateError as error:
        print(f"shardwright generate: {error}", file=sys.stderr)
        return 2


def _generate(args: argparse.Namespace) -> int:
    options = _options(args)
    if args.tp < 1:
        raise GenerateError(f"--tp {args.tp} is too small, the least is 1")
    if hasattr(args, "system") and not args.chat:
        raise GenerateError("--system is a message of a conversation; add --chat, or write it into the prompt")
    model = find_model(args.directory)
    request = _request(args, model, options)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from .writing import check, write  # imports torch, for which `--help` does not wait

    check(request, args.device)
    if args.tp == 1:
        return write(request)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        return relaunch(["generate", str(args.directory), "--request", str(file)], args.tp)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of transformers' generate."""
    given = {name: getattr(args, name) for name in _CHOICE if hasattr(args, name)}
    drawn = [name for name in _DRAWING if name in given and given[name] != 0]
    for name, least in (("top_k", 1), ("num_beams", 1), ("temperature", 0), ("repetition_penalty", 1e-3)):
        if name in given and not given[name] >= least:
            raise GenerateError(f"--{name.replace('_', '-')} {given[name]} is too small, the least is {least:g}")
    if not 0 < given.get("top_p", 1) <= 1:
        raise GenerateError(f"--top-p {given['top_p']} is a share of probability, above 0 and at most 1")
    if args.max_new_tokens < 1:
        raise GenerateError(f"--max-new-tokens {args.max_new_tokens} is too small, the least is 1")
    greedy = args.greedy or given.get("temperature") == 0
    if greedy and (args.sample or drawn):
        other = "--sample" if args.sample else "--" + drawn[0].replace("_", "-")
        which = "--greedy" if args.greedy else "--temperature 0"
        raise GenerateError(f"{which} takes the likeliest word and {other} draws one; give one of them")
    if given.get("temperature") == 0:
        del given["temperature"]
    if greedy or args.sample or drawn:
        given["do_sample"] = not greedy
    if not 0 <= args.seed < 2**32:
        raise GenerateError(f"--seed {args.seed} is none; give a whole number from 0 to {2**32 - 1}")
    if "" in getattr(args, "stop", ()):  # with which everything ends
        raise GenerateError("--stop is empty text; give the text that it ends behind, or leave --stop out")
    if hasattr(args, "stop"):
        given["stop_strings"] = args.stop
    return given | {"max_new_tokens": args.max_new_tokens}


def _request(args: argparse.Namespace, model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """Everything that ranks need to know, for JSON."""
    return {
        "model": str(model.directory),
        "adapters": None if model.adapters is None else str(model.adapters),
        "tokenizer": str(model.tokenizer),
        "prompt": _prompt(args),
        "chat": args.chat,
        "system": getattr(args, "system", None),
        "options": options,
        "seed": args.seed,
        "tp": args.tp,
        "dtype": args.dtype,
        "json": args.json,
    }


def _prompt(args: argparse.Namespace) -> str:
    if hasattr(args, "prompt"):
        try:
            args.prompt.encode()
        except UnicodeEncodeError:
            raise GenerateError("--prompt is no text in UTF-8") from None
        return str(args.prompt)
    path = getattr(args, "prompt_file", None)
    if path is None and sys.stdin.isatty():
        raise GenerateError("give a prompt: --prompt TEXT, --prompt-file FILE, or text on standard input")
    standard = path is None or str(path) == "-"
    try:
        given = _standard_input() if path is None or standard else path.read_bytes()
        return given.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise GenerateError(f"--prompt-file {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        what = "what stands on standard input" if standard else f"--prompt-file {path}"
        raise GenerateError(f"{what} is no text in UTF-8") from None


def _standard_input() -> bytes:
    """Undecoded: the locale may let python read anything as text."""
    return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
