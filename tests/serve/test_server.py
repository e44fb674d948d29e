"""The command serves a run until it is stopped, and says at once what it cannot serve."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from linearizer.run.folder import Run
from linearizer.serve import server


def test_the_command_serves_a_teacher_until_it_is_stopped(quick_run):
    """It serves others than this machine, without a key, and warns of it."""
    words = [sys.executable, "-m", "linearizer", "serve", str(quick_run), "--port", "0", "--json"]
    words += ["--teacher", "--host", "0.0.0.0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            served = ""
            while not served.endswith("}\n"):
                served += process.stdout.readline()
                assert process.poll() is None, process.stderr.read()
            url, model = json.loads(served).values()
            ask_until_stopped(url, model, "demo-teacher", lambda: process.send_signal(signal.SIGINT))
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()
        warned = process.stderr.read()
        assert "Traceback" not in warned and "set --api-key" in warned


def test_a_student_is_served_until_it_is_stopped(quick_run):
    """In this process, whose main thread serves: a second one would import everything again."""

    def stop():
        os.kill(os.getpid(), signal.SIGINT)

    def ask(*served):
        asked.append(pool.submit(ask_until_stopped, *served, "demo", stop))
        asked[0].add_done_callback(lambda over: over.exception() and stop())  # else it would be served for ever

    asked = []
    with ThreadPoolExecutor() as pool, suppress(KeyboardInterrupt):
        server.serve(Run(quick_run), port=0, ready=ask)
    assert [each.result() for each in asked] == [None]


def ask_until_stopped(url, model, name, stop):
    """Ask an endpoint, and stop it while it streams."""
    assert model == name
    options = {"model": name, "prompt": "The import statement", "max_tokens": 5}
    answer = httpx.post(f"{url}/completions", json=options, timeout=60).json()
    assert answer["usage"]["completion_tokens"] <= 5
    options |= {"prompt": ["The import statement"] * 64, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/completions", json=options, timeout=60) as stream:
        lines = stream.iter_lines()
        assert '"text"' in next(lines)
        stop()
        assert "the server was stopped" in [line for line in lines if line][-1]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_a_connection_whose_client_reads_nothing_ends(monkeypatch):
    monkeypatch.setattr(server, "UNREAD_SECONDS", 1)
    with server.listen("127.0.0.1", 0) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        connection, _ = listening.accept()
        with connection, pytest.raises(TimeoutError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            while True:
                connection.sendall(b"x" * 2**16)


def test_what_cannot_be_served_is_said_at_once(quick_run, tmp_path, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = said("serve", quick_run, "--port", taken.getsockname()[1])
        assert code == 2 and "--port" in err
    for words, match in [
        (("serve", quick_run, "--port", 99999), "--port"),
        (("serve", quick_run, "--host", "no.such.host.invalid", "--port", 0), "--host"),
        (("serve", quick_run, "--port", 0, "--max-state-bytes", -1), "max-state-bytes"),
        (("serve", quick_run, "--port", 0, "--host", "\udcff\udcfe"), "--host"),
        (("serve", quick_run, "--port", 0, "--host", "x" * 300), "--host"),
        (("serve", quick_run, "--port", 0, "--host", "a\0b"), "--host"),
        (("serve", quick_run, "--port", 0, "--max-seconds", "nan"), "max-seconds"),
        (("serve", quick_run, "--port", 0, "--teacher", "--states", tmp_path), "--states"),
        (("serve", quick_run, "--port", 0, "--api-key", ""), "API key"),
        (("serve", quick_run, "--port", 0, "--api-key", "a b"), "API key"),
        (("serve", tmp_path / "none"), "there is no run"),
    ]:
        code, out, err = said(*words)
        assert code == 2 and match in err and not out and err.count("\n") == 1, (words, err)
