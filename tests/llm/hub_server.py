"""A Hugging Face Hub on 127.0.0.1, as far as `snapshot_download` talks to one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
TOKEN = "hf_secret"
WRONG_TOKEN = "Invalid credentials in Authorization header"  # the Hub's words


@dataclass
class Repo:
    """Revisions ("main", a tag, ...) and their files."""

    revisions: Mapping[str, Files]
    gated: bool = False  # the listing is public, the files are not
    private: bool = False  # without the token it does not exist

    def commits(self) -> dict[str, Files]:
        return {commit_of(files): files for files in self.revisions.values()}


def commit_of(files: Files) -> str:
    """40 hex digits."""
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()


@dataclass
class Hub:
    """The server's address, what it serves, and what it was asked."""

    repos: dict[str, Repo]
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path
    tokens: set[str] = field(default_factory=set)  # values of the Authorization header

    def downloads(self, repo: str) -> list[str]:
        """The repository's files that were sent, sorted."""
        gets = [path for method, path in self.requests if method == "GET"]
        places = (f"/{repo}/resolve/", f"/cdn/{repo}/")
        return sorted(
            path.removeprefix(place).partition("/")[2]
            for path in gets
            for place in places
            if path.startswith(place)
        )


@contextmanager
def serve(repos: dict[str, Repo]) -> Iterator[Hub]:
    hub = Hub(repos)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Refused(Exception):
    """`code` and `message` are what the Hub puts into X-Error-Code and X-Error-Message."""

    def __init__(self, status: HTTPStatus, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the tests' standard error."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if "Authorization" in self.headers:
            self.hub.tokens.add(self.headers["Authorization"])
        try:
            if "Authorization" in self.headers and not self._known():
                raise _Refused(HTTPStatus.UNAUTHORIZED, "", WRONG_TOKEN)
            self._route(path)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, b"{}", headers)

    def _route(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            repo = self._repo(name)
            if rest[:1] == ["tree"]:
                return self._json(self._tree(_at(repo, rest[1])))
            return self._json(self._info(name, repo, "/".join(rest[1:]) or "main"))
        if parts[0] == "cdn":  # signed addresses: no token needed
            return self._file(_at(self.hub.repos["/".join(parts[1:3])], parts[3]), parts[3:])
        name, rest = "/".join(parts[:2]), parts[2:]
        repo = self._repo(name)
        if repo.gated and not self._known():
            raise _Refused(HTTPStatus.UNAUTHORIZED, "GatedRepo")
        if rest[:1] != ["resolve"]:
            raise _Refused(HTTPStatus.NOT_FOUND, "RepoNotFound")
        return self._resolve(name, _at(repo, rest[1]), rest[1:])

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._known()):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "RepoNotFound")  # as the Hub does
        return repo

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _info(self, name: str, repo: Repo, revision: str) -> dict[str, object]:
        files = _at(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "sha": commit_of(files), "siblings": siblings, "private": repo.private}

    def _tree(self, files: Files) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
            for path, data in files.items()
        ]

    def _resolve(self, name: str, files: Files, rest: list[str]) -> None:
        """Small files at once; weights, which lie elsewhere, by a redirect."""
        path = "/".join(rest[1:])
        if path not in files:
            raise _Refused(HTTPStatus.NOT_FOUND, "EntryNotFound")
        if not path.endswith(".safetensors"):
            return self._file(files, rest)
        headers = {
            "X-Repo-Commit": commit_of(files),
            "X-Linked-Etag": f'"{_etag(files[path])}"',
            "X-Linked-Size": str(len(files[path])),
            "Location": f"{self.hub.url}/cdn/{name}/{'/'.join(rest)}",
        }
        self._send(HTTPStatus.FOUND, b"", headers)

    def _file(self, files: Files, rest: list[str]) -> None:
        data = files.get("/".join(rest[1:]))
        if data is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "EntryNotFound")
        headers = {"X-Repo-Commit": commit_of(files), "ETag": f'"{_etag(data)}"'}
        self._send(HTTPStatus.OK, data, headers)

    def _json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _at(repo: Repo, revision: str) -> Files:
    files = {**repo.commits(), **repo.revisions}.get(revision)
    if files is None:
        raise _Refused(HTTPStatus.NOT_FOUND, "RevisionNotFound")
    return files


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
