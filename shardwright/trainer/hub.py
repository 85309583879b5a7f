"""Names on the hub: whether it can be asked at all, and what is wrong where it does not give what has a name.

huggingface_hub decides where it is imported whether it works offline, so it is imported here late.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..utils.errors import nearest
from .recipe import Recipe

_WAIT = 5.0  # seconds for an answer to the first question; huggingface_hub would ask six times for every file
_MOST_NAMES = 300  # that are looked at for one like a name that is wrong


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Whether the environment says that the hub is not asked."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def names_on_hub(recipe: Recipe) -> Iterator[str]:
    """What a recipe names that is no directory here."""
    sources = [source for data in (recipe.data, recipe.eval_data) if data for source in (data, *(data.mix or ()))]
    given = [recipe.model, None if recipe.tokenizer == "bytes" else recipe.tokenizer, *(one.dataset for one in sources)]
    yield from (name for name in given if isinstance(name, str) and not Path(name).is_dir())


def unreachable() -> str | None:
    """Why the hub cannot be reached; None where it can, or where a proxy is asked in its place."""
    where = urlsplit(endpoint())
    if where.hostname is None or urllib.request.getproxies():
        return None
    try:
        port = where.port or (80 if where.scheme == "http" else 443)
        socket.create_connection((where.hostname, port), timeout=_WAIT).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def take_from_cache_without_hub(recipe: Recipe) -> str | None:
    """Where a recipe names something on the hub, which cannot be reached, let this process and its ranks work with what
    was fetched before; the sentence that says so. To be called before huggingface_hub is imported.
    """
    if is_offline() or next(names_on_hub(recipe), None) is None or (why := unreachable()) is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"{endpoint()} cannot be reached ({why}); what was fetched before is taken"


def why_not(error: BaseException, name: str, kind: str = "") -> str | None:
    """What is wrong with a name on the hub, where an error of any library came from asking for it; None where the error
    is about something else. `kind` is "datasets/" for those.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if Path(name).is_dir():
        return None  # what is wrong is in it
    found = list(_chain(error))
    if any(isinstance(one, GatedRepoError) for one in found):
        return (
            f"it is gated: ask for access at {endpoint()}/{kind}{name}, then `hf auth login`, or set HF_TOKEN to a "
            "token that has it"
        )
    absent = f"there is no such directory{_nearest_directory(name)}"
    if any(isinstance(one, HFValidationError) for one in found) or name.startswith((".", "/", "~")):
        return f"{absent}, and names on the hub are OWNER/NAME"
    offline = (LocalEntryNotFoundError, OfflineModeIsEnabled)
    if any(isinstance(one, offline) for one in found) or (is_offline() and _is_connection(found)):
        asked = "is not asked (HF_HUB_OFFLINE)" if is_offline() else "cannot be reached"
        near = _nearest_name(name, cached_names(kind))
        return f"{absent}, {endpoint()} {asked}, and {constants.HF_HOME} has not all of it{near}"
    # of datasets, which is not imported for it
    if any(isinstance(one, RepositoryNotFoundError) or type(one).__name__ == "DatasetNotFoundError" for one in found):
        near = _nearest_on_hub(name, kind)
        return (
            f"{absent}, and {endpoint()} has no {kind}{name} for you{near}; a private one "
            "needs `hf auth login` or HF_TOKEN"
        )
    if _is_connection(found) and not any(isinstance(one, EntryNotFoundError) for one in found):
        return f"{absent}, and {endpoint()} cannot be reached; try again, or name a directory"
    return None


def cached_names(kind: str = "") -> list[str]:
    """Names of the hub of which something was fetched before."""
    from huggingface_hub import constants

    prefix = f"{kind.strip('/') or 'models'}--"
    try:
        found = [one.name for one in Path(constants.HF_HUB_CACHE).iterdir()]
    except OSError:
        return []
    return [one.removeprefix(prefix).replace("--", "/") for one in found if one.startswith(prefix)]


def _nearest_on_hub(name: str, kind: str) -> str:
    """` - did you mean 'x'?`, of the names of the same owner, or of those that the hub finds like it."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())
    ask = api.list_datasets if kind else api.list_models
    owner, _, last = name.rpartition("/")
    stem = re.split(r"[-_.]", last)[0]
    known = cached_names(kind)
    for question in ({"author": owner, "search": stem}, {"author": owner}) if owner else ():
        known += _asked(ask, question)
    near = _nearest_name(name, known)
    return near or _nearest_name(name, _asked(ask, {"search": last}))


def _asked(ask: Callable[..., Iterable[Any]], question: dict[str, str]) -> list[str]:
    try:
        return [one.id for one in ask(**question, sort="downloads", limit=_MOST_NAMES)]
    except Exception:  # of many kinds; without an answer there is no hint
        return []


def _nearest_name(name: str, known: Iterable[str]) -> str:
    """Of names with the same owner that whose last part is nearest, else the nearest whole name."""
    owner, _, last = name.lower().rpartition("/")
    whole = {one.lower(): one for one in known if one.lower() != name.lower()}
    beside = {one.rpartition("/")[2]: one for one in whole if one.rpartition("/")[0] == owner}
    found = [beside[one] for one in difflib.get_close_matches(last, beside, 1, 0.6)]
    found = found or difflib.get_close_matches(name.lower(), whole, 1, 0.8)
    return f" - did you mean {whole[found[0]]!r}?" if found else ""


def _is_connection(found: list[BaseException]) -> bool:
    # the client's own errors are known by name: which client that is has changed
    return any(
        isinstance(one, ConnectionError | TimeoutError)
        or "TransportError" in (kind.__name__ for kind in type(one).mro())
        for one in found
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _nearest_directory(name: str) -> str:
    path = Path(name).expanduser()
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return ""
    return nearest(path.name, beside)
