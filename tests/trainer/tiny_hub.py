"""A hub of this machine: enough of what huggingface_hub, transformers and datasets ask for to load by name."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = tuple[int, bytes, dict[str, str]]


class Hub(ThreadingHTTPServer):
    """Serves the directories folder/models/OWNER/NAME and folder/datasets/OWNER/NAME, each one commit.

    gated   repositories that nobody may read
    asked   what was asked for, as "GET /path"
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.gated: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, wanted: list[str], query: dict[str, list[str]]) -> Answer:
        """Status, body and headers of a path; `wanted` are the paths of a question for several."""
        words = path.strip("/").split("/")
        is_api = words[0] == "api"
        words = words[1:] if is_api else words
        kind = words.pop(0) if words and words[0] in ("models", "datasets") else "models"
        if is_api and not words:
            return self._names(kind, *(query.get(key, [""])[0] for key in ("author", "search")))
        if len(words) < 2:
            return _error(404, "")
        repository, rest = "/".join(words[:2]), words[2:]
        root = self.folder / kind / repository
        if not root.is_dir():
            return _error(401, "RepoNotFound", "Repository Not Found")
        if is_api:
            return self._api(root, kind, repository, rest, wanted)
        if len(rest) < 3 or rest[0] != "resolve":
            return _error(404, "")
        if rest[1] not in ("main", COMMIT):
            return _error(404, "RevisionNotFound", "Revision Not Found")
        if repository in self.gated:
            return _error(403, "GatedRepo", f"Access to model {repository} is restricted")
        file = root.joinpath(*rest[2:])
        if not file.is_file():
            status, body, headers = _error(404, "EntryNotFound", "Entry not found")
            return status, body, {**headers, "X-Repo-Commit": COMMIT}  # so that it is remembered that there is none
        content = file.read_bytes()
        return 200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}

    def _names(self, kind: str, author: str, search: str) -> Answer:
        names = [one.relative_to(self.folder / kind).as_posix() for one in (self.folder / kind).glob("*/*")]
        found = [one for one in names if search in one and (not author or one.startswith(f"{author}/"))]
        return _json([{"id": one, "_id": one, "private": False, "tags": [], "downloads": 0} for one in sorted(found)])

    def _api(self, root: Path, kind: str, repository: str, rest: list[str], wanted: list[str]) -> Answer:
        files = sorted(one for one in root.rglob("*") if one.is_file())
        names = [one.relative_to(root).as_posix() for one in files]
        if not rest or rest[0] == "revision":
            return _json(
                {
                    "id": repository,
                    "sha": COMMIT,
                    "private": False,
                    "gated": False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in names],
                }
            )
        if rest[0] not in ("tree", "paths-info"):
            return _error(404, "")
        under = "/".join(rest[2:])
        inside = [
            _entry(root, name)
            for name in names
            if (name in wanted if rest[0] == "paths-info" else name.startswith(f"{under}/" if under else ""))
        ]
        if under and not inside:
            return _error(404, "EntryNotFound", "Entry not found")
        folders = {parent.as_posix() for name in names for parent in Path(name).parents} - {"."}
        shown = folders & {*wanted} if rest[0] == "paths-info" else folders
        entries = [{"type": "directory", "path": one, "oid": _digest(one.encode()), "size": 0} for one in sorted(shown)]
        return _json([*entries, *inside])


def _entry(root: Path, name: str) -> dict[str, Any]:
    content = (root / name).read_bytes()
    return {"type": "file", "path": name, "oid": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(value: Any) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _error(status: int, code: str, message: str = "") -> Answer:
    body = json.dumps({"error": message}).encode()
    return status, body, {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._reply([])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            wanted = json.loads(body).get("paths", [])
        except ValueError:  # a form
            wanted = [unquote(pair.partition("=")[2]) for pair in body.decode().split("&") if pair.startswith("paths=")]
        self._reply([wanted] if isinstance(wanted, str) else wanted)

    def _reply(self, wanted: list[str]) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        asked = urlsplit(self.path)
        status, body, headers = self.server.answer(unquote(asked.path), wanted, parse_qs(asked.query))
        first, last = 0, len(body)
        if status == 200 and (part := self.headers.get("Range", "")).startswith("bytes="):
            start, _, end = part.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end) + 1 if end else last, last)
            status, headers = 206, {**headers, "Content-Range": f"bytes {first}-{last - 1}/{len(body)}"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(last - first)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[first:last])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        serving = threading.Thread(target=hub.serve_forever, daemon=True)
        serving.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            serving.join()
