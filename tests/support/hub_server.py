"""A small Hub on this machine, for the real client: what the routes below do is what the tests rely on.

Repositories keep every commit as a mapping of names to blobs. Large files go through the LFS routes: in one PUT, or in
parts when they are larger than `part_size`. `requests` lists what was asked; `refuse` may answer a request with an
error instead, to play an upload that stops.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "a" * 34
LARGE = (".safetensors", ".bin", ".png", ".gz")


@dataclass(frozen=True)
class Blob:
    """A stored file."""

    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """sha256 of a large file, git's sha1 of another."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repository:
    """Commits, oldest first, and who may see them."""

    private: bool
    commits: list[tuple[str, dict[str, Blob]]] = field(default_factory=list)

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1][1]

    def commit(self, files: dict[str, Blob]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits.append((sha, files))
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, Blob]] | None:
        if revision == "main":
            return self.commits[-1]
        return next(((sha, files) for sha, files in self.commits if sha == revision), None)


class HubServer(ThreadingHTTPServer):
    """The state of the Hub, and the address of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.tokens = {"hf_" + "a" * 34: "alice"}
        self.requests: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], int | None] = lambda method, path: None
        self.part_size = 2**20
        self.lock = threading.RLock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that was killed is part of a test."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, method: str, pattern: str) -> int:
        """How often a path that the pattern finds was asked for."""
        return sum(m == method and re.search(pattern, path) is not None for m, path in self.requests)

    def text(self, repo_id: str, name: str) -> str:
        return self.repositories[repo_id].files[name].data.decode()


@contextlib.contextmanager
def running() -> Iterator[HubServer]:
    """A server for the time of the block."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def for_the_client(monkeypatch: Any, folder: Path) -> Iterator[HubServer]:
    """A server that huggingface_hub asks in this process, with `TOKEN`; what it stores goes below `folder`."""
    from huggingface_hub import constants

    with running() as server:
        settings = {
            "ENDPOINT": server.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_TOKEN_PATH": str(folder / "no-token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


class _Answer(Exception):  # noqa: N818  it ends a request
    """What is sent back."""

    def __init__(self, status: int, content: Any = None, **headers: str) -> None:
        super().__init__(status)
        self.status, self.content, self.headers = status, content, headers


def _missing(kind: str) -> _Answer:
    return _Answer(404, {"error": f"{kind} not found"}, **{"X-Error-Code": kind})


_REPO = r"(?P<repo>[^/]+/[^/]+)"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def _serve(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        self.query = parse_qs(urlsplit(self.path).query)
        with self.server.lock:
            self.server.requests.append((self.command, path))
            try:
                status = self.server.refuse(self.command, path)
                if status is not None:
                    raise _Answer(status, {"error": "refused"})
                self._route(path, body)
            except _Answer as answer:
                self._send(answer)

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815

    def _route(self, path: str, body: bytes) -> None:
        routes = {
            ("GET", r"/api/whoami-v2"): self._whoami,
            ("POST", r"/api/repos/create"): self._create,
            ("POST", r"/api/validate-yaml"): self._validate,
            ("GET", rf"/api/models/{_REPO}"): self._info,
            ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)"): self._info,
            ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<name>.*))?"): self._tree,
            ("POST", rf"/api/models/{_REPO}/paths-info/(?P<revision>[^/]+)"): self._paths_info,
            ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)"): self._preupload,
            ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)"): self._commit,
            ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch"): self._batch,
            ("PUT", r"/large/(?P<oid>\w+)"): self._put,
            ("PUT", r"/large/(?P<oid>\w+)/(?P<part>\d+)"): self._put,
            ("POST", r"/large/(?P<oid>\w+)/complete"): self._complete,
            ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)"): self._resolve,
            ("HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)"): self._resolve,
        }
        for (method, pattern), handle in routes.items():
            match = re.fullmatch(pattern, path) if method == self.command else None
            if match:
                handle(body=body, **{key: value for key, value in match.groupdict().items() if value is not None})
        raise _Answer(404, {"error": f"no route for {self.command} {path}"})

    def _whoami(self, body: bytes) -> None:
        raise _Answer(200, {"type": "user", "name": self._user(), "orgs": []})

    def _create(self, body: bytes) -> None:
        asked, user = json.loads(body), self._user()
        owner = asked.get("organization") or user
        if owner != user:
            raise _Answer(403, {"error": "no right to write there"})
        repo = f"{owner}/{asked['name']}"
        if repo in self.server.repositories:
            raise _Answer(409, {"error": "exists"})
        private = asked.get("private", asked.get("visibility") == "private")
        self.server.repositories[repo] = Repository(bool(private))
        self.server.repositories[repo].commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", lfs=False)})
        raise _Answer(200, {"url": f"{self.server.address}/{repo}", "name": repo})

    def _validate(self, body: bytes) -> None:
        if not json.loads(body)["content"].startswith("---\n"):
            raise _Answer(200, {"warnings": [{"message": "empty or missing yaml metadata"}], "errors": []})
        raise _Answer(200, {"warnings": [], "errors": []})

    def _info(self, body: bytes, repo: str, revision: str = "main") -> None:
        sha, files = self._at(repo, revision)
        siblings = [{"rfilename": name} for name in sorted(files)]
        private = self.server.repositories[repo].private
        raise _Answer(200, {"id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": siblings})

    def _tree(self, body: bytes, repo: str, revision: str, name: str = "") -> None:
        _, files = self._at(repo, revision)
        found = [_entry(path, blob) for path, blob in sorted(files.items()) if path.startswith(name)]
        raise _Answer(200, found) if found else _missing("EntryNotFound")

    def _paths_info(self, body: bytes, repo: str, revision: str) -> None:
        _, files = self._at(repo, revision)
        asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
        raise _Answer(200, [_entry(name, files[name]) for name in asked if name in files])

    def _preupload(self, body: bytes, repo: str, revision: str) -> None:
        self._writable(repo)
        _, files = self._at(repo, revision)
        found = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            mode = "lfs" if name.endswith(LARGE) or file["size"] > 10**7 else "regular"
            known = files[name].oid if name in files else None
            found.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        raise _Answer(200, {"files": found})

    def _batch(self, body: bytes, repo: str) -> None:
        self._writable(repo)
        objects = [self._instructions(asked["oid"], asked["size"]) for asked in json.loads(body)["objects"]]
        raise _Answer(200, {"transfer": "basic", "objects": objects})

    def _instructions(self, oid: str, size: int) -> dict[str, Any]:
        if oid in self.server.large:
            return {"oid": oid, "size": size}
        address = f"{self.server.address}/large/{oid}"
        upload: dict[str, Any] = {"href": address}
        if size > self.server.part_size:
            count = -(-size // self.server.part_size)
            header = {str(number): f"{address}/{number}" for number in range(1, count + 1)}
            upload = {"href": f"{address}/complete", "header": {"chunk_size": str(self.server.part_size), **header}}
        return {"oid": oid, "size": size, "actions": {"upload": upload}}

    def _put(self, body: bytes, oid: str, part: str | None = None) -> None:
        if part is None:
            self._store(oid, body)
        else:
            self.server.parts[oid, int(part)] = body
        raise _Answer(200, {}, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _complete(self, body: bytes, oid: str) -> None:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        self._store(oid, b"".join(self.server.parts.pop((oid, number)) for number in numbers))
        raise _Answer(200, {})

    def _store(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise _Answer(400, {"error": "the content is not what was announced"})
        self.server.large[oid] = data

    def _commit(self, body: bytes, repo: str, revision: str) -> None:
        self._writable(repo)
        sha, files = self._at(repo, revision)
        files = dict(files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit", sha) != sha:
                raise _Answer(412, {"error": "the branch has moved"})
            if item["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.server.large:
                    raise _Answer(400, {"error": f"{value['path']} was never uploaded"})
                files[value["path"]] = Blob(self.server.large[value["oid"]], lfs=True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.server.repositories[repo].commit(files)
        raise _Answer(
            200, {"success": True, "commitOid": commit, "commitUrl": f"{self.server.address}/{repo}/commit/{commit}"}
        )

    def _resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        sha, files = self._at(repo, revision)
        if name not in files:
            raise _Answer(404, None, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        blob = files[name]
        headers = {"ETag": f'"{blob.oid}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if blob.lfs:
            headers |= {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.data))}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            raise _Answer(200, blob.data, **headers)
        first, last = int(span[1]), int(span[2] or len(blob.data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(blob.data)}"
        raise _Answer(206, blob.data[first : last + 1], **headers)

    def _at(self, repo: str, revision: str) -> tuple[str, dict[str, Blob]]:
        found = self.server.repositories.get(repo)
        if found is None or (found.private and self._user(required=False) != repo.split("/")[0]):
            raise _missing("RepoNotFound")
        commit = found.at(revision)
        if commit is None:
            raise _missing("RevisionNotFound")
        return commit

    def _writable(self, repo: str) -> None:
        if self._user() != repo.split("/")[0]:
            raise _Answer(403, {"error": "no right to write there"})

    def _user(self, *, required: bool = True) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        user = self.server.tokens.get(token)
        if (user is None and required) or (token and user is None):
            message = "Invalid credentials in Authorization header"
            raise _Answer(401, {"error": message}, **{"X-Error-Message": message})
        return user

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, answer: _Answer) -> None:
        data = answer.content if isinstance(answer.content, bytes) else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/octet-stream" if data is answer.content else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at `requests`."""


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(blob.data), "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.oid, "size": len(blob.data), "pointerSize": 130}
    return entry
