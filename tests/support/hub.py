"""A stand-in Hugging Face Hub on this machine, standard library only, without Xet.

Clients find it by HF_ENDPOINT, which must be set before huggingface_hub is imported. The token `hf_fake_<user>` logs
in as that user, `hf_read_<user>` too, to read only; any other, or none, is anonymous. Only its owner, or a member of
the organisation that owns it, sees a private repository, or the files of a gated one. `requests` lists what was asked,
never a token. A repository is filled with `add`, or by uploads (hub_writing.py). Jobs and buckets
are in hub_jobs.py.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.hub_jobs import Jobs, JobsOfHub
from tests.support.hub_writing import Refusal, Writing

LARGE = (".safetensors", ".bin", ".parquet", ".png")  # served as the Hub serves LFS files
WHEN = "2026-01-01T00:00:00.000Z"


@dataclass
class Repo:
    """One repository: every commit holds all its files."""

    kind: str  # "models", "datasets" or "spaces"
    name: str
    private: bool = False
    gated: bool | str = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files, branch="main"):
        """Add files on top of a branch, and return the commit."""
        return self.replace({**self.commits.get(self.branches.get(branch, ""), {}), **files}, branch)

    def replace(self, kept, branch="main"):
        """Make these all the files of a branch, and return the commit."""
        commit = hashlib.sha1(repr((self.name, len(self.commits), sorted(kept))).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = kept, commit
        return commit

    @property
    def owner(self):
        return self.name.split("/")[0]


class FakeHub(JobsOfHub):
    """The server and what it holds."""

    def __init__(self):
        self.repos, self.requests, self.faults = {}, [], []
        self.objects = {}  # large files that were sent, by sha256
        self.organisations = {}  # user -> {organisation: role}
        self.released = threading.Event()  # lets go on what `fail_next(…, "hold")` holds
        self.yaml_errors = []  # that it finds in cards
        self.clear_jobs()
        self.spoiled = {}  # path -> what it holds instead of what is committed there
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

    def fail_next(self, part, status, times=1, *, skip=0, done=False, **headers):
        """Answer requests whose method and path hold a part with a status; `skip` some first; `done`: but obey."""
        self.faults += [(part, None, False, {})] * skip + [(part, status, done, headers)] * times

    def clear(self):
        """Forget everything."""
        self.released.clear()
        self.clear_jobs()
        for content in (
            self.repos,
            self.requests,
            self.faults,
            self.objects,
            self.organisations,
            self.yaml_errors,
            self.spoiled,
        ):
            content.clear()


class Handler(Writing, Jobs, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments):
        """Log nothing."""

    def answer(self):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        options = f"{self.command} {self.path}"
        self.hub.requests.append(options)
        self.muted = False
        try:
            for fault in [fault for fault in self.hub.faults if fault[0] in options][:1]:
                self.hub.faults.remove(fault)
                _, status, self.muted, headers = fault
                if status == "hold":
                    self.hub.released.wait(120)
                    status = None
                if self.muted:
                    self.route(url.path)
                    self.muted = False
                if status == 0:  # the connection breaks
                    self.close_connection = True
                    return
                if status is not None:
                    raise Refusal(status, "injected fault", **headers)
            self.route(url.path)
        except Refusal as refusal:
            self.muted = False
            said = {"error": str(refusal)} if refusal.status < 500 else b"<html>Service unavailable</html>"
            self.reply(said, refusal.status, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def reply(self, content, status=200, headers=None):
        if self.muted:
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def route(self, path):
        if self.serve_jobs(path):
            return None
        if self.command in ("POST", "PUT", "DELETE") and self.write(path):
            return None
        if result := re.fullmatch(r"/((?:datasets|spaces)(?=/))?/?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = result.groups()
            return self.file(self.repo(kind or "models", name), unquote(revision), unquote(file))
        if path == "/api/models":
            return self.reply([{"id": name} for name in self.found()])
        if path == "/api/whoami-v2":
            return self.whoami()
        if result := re.fullmatch(r"/api/(models|spaces|datasets)/([^/]+/[^/]+)/auth-check/write", path):
            self.check_write(self.repo(*result.groups()).owner)
            return self.reply({})
        if result := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/auth-check", path):
            self.check_gate(self.repo(*result.groups()))
            return self.reply({})
        if result := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            kind, name, revision = result.groups()
            return self.info(self.repo(kind, name), unquote(revision or "main"))
        pattern = r"/api/(models|datasets|spaces)/([^/]+/[^/]+)/(tree|paths-info)/([^/]+)(?:/(.*))?"
        if result := re.fullmatch(pattern, path):
            kind, name, what, revision, folder = result.groups()
            return getattr(self, what.replace("-", "_"))(
                self.repo(kind, name), unquote(revision), unquote(folder or "")
            )
        raise Refusal(404, f"no route for {self.command} {path}", "RepoNotFound")

    def user(self):
        result = re.fullmatch(r"Bearer hf_(?:fake|read)_(\w+)", self.headers.get("Authorization", ""))
        return result and result[1]

    def belongs(self, owner):
        return self.user() == owner or owner in self.hub.organisations.get(self.user(), {})

    def found(self):
        """Name the public models that a search finds."""
        part = self.query.get("search", "").lower()
        names = [name for (kind, name), repo in self.hub.repos.items() if kind == "models" and not repo.private]
        return [name for name in names if part in name.lower()][: int(self.query.get("limit", 100))]

    def repo(self, kind, name):
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and not self.belongs(repo.owner)):
            raise Refusal(404 if self.user() else 401, "Repository not found", "RepoNotFound")
        return repo

    def commit_of(self, repo, revision):
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def info(self, repo, revision):
        commit, files = self.commit_of(repo, revision)
        card = re.match(r"---\n(.*?)\n---", files.get("README.md", b"").decode(), re.DOTALL)
        lines = re.findall(r"^(\w+): (.+)$", card[1], re.MULTILINE) if card else []
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
                    {"rfilename": path, "size": len(data), "blobId": git_oid(path, data), **lfs(path, data)}
                    for path, data in files.items()
                ],
            }
        )

    def tree(self, repo, revision, folder):
        files = self.commit_of(repo, revision)[1]
        if folder:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        self.reply([entry(path, data) for path, data in files.items()])

    def paths_info(self, repo, revision, folder):
        files = self.commit_of(repo, revision)[1]
        typed = self.headers.get("Content-Type", "").startswith("application/json")
        paths = json.loads(self.posted)["paths"] if typed else parse_qs(self.posted.decode()).get("paths", [])
        self.reply([entry(path, files[path]) for path in paths if path in files])

    def check_gate(self, repo):
        if repo.gated and not self.belongs(repo.owner):
            raise Refusal(403 if self.user() else 401, f"Access to {repo.name} is restricted", "GatedRepo")

    def file(self, repo, revision, path):
        self.check_gate(repo)
        commit, files = self.commit_of(repo, revision)
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
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_oid(path, data)


def git_oid(path, data):
    """Name what git keeps of a file: the content, or where it is large a pointer to it."""
    if path.endswith(LARGE):
        oid = hashlib.sha256(data).hexdigest()
        data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs(path, data):
    """Describe the large file behind a pointer."""
    sha = hashlib.sha256(data).hexdigest()
    result = {"oid": sha, "sha256": sha, "size": len(data), "pointerSize": 134}
    return {"lfs": result} if path.endswith(LARGE) else {}


def entry(path, data):
    """Describe a file of a tree."""
    return {"type": "file", "path": path, "size": len(data), "oid": git_oid(path, data), **lfs(path, data)}
