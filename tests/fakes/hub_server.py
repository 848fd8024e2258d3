"""A small Hugging Face Hub on loopback: the requests that `huggingface_hub` makes to list and download repositories."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret_of_the_tests"


@dataclass
class FakeRepository:
    """Commits of one repository, and the branches that point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by name, by commit
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch, and return its 40 digits."""
        commit = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        return commit


class FakeHub:
    """Serves repositories by kind and name, such as "datasets/owner/name"."""

    def __init__(self) -> None:
        self.repositories: dict[str, FakeRepository] = {}
        self.requests: list[str] = []  # "METHOD path" of each
        self.status = 0  # answer of every request; 0: the real one
        self.answers: dict[str, tuple[int, bytes]] = {}  # other status and body, by the end of the path
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, key: str, files: dict[str, bytes]) -> str:
        """Add a commit to the main branch of a repository, and return it."""
        return self.repositories.setdefault(key, FakeRepository()).commit(files)

    def _answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/")
        self.requests.append(f"{handler.command} {path}")
        status, headers, data = self._find(path, handler.headers.get("Authorization", ""))
        handler.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def _find(self, path: str, authorization: str) -> tuple[int, dict[str, str], bytes]:
        if self.status:
            return self.status, {}, b"{}"
        if found := next((answer for end, answer in self.answers.items() if path.endswith(end)), None):
            digits = re.search("[0-9a-f]{40}", path)
            return found[0], {"ETag": '"0"', "X-Repo-Commit": digits[0] if digits else ""}, found[1]
        api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/")
        key = next((k for k in sorted(self.repositories, key=len, reverse=True) if f"{path}/".startswith(f"{k}/")), "")
        repository = self.repositories.get(key)
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if TOKEN not in authorization and (repository.private or repository.gated):
            return 401, {"X-Error-Code": "GatedRepo" if repository.gated else "RepoNotFound"}, b"{}"
        action, _, rest = path.removeprefix(key).strip("/").partition("/")
        if action in ("", "revision"):
            rest = rest or "main"
        revisions = sorted([*repository.refs, *repository.commits], key=len, reverse=True)
        revision = next((r for r in revisions if f"{rest}/".startswith(f"{r}/")), "")
        if not revision:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit = repository.refs.get(revision, revision)
        files, name = repository.commits[commit], rest.removeprefix(revision).strip("/")
        if api:
            return 200, {"Content-Type": "application/json"}, json.dumps(_listing(action, commit, files)).encode()
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha256(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, files[name]


def _listing(action: str, commit: str, files: dict[str, bytes]) -> object:
    if action == "tree":
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
    return {"id": "owner/name", "sha": commit, "siblings": [_file(name, data) for name, data in files.items()]}


def _file(name: str, data: bytes) -> dict[str, object]:
    """Describe a file: large ones, such as Parquet, by their SHA-256, all others by the hash of their object in Git."""
    entry: dict[str, object] = {"rfilename": name, "size": len(data)}
    if name.endswith((".parquet", ".safetensors")):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry | {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
