"""What the stand-in Hub does for who writes: repositories are made, large files sent, and commits stored."""

import base64
import hashlib
import json
import re
from urllib.parse import unquote

KINDS = {None: "models", "model": "models", "space": "spaces", "dataset": "datasets"}


class Refusal(Exception):
    """An answer with an HTTP status and one of the Hub's error codes."""

    def __init__(self, status, message, code="", **headers):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code, **headers}


class Writing:
    """Routes of a request handler; the rest of it is in hub.py."""

    def write(self, path):
        """Obey a request that writes, and return whether it was one."""
        if path == "/api/validate-yaml":
            self.reply({"errors": self.hub.yaml_errors, "warnings": []}, 400 if self.hub.yaml_errors else 200)
        elif path == "/api/repos/create":
            self.create(json.loads(self.posted))
        elif result := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            self.keep(result[1])
        elif result := re.fullmatch(r"/(?:(?:spaces|datasets)/)?([^/]+)/[^/]+\.git/info/lfs/objects/batch", path):
            self.batch(result[1], json.loads(self.posted)["objects"])
        elif result := re.fullmatch(r"/api/(models|spaces|datasets)/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path):
            kind, name, what, revision = result.groups()
            repo = self.repo(kind, name)
            self.check_write(repo.owner)
            getattr(self, what)(repo, unquote(revision))
        else:
            return False
        return True

    def role(self):
        return "read" if "hf_read_" in self.headers.get("Authorization", "") else "write"

    def whoami(self):
        name = self.user()
        if name is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        orgs = [
            {"type": "org", "name": org, "fullname": org, "roleInOrg": role}
            for org, role in self.hub.organisations.get(name, {}).items()
        ]
        token = {"displayName": "test", "role": self.role()}
        auth = {"type": "access_token", "accessToken": token}
        self.reply({"type": "user", "id": "0", "name": name, "fullname": name, "orgs": orgs, "auth": auth})

    def check_write(self, owner):
        if self.user() is None:
            raise Refusal(401, "Invalid username or password.")
        if self.role() == "read":
            raise Refusal(403, "This token has no write permission.")
        if self.user() != owner and self.hub.organisations.get(self.user(), {}).get(owner, "read") == "read":
            raise Refusal(403, f"You don't have the rights to write in the namespace {owner}")

    def create(self, options):
        owner = options.get("organization") or self.user()
        self.check_write(owner)
        kind, name = KINDS[options.get("type")], f"{owner}/{options['name']}"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{name}"
        if (kind, name) in self.hub.repos:
            raise Refusal(409, "You already created this repo")
        private = options.get("visibility") == "private" or bool(options.get("private"))
        self.hub.add(name, {".gitattributes": b""}, kind, private=private)
        self.reply({"url": url, "name": name, "id": "1"})

    def preupload(self, repo, revision):
        from tests.support.hub import LARGE, etag

        files = self.commit_of(repo, revision)[1]
        result = []
        for file in json.loads(self.posted)["files"]:
            path = file["path"]
            mode = "lfs" if path.endswith(LARGE) else "regular"
            oid = etag(path, files[path]) if path in files else None
            result.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply({"files": result})

    def batch(self, owner, objects):
        """Answer where to send large files; those that are here already need not be sent."""
        self.check_write(owner)
        answers = []
        for options in objects:
            answer = {"oid": options["oid"], "size": options["size"]}
            if options["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{options['oid']}", "header": {}}}
            answers.append(answer)
        self.reply({"transfer": "basic", "objects": answers})

    def keep(self, oid):
        if hashlib.sha256(self.posted).hexdigest() != oid:
            raise Refusal(400, "sha256 mismatch")
        self.hub.objects[oid] = self.posted
        self.reply({})

    def commit(self, repo, branch):
        files = dict(self.commit_of(repo, branch)[1])
        for line in self.posted.splitlines():
            what = json.loads(line)
            value = what["value"]
            if what["key"] == "header" and value.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            if what["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif what["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, f"LFS pointer points to a file that does not exist: {value['path']}")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif what["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        files.update({path: content for path, content in self.hub.spoiled.items() if path in files})
        oid = repo.replace(files, branch)
        self.reply({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo.name}/commit/{oid}"})
