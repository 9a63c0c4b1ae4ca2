"""
A Hub on loopback: model repos in memory behind the HTTP that `huggingface_hub` speaks, for `HF_ENDPOINT`.

It knows one user, whose token is `TOKEN`, one branch, and commits by their id. All files come inline with the commit,
as small files do on the Hub. What it is asked and does not know is kept in `HubServer.unknown`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


USER, TOKEN = "tester", "hf_loopback"


@dataclass
class Commit:
    """A commit, with all files as they are after it."""

    oid: str
    message: str
    files: dict[str, bytes]


class HubError(Exception):
    """An answer that is no success; the client tells its kinds by the code in its header."""

    def __init__(self, status: int, code: str, headers: dict[str, str] | None = None, **content):
        super().__init__(code)
        self.status, self.content = status, {"error": code, **content}
        self.headers = {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}


def blob_id(content: bytes) -> str:
    """A file's id in git, by which the client sees that it has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_ignored(path: str, gitignore: str) -> bool:
    """For the plain patterns of a `.gitignore`: `folder/`, and names with wildcards."""
    patterns = [line for line in gitignore.splitlines() if line and not line.startswith("#")]
    *folders, name = path.split("/")
    return any(
        any(fnmatch(folder, pattern[:-1]) for folder in folders) if pattern.endswith("/") else fnmatch(name, pattern)
        for pattern in patterns
    )


class HubServer:
    """
    Use as a context manager.

    Attributes:
        endpoint (`str`): what `HF_ENDPOINT` must be.
        repos (`dict[str, list[Commit]]`): commits of each repo, from the first, empty one on.
        unknown (`list[str]`): requests that no route answers.
    """

    def __init__(self):
        self.repos: dict[str, list[Commit]] = {}
        self.unknown: list[str] = []
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.http.shutdown()
        self.http.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        return self.repos[repo][-1].files

    def find(self, repo: str, revision: str) -> Commit:
        if repo not in self.repos:
            raise HubError(404, "RepoNotFound")
        if revision == "main":
            return self.repos[repo][-1]
        for commit in self.repos[repo]:
            if commit.oid == revision:
                return commit
        raise HubError(404, "RevisionNotFound")

    def commit(self, repo: str, message: str, files: dict[str, bytes]) -> Commit:
        oid = hashlib.sha1(f"{repo} {len(self.repos[repo])}".encode()).hexdigest()
        self.repos[repo].append(Commit(oid, message, files))
        return self.repos[repo][-1]

    # Routes: each takes the repo and what else its pattern names, the query, and the body

    def whoami(self, query, body):
        return {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"type": "access_token"}}

    def create(self, query, body):
        request = json.loads(body)
        repo = f"{request.get('organization') or USER}/{request['name']}"
        if repo in self.repos:
            raise HubError(409, "RepoAlreadyExists", url=f"{self.endpoint}/{repo}")
        self.repos[repo] = []
        self.commit(repo, "initial commit", {})
        return {"url": f"{self.endpoint}/{repo}", "name": repo, "id": repo}

    def validate_yaml(self, query, body):
        _, header, _ = json.loads(body)["content"].split("---\n", 2)
        data = yaml.safe_load(header)
        fine = isinstance(data, dict) and all(isinstance(tag, str) for tag in data.get("tags", []))
        return {"errors": [] if fine else [{"message": "tags must be strings"}], "warnings": []}

    def preupload(self, query, body, repo, revision):
        request, files = json.loads(body), self.find(repo, revision).files
        gitignore = request.get("gitIgnore", files.get(".gitignore", b"").decode())
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "regular",
                    "shouldIgnore": is_ignored(file["path"], gitignore),
                    "oid": blob_id(files[file["path"]]) if file["path"] in files else None,
                }
                for file in request["files"]
            ]
        }

    def receive_commit(self, query, body, repo, revision):
        files, message = dict(self.find(repo, revision).files), ""
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise HubError(400, f"Unsupported{key}")
        oid = self.commit(repo, message, files).oid
        return {"success": True, "commitUrl": f"{self.endpoint}/{repo}/commit/{oid}", "commitOid": oid}

    def info(self, query, body, repo, revision="main"):
        commit = self.find(repo, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return {"id": repo, "modelId": repo, "sha": commit.oid, "private": False, "tags": [], "siblings": siblings}

    def tree(self, query, body, repo, revision, folder=""):
        files = self.find(repo, revision).files
        prefix = f"{folder}/" if folder else ""
        below = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not below:
            raise HubError(404, "EntryNotFound")
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries, folders = [], set()
        for path, content in below.items():
            *parents, _ = path[len(prefix) :].split("/")
            folders |= {prefix + "/".join(parents[: depth + 1]) for depth in range(len(parents) if recursive else 1)}
            if recursive or not parents:
                entries.append({"type": "file", "path": path, "size": len(content), "oid": blob_id(content)})
        folders -= {prefix}
        return entries + [{"type": "directory", "path": path, "oid": blob_id(path.encode())} for path in folders]

    def resolve(self, query, body, repo, revision, path):
        commit = self.find(repo, revision)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise HubError(404, "EntryNotFound", headers)
        return commit.files[path], headers | {"ETag": f'"{blob_id(commit.files[path])}"'}


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", HubServer.whoami),
    ("POST", r"/api/repos/create", HubServer.create),
    ("POST", r"/api/validate-yaml", HubServer.validate_yaml),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", HubServer.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", HubServer.receive_commit),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", HubServer.tree),
    ("GET", rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?", HubServer.info),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", HubServer.resolve),
    ("HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", HubServer.resolve),
]


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.hub.lock:
                status, found, headers = 200, *self.find(body)
        except HubError as error:
            status, found, headers = error.status, error.content, error.headers
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = answer

    def find(self, body: bytes):
        url = urlsplit(self.path)
        for method, pattern, route in ROUTES:
            match = re.fullmatch(pattern, unquote(url.path))
            if match is None or method != self.command:
                continue
            if method == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise HubError(401, "Unauthorized")
            named = {name: value for name, value in match.groupdict().items() if value is not None}
            found = route(self.hub, parse_qs(url.query), body, **named)
            return found if isinstance(found, tuple) else (found, {})
        self.hub.unknown.append(f"{self.command} {self.path}")
        raise HubError(404, "NotFound")

    def log_message(self, *args) -> None:
        pass
