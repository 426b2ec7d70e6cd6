"""A stand-in for the Hugging Face hub on 127.0.0.1: repositories in memory, tokens, a log.

`huggingface_hub` reads `HF_ENDPOINT` when it is imported, so its user is another process:

    with standing_in() as hub:
        run(script, **hub.environment(tmp_path))
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_stand_in"
Files = dict[str, bytes]


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)  # commits by branch
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        """Makes `files` the whole content of a branch."""
        content = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
        sha = hashlib.sha1(json.dumps([len(self.commits), content]).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        return sha


class Request(NamedTuple):
    method: str
    path: str
    token: str
    range: str

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


class HubStandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # uploaded large files, by sha256
        self.requests: list[Request] = []
        self.cut_after: int | None = None  # bytes after which the next download breaks off

    def environment(self, home: Path, token: str = "") -> dict[str, str]:
        """For a process that uses this hub, with its own cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def standing_in() -> Iterator[HubStandIn]:
    server = HubStandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RefusedError(Exception):
    """An answer with this status and this code of the hub."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def log_message(self, *given: Any) -> None:
        pass

    def _answer(self) -> None:
        url, header = urlsplit(self.path), self.headers
        self.token = header.get("Authorization", "").removeprefix("Bearer ")
        request = Request(self.command, url.path, self.token, header.get("Range", ""))
        self.server.requests.append(request)
        self.body = self.rfile.read(int(header.get("Content-Length") or 0))
        try:
            if request.writes and self.command != "PUT" and self.token != TOKEN:
                raise _RefusedError(401, "RepoNotFound")
            self._route([unquote(part) for part in url.path.strip("/").split("/")])
        except _RefusedError as error:
            status, code = error.args
            self._json({}, status, code)

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815

    def _route(self, parts: list[str]) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self._create(json.loads(self.body))
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["lfs", digest]:
                self.server.objects[digest] = self.body
                self._json({})
            case ["api", "models", user, name, *rest]:
                self._with_repository(f"{user}/{name}", rest)
            case [user, name, *rest]:
                self._with_repository(f"{user}/{name.removesuffix('.git')}", rest)
            case _:
                raise _RefusedError(404, "")

    def _create(self, given: dict[str, Any]) -> None:
        name = f"{given['organization']}/{given['name']}"
        is_new = name not in self.server.repositories
        if is_new:
            made = Repository(given.get("visibility") == "private")
            self.server.repositories[name] = made
            made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.server.url}/{name}"}, 200 if is_new else 409)

    def _with_repository(self, name: str, rest: list[str]) -> None:
        found = self.server.repositories.get(name)
        if found is None or (found.private and self.token != TOKEN):
            raise _RefusedError(401, "RepoNotFound")
        what, revision = (*rest, "", "main")[0], rest[1] if len(rest) > 1 else "main"
        sha = found.branches.get(revision, revision)
        if what in ("revision", "tree", "resolve", "commit") and sha not in found.commits:
            raise _RefusedError(404, "RevisionNotFound")
        files = found.commits.get(sha, {})
        match what:
            case "" | "revision":
                siblings = [{"rfilename": path} for path in files]
                about = {"id": name, "sha": sha, "private": found.private, "siblings": siblings}
                self._json(about)
            case "tree":
                self._json([_listed(path, data) for path, data in files.items()])
            case "resolve":
                self._file(sha, files.get("/".join(rest[2:])))
            case "branch":
                is_new = revision not in found.branches
                found.branches.setdefault(revision, found.branches["main"])
                self._json({}, 200 if is_new else 409)
            case "preupload":
                paths = [file["path"] for file in json.loads(self.body)["files"]]
                self._json({"files": [_mode(path) for path in paths]})
            case "info":  # LFS
                objects = [self._action(part) for part in json.loads(self.body)["objects"]]
                self._json({"transfer": "basic", "objects": objects})
            case "commit":
                sha = found.commit(self._changed(files), revision)
                address = f"{self.server.url}/{name}/commit/{sha}"
                self._json({"commitUrl": address, "commitOid": sha})
            case _:
                raise _RefusedError(404, "")

    def _action(self, part: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.server.url}/lfs/{part['oid']}"
        return {**part, "actions": {"upload": {"href": href}}}

    def _changed(self, files: Files) -> Files:
        files = dict(files)
        for line in self.body.splitlines():
            change = json.loads(line)
            value = change["value"]
            match change["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        return files

    def _file(self, sha: str, data: bytes | None) -> None:
        if data is None:
            raise _RefusedError(404, "EntryNotFound")
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        etag, total, data = hashlib.sha256(data).hexdigest(), len(data), data[start:]
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(data)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if self.command == "GET":
            cut, self.server.cut_after = self.server.cut_after, None
            self.wfile.write(data[:cut])
            self.close_connection = cut is not None

    def _json(self, value: Any, status: int = 200, code: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _listed(path: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    lfs = {"lfs": {"oid": digest, "size": len(data), "pointerSize": 130}}
    entry = {"type": "file", "path": path, "size": len(data), "oid": digest[:40]}
    return entry | (lfs if path.endswith(".safetensors") else {})


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}
