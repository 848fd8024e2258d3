"""A small Hugging Face Hub on loopback: the requests that `huggingface_hub` makes to upload a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret_of_the_tests"


@dataclass
class UploadedRepository:
    """Files by branch and name."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)  # their messages


class UploadHub:
    """Receives commits. Files that end in .safetensors travel through the LFS protocol, all others in the commit."""

    def __init__(self) -> None:
        self.repositories: dict[str, UploadedRepository] = {}
        self.statuses: dict[str, int] = {}  # answers to requests whose path has this part
        self.requests: list[str] = []
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_POST = do_PUT = do_GET

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

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/")
        self.requests.append(f"{handler.command} {path}")
        body = _body(handler)
        status = next((status for part, status in self.statuses.items() if part in path), 0)
        if not status and not path.startswith("store/") and TOKEN not in handler.headers.get("Authorization", ""):
            status = 401
        answer: object = {"error": "refused"}
        if not status:
            status, answer = self._do(path, body, handler.command)
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _do(self, path: str, body: bytes, method: str) -> tuple[int, object]:
        if path.startswith("store/"):
            self._objects[path.removeprefix("store/")] = body
            return 200, {}
        if path == "api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "api/repos/create":
            return self._create(json.loads(body))
        owner, name, *rest = path.removeprefix("api/models/").split("/")
        repository = self.repositories.get(f"{owner}/{name.removesuffix('.git')}")
        if repository is None:
            return 404, {}
        match rest:
            case ["branch", branch]:
                known = branch in repository.branches
                repository.branches.setdefault(branch, dict(repository.branches["main"]))
                return (409 if known else 200), {}
            case ["preupload", _]:
                names = [file["path"] for file in json.loads(body)["files"]]
                return 200, {"files": [{"path": n, "uploadMode": _mode(n), "shouldIgnore": False} for n in names]}
            case ["info", "lfs", "objects", "batch"]:
                return 200, {"objects": [self._place(one) for one in json.loads(body)["objects"]]}
            case ["commit", branch]:
                return 200, self._commit(f"{owner}/{name}", branch, [json.loads(line) for line in body.splitlines()])
        branch = rest[1] if rest[:1] == ["revision"] else "main"
        names = sorted(repository.branches[branch])
        listed = {"id": f"{owner}/{name}", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]}
        return 200, {**listed, "private": repository.private}

    def _create(self, request: dict[str, Any]) -> tuple[int, object]:
        key = f"{request['organization']}/{request['name']}"
        url = {"url": f"{self.endpoint}/{key}"}
        if key in self.repositories:
            return 409, url
        self.repositories[key] = UploadedRepository(private=request.get("visibility") == "private")
        return 200, url

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.endpoint}/store/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href, "header": {}}}}

    def _commit(self, key: str, branch: str, lines: list[dict[str, Any]]) -> object:
        repository = self.repositories[key]
        files = repository.branches[branch]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self._objects[value["oid"]]
                    assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
                case "deletedFile":
                    del files[value["path"]]
        return {"commitUrl": f"{self.endpoint}/{key}/commit/{'0' * 40}", "commitOid": "0" * 40}


def _mode(name: str) -> str:
    return "lfs" if name.endswith(".safetensors") else "regular"


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    data = b""
    while size := int(handler.rfile.readline(), 16):
        data += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return data
