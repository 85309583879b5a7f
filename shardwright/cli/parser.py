"""The parser of all verbs."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from ..utils.errors import nearest

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says what a default is, where there is one: a switch is off, and what is not named is not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Says what a mistyped verb, choice or option is near to. Parsers of verbs are of this class, too."""

    def error(self, message: str) -> NoReturn:
        near = ""
        if choice := _CHOICE.search(message):
            near = nearest(choice[1], re.findall(r"[\w.-]+", choice[2]))
        elif option := _OPTION.search(message):
            near = nearest(option[1], re.findall(r"--[\w-]+", self.format_help()))
        super().error(message + near)
