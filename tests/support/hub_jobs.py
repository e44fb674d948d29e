"""What the stand-in Hub does for jobs and buckets, as the Hub's own client asks for it.

A job is a process of this machine, with nothing but the environment and the secrets that it was begun with; a `uv` of
ours checks the packages that are asked for, and installs none. Files of buckets go through the client's own Xet, into a
folder of this machine in place of a server.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import unquote

from tests.support.hub_writing import Refusal

UV = f"""#!{sys.executable}
import os, shutil, sys
from importlib.metadata import version
from pathlib import Path
words = sys.argv[1:]
if words[:2] == ["venv", "--quiet"]:
    python = Path(words[2], "bin", "python")
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\\nexec {sys.executable} "$@"\\n')
    python.chmod(0o755)
else:
    assert words[:5] == ["pip", "install", "--quiet", "--python", "env"], words
    assert "UV_TORCH_BACKEND" in os.environ or shutil.which("nvidia-smi")
    for word in words[5:]:
        name, _, number = word.partition("==")
        assert version(name).partition("+")[0] == number, word
"""
GPU = {"type": "gpu", "model": "L4", "quantity": "1", "vram": "24 GB", "manufacturer": "Nvidia"}
HARDWARE = [
    ("cpu-basic", "CPU Basic", "2 vCPU", "16 GB", "50 GB", None, 167),
    ("l4x1", "Nvidia L4", "8 vCPU", "30 GB", "400 GB", GPU, 13333),
    ("tiny", "Tiny", "1 vCPU", "1 GB", "1 GB", None, 100),
]

BUCKET = r"/(?:api/)?buckets/([^/]+)/([^/]+)(?:/(tree|batch|resolve|xet-\w+-token))?(?:/(.*))?"
WHEN = "2026-01-01T00:00:00.000Z"
ENDED = ("COMPLETED", "ERROR", "CANCELED")


def stamp_of(seconds):
    """Write a time as the Hub does."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Job:
    """One job, and its process."""

    def __init__(self, hub, owner, spec):
        self.hub, self.owner, self.spec = hub, owner, spec
        self.id, self.stage, self.message, self.lines = f"job{len(hub.jobs)}", "SCHEDULING", None, []
        self.changed = threading.Condition()
        self.home = tempfile.mkdtemp(prefix="linearizer-job-")
        if not hub.no_machine:
            threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        time.sleep(self.hub.machine_seconds)
        binaries = Path(self.home, "bin")
        binaries.mkdir()
        (binaries / "uv").write_text(UV)
        (binaries / "uv").chmod(0o755)
        environment = {
            "PATH": f"{binaries}:/usr/bin:/bin", "HOME": self.home, "JOB_ID": self.id, "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_XET": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1",
            **self.spec["environment"], **self.spec.get("secrets", {}),
        }  # fmt: skip
        with self.changed:
            if self.stage != "SCHEDULING":
                return
            program = self.hub.program
            self.process = subprocess.Popen(
                [sys.executable, "-c", program] if program else self.spec["command"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=self.home,
            )  # fmt: skip
            self.stage = "RUNNING"
        limit = threading.Timer(self.spec["timeoutSeconds"] * self.hub.second, self.end, ["ERROR", "Job timeout"])
        limit.start()
        with self.process.stdout as lines:
            for line in lines:
                with self.changed:
                    self.lines.append({"timestamp": stamp_of(time.time()), "data": line.decode().rstrip("\n")})
                    self.changed.notify_all()
        code = self.process.wait()
        limit.cancel()
        if program:
            self.leave_log()
        self.end("COMPLETED" if code == 0 else "ERROR", None if code == 0 else f"Job failed with exit code: {code}")

    def leave_log(self):
        """Leave the events of a program in the bucket, as a job does."""
        from huggingface_hub import HfApi

        lines = [line["data"] + "\n" for line in self.lines if line["data"].startswith("{")]
        place = f"runs/{self.spec['labels']['linearizer-run']}/run/events.jsonl"
        if lines:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                owner = HfApi(token=self.spec["secrets"]["HF_TOKEN"])
                owner.batch_bucket_files(f"{self.owner}/linearizer-runs", add=[("".join(lines).encode(), place)])

    def end(self, stage, message=None):
        """End the job: a container takes every process along."""
        with self.changed:
            if self.stage in ("SCHEDULING", "RUNNING"):
                self.stage, self.message = stage, message
            self.changed.notify_all()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)

    def processes(self):
        """List the processes of the job by what only they have in their environment."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"HOME={self.home}\0".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)

    def plain(self):
        """Describe the job as the Hub does; of secrets the names alone."""
        kept = {key: self.spec.get(key) for key in ("command", "arguments", "environment", "flavor", "labels")}
        return {
            **kept, "id": self.id, "dockerImage": self.spec["dockerImage"], "createdAt": WHEN,
            "status": {"stage": self.stage, "message": self.message}, "secrets": dict.fromkeys(self.spec["secrets"]),
            "owner": {"id": "0", "name": self.owner, "type": "user"},
        }  # fmt: skip


class Jobs:
    """Routes of a request handler; the rest of it is in hub.py."""

    def serve_jobs(self, path):
        """Serve a request for jobs or buckets, and return whether it was one."""
        if path == "/api/jobs/hardware":
            names = ("name", "prettyName", "cpu", "ram", "ephemeralStorage", "accelerator", "unitCostMicroUSD")
            rows = [dict(zip(names, row, strict=True)) for row in self.hub.hardware]
            unit = {"unitLabel": self.hub.unit}
            self.reply([{**row, "unitCostUSD": row["unitCostMicroUSD"] / 1e6, **unit} for row in rows])
        elif found := re.fullmatch(r"/api/jobs/([^/]+)", path):
            self.check_owner(found[1])
            self.begin_job(found[1]) if self.command == "POST" else self.reply(
                [job.plain() for job in self.hub.jobs.values() if job.owner == found[1]]
            )
        elif found := re.fullmatch(r"/api/jobs/([^/]+)/([^/]+)(/logs|/cancel)?", path):
            self.check_owner(found[1])
            job = self.hub.jobs.get(found[2])
            if job is None or job.owner != found[1]:
                raise Refusal(404, "Job not found")
            {None: self.send_job, "/logs": self.send_log, "/cancel": self.cancel}[found[3]](job)
        elif found := re.fullmatch(BUCKET, path):
            self.check_owner(found[1])
            what = "bucket_" + (found[3] or "itself").replace("-", "_")
            getattr(self, what)(f"{found[1]}/{found[2]}", unquote(found[4] or ""))
        else:
            return False
        return True

    def check_owner(self, owner):
        if self.user() is None:
            raise Refusal(401, "Invalid username or password.")
        if self.user() != owner and owner not in self.hub.organisations.get(self.user(), {}):
            raise Refusal(403, f"You don't have the rights to use the namespace {owner}")

    def begin_job(self, owner):
        self.check_write(owner)
        spec = json.loads(self.posted)
        if spec["flavor"] not in {row[0] for row in self.hub.hardware}:
            raise Refusal(400, f"Unknown flavor {spec['flavor']}")
        job = Job(self.hub, owner, spec)
        self.hub.jobs[job.id] = job
        self.reply(job.plain())

    def send_job(self, job):
        self.reply(job.plain())

    def cancel(self, job):
        job.end("CANCELED")
        self.reply({})

    def send_log(self, job):
        """Send the lines as events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            for line in job.lines:
                data = f"data: {json.dumps(line)}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

    def bucket(self, name):
        if name not in self.hub.buckets:
            raise Refusal(404, "Bucket not found", "RepoNotFound")
        return self.hub.buckets[name]

    def bucket_itself(self, name, path):
        if self.command == "POST":
            self.check_write(name.split("/")[0])
            if name in self.hub.buckets:
                return self.reply({"url": f"{self.hub.url}/buckets/{name}", "error": "You already created it"}, 409)
            private = json.loads(self.posted).get("visibility") == "private"
            self.hub.buckets[name] = {"private": private, "files": {}}
            return self.reply({"url": f"{self.hub.url}/buckets/{name}"})
        bucket = self.bucket(name)
        return self.reply({"id": name, "private": bucket["private"], "createdAt": WHEN, "size": 0, "totalFiles": 0})

    def bucket_tree(self, name, prefix):
        files = self.bucket(name)["files"] if name in self.hub.buckets else {}
        self.reply([file for path, file in files.items() if path.startswith(prefix)])

    def bucket_batch(self, name, path):
        files = self.bucket(name)["files"]
        for line in map(json.loads, self.posted.splitlines()):
            if line["type"] == "deleteFile":
                files.pop(line["path"], None)
            else:
                stamp = stamp_of(line["mtime"] / 1000)
                files[line["path"]] = {
                    "type": "file", "path": line["path"], "xetHash": line["xetHash"], "mtime": stamp,
                    "size": self.hub.size_of(line["xetHash"]), "uploadedAt": stamp,
                }  # fmt: skip
        self.reply({"success": True, "failed": []})

    def bucket_resolve(self, name, path):
        file = self.bucket(name)["files"][path]
        route = f"{self.hub.url}/api/buckets/{name}/xet-read-token"
        headers = {"X-Xet-Hash": file["xetHash"], "X-Xet-Refresh-Route": route, "X-Linked-Size": str(file["size"])}
        self.reply(b"", 200, headers)

    def send_xet_token(self, name, path):
        self.bucket(name)
        self.reply({"accessToken": "xet", "exp": int(time.time()) + 3600, "casUrl": f"local://{self.hub.storage}"})

    bucket_xet_read_token = bucket_xet_write_token = send_xet_token


class JobsOfHub:
    """The jobs and buckets that a stand-in Hub holds."""

    def clear_jobs(self):
        """End all jobs, and forget them and all buckets."""
        for job in getattr(self, "jobs", {}).values():
            job.end("CANCELED")
        self.jobs, self.buckets = {}, {}
        self.program = ""  # what jobs run instead of their command
        self.hardware, self.second, self.machine_seconds, self.no_machine = list(HARDWARE), 1.0, 0.0, False
        self.unit = "minute"  # that machines are paid by
        self.sizes = defaultdict(int)

    @property
    def storage(self):
        """The folder that Xet writes to in place of a server."""
        if not hasattr(self, "folder"):
            self.folder = os.path.join(os.environ["HF_HOME"], "xet-of-the-stand-in")
            os.makedirs(self.folder, exist_ok=True)
        return self.folder

    def size_of(self, xet_hash):
        """Read how long a file is from the shards that tell Xet of what it is put together."""
        if xet_hash not in self.sizes:
            key = b"".join(bytes.fromhex(xet_hash[place : place + 16])[::-1] for place in range(0, 64, 16))
            for shard in Path(self.storage).rglob("*.mdb"):
                data = shard.read_bytes()
                place = data.find(key)
                if place >= 0:
                    count = int.from_bytes(data[place + 36 : place + 40], "little")
                    entries = (place + 48 * number + 36 for number in range(1, count + 1))
                    self.sizes[xet_hash] = sum(int.from_bytes(data[at : at + 4], "little") for at in entries)
                    break
        return self.sizes[xet_hash]
