"""`shardwright completion SHELL`: a script with which the shell completes verbs, options and their choices.

It is made of the parser itself, so what it knows is what there is.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

HELP = "print a script that lets bash, zsh or fish complete this command"

_HOW = """where it goes:
  bash   shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright
  zsh    shardwright completion zsh > ~/.shardwright.zsh, and in ~/.zshrc: source ~/.shardwright.zsh
  fish   shardwright completion fish > ~/.config/fish/completions/shardwright.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HOW
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    verbs = dict(_verbs(args.whole, ()))
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](verbs), end="")
    return 0


def _verbs(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every parser with the words that lead to it."""
    yield path, parser
    for name, inner in _below(parser).items():
        yield from _verbs(inner, (*path, name))


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those that are shown."""
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """What can stand where a word begins."""
    plain = [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]
    return [*plain, *(text for action in _options(parser) for text in action.option_strings)]


def _bash(verbs: dict[tuple[str, ...], argparse.ArgumentParser]) -> str:
    paths = "|".join(shlex.quote(" ".join(path)) for path in verbs if path)
    after = [
        f"        {shlex.quote(' '.join([*path, text]))}) words={shlex.quote(' '.join(map(str, action.choices)))} ;;"
        for path, parser in verbs.items()
        for action in _options(parser)
        for text in action.option_strings
        if action.choices
    ]
    known = [
        f"        {shlex.quote(' '.join(path))}) words={shlex.quote(' '.join(_words(parser)))} ;;"
        for path, parser in verbs.items()
    ]
    return "\n".join(
        [
            "_shardwright() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" verb="" longer words at',
            "    for ((at = 1; at < COMP_CWORD; at++)); do",
            '        longer="${verb:+$verb }${COMP_WORDS[at]}"',
            f'        case "$longer" in {paths}) verb="$longer" ;; esac',
            "    done",
            '    case "${verb:+$verb }${COMP_WORDS[COMP_CWORD - 1]}" in',
            *after,
            '        *) case "$verb" in',
            *known,
            "        esac ;;",
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _shardwright shardwright",
            "",
        ]
    )


def _zsh(verbs: dict[tuple[str, ...], argparse.ArgumentParser]) -> str:
    """zsh runs bash's."""
    needed = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
    return needed + _bash(verbs)


def _fish(verbs: dict[tuple[str, ...], argparse.ArgumentParser]) -> str:
    lines = []
    for path, parser in verbs.items():
        below = _below(parser)
        tests = [f"__fish_seen_subcommand_from {word}" for word in path]
        tests += [f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else []
        when = f"complete -c shardwright -n {shlex.quote('; and '.join(tests))}"
        lines += [f"{when} -f -a {name} -d {shlex.quote(inner.description or name)}" for name, inner in below.items()]
        for action in parser._actions:
            if not action.option_strings and action.choices and not below:
                lines.append(f"{when} -f -a {shlex.quote(' '.join(map(str, action.choices)))}")
        for action in _options(parser):
            names = [f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" for text in action.option_strings]
            value = "" if action.nargs == 0 else " -r"
            value = f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else value
            doc = shlex.quote((action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%"))
            lines.append(f"{when} {' '.join(names)}{value} -d {doc}")
    return "\n".join(lines) + "\n"
