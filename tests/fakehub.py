"""A stand-in Hugging Face Hub on this machine, standard library only, without Xet.

Clients find it by HF_ENDPOINT, which must be set before huggingface_hub is imported. The token `hf_fake_<user>` logs
in as that user; any other, or none, is anonymous. Only its owner sees a private repository, or the files of a gated
one. `requests` lists what was asked, never a token. A repository is filled with `add`, not by uploads.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".parquet")  # served as the Hub serves LFS files
WHEN = "2026-01-01T00:00:00.000Z"


class Refusal(Exception):
    """An answer with an HTTP status and one of the Hub's error codes."""

    def __init__(self, status, message, code=""):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code}


@dataclass
class Repo:
    """One repository: every commit holds all its files."""

    kind: str  # "models" or "datasets"
    name: str
    private: bool = False
    gated: bool | str = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files, branch="main"):
        """Add files on top of a branch, and return the commit."""
        kept = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        commit = hashlib.sha1(repr((self.name, len(self.commits), sorted(kept))).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = kept, commit
        return commit

    @property
    def owner(self):
        return self.name.split("/")[0]


class FakeHub:
    """The server and what it holds."""

    def __init__(self):
        self.repos, self.requests, self.faults = {}, [], []
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, name, files, kind="models", branch="main", **traits):
        """Commit files (a dict, or a folder's) to a repository, made if it is new, and return the commit."""
        if not isinstance(files, dict):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        repo = self.repos.setdefault((kind, name), Repo(kind, name, **traits))
        return repo.commit(files, branch)

    def fail_next(self, path_part, status, times=1):
        """Answer the next requests for a path with an HTTP status."""
        self.faults += [(path_part, status)] * times

    def clear(self):
        """Forget everything."""
        for content in (self.repos, self.requests, self.faults):
            content.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments):
        """Say nothing."""

    def answer(self):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {self.path}")
        try:
            for fault in [fault for fault in self.hub.faults if fault[0] in url.path][:1]:
                self.hub.faults.remove(fault)
                raise Refusal(fault[1], "injected fault")
            self.route(url.path)
        except Refusal as refusal:
            self.reply({"error": str(refusal)}, refusal.status, refusal.headers)

    do_GET = do_HEAD = do_POST = answer

    def reply(self, content, status=200, headers=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def route(self, path):
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = found.groups()
            return self.file(self.repo("datasets" if kind else "models", name), unquote(revision), unquote(file))
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/auth-check", path):
            self.check_gate(self.repo(*found.groups()))
            return self.reply({})
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            kind, name, revision = found.groups()
            return self.info(self.repo(kind, name), unquote(revision or "main"))
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(tree|paths-info)/([^/]+)(?:/(.*))?", path):
            kind, name, what, revision, folder = found.groups()
            return getattr(self, what.replace("-", "_"))(
                self.repo(kind, name), unquote(revision), unquote(folder or "")
            )
        raise Refusal(404, f"no route for {self.command} {path}", "RepoNotFound")

    def user(self):
        found = re.fullmatch(r"Bearer hf_fake_(\w+)", self.headers.get("Authorization", ""))
        return found and found[1]

    def repo(self, kind, name):
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and self.user() != repo.owner):
            raise Refusal(404 if self.user() else 401, "Repository not found", "RepoNotFound")
        return repo

    def commit(self, repo, revision):
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def info(self, repo, revision):
        commit, files = self.commit(repo, revision)
        card = re.match(r"---\n(.*?)\n---", files.get("README.md", b"").decode(), re.DOTALL)
        lines = [line.split(": ", 1) for line in card[1].splitlines()] if card else []
        self.reply(
            {
                "id": repo.name,
                "author": repo.owner,
                "sha": commit,
                "private": repo.private,
                "gated": repo.gated,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "createdAt": WHEN,
                "lastModified": WHEN,
                "cardData": dict(lines),
                "siblings": [
                    {"rfilename": path, "size": len(data), "blobId": etag(path, data)} for path, data in files.items()
                ],
            }
        )

    def tree(self, repo, revision, folder):
        files = self.commit(repo, revision)[1]
        if folder:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        self.reply([entry(path, data) for path, data in files.items()])

    def paths_info(self, repo, revision, folder):
        files = self.commit(repo, revision)[1]
        typed = self.headers.get("Content-Type", "").startswith("application/json")
        paths = json.loads(self.posted)["paths"] if typed else parse_qs(self.posted.decode()).get("paths", [])
        self.reply([entry(path, files[path]) for path in paths if path in files])

    def check_gate(self, repo):
        if repo.gated and self.user() != repo.owner:
            raise Refusal(403 if self.user() else 401, f"Access to {repo.name} is restricted", "GatedRepo")

    def file(self, repo, revision, path):
        self.check_gate(repo)
        commit, files = self.commit(repo, revision)
        if path not in files:
            raise Refusal(404, f"Entry not found: {path}", "EntryNotFound")
        data = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(path, data)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or not data:
            return self.reply(data, 200, headers)
        begin, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        return self.reply(data[begin : end + 1], 206, headers)


def etag(path, data):
    """Name a file's content as git does, or as LFS does where it is large."""
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path, data):
    """Describe a file of a tree."""
    found = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if path.endswith(LARGE):
        found["lfs"] = {"oid": etag(path, data), "size": len(data), "pointerSize": 134}
    return found
