"""A student to publish, and what tests ask of publishing it on the stand-in Hub."""

import shutil

import pytest

from linearizer.errors import LinearizerError, PublishError
from linearizer.progress import finish
from linearizer.publish import push
from linearizer.run.folder import Run

ME = "hf_fake_me"
WEIGHTS = "teacher-00001-of-00002.safetensors"
HOW_THE_HUB_SENDS = "ignore:Use 'content=:DeprecationWarning"  # as the Hub's client does


def copy_run(source, folder):
    """Copy a finished run, so that its log may be written."""
    shutil.copytree(source, folder)
    return Run.open(folder)


def publish(run, name="me/student", token=ME, **how):
    return finish(push.publish(run, name, token=token, **how))


def refused(run, *arguments, kind=PublishError, **how):
    """The sentence that publishing ends with."""
    with pytest.raises(LinearizerError) as caught:
        publish(run, *arguments, **how)
    assert caught.type is kind and "hf_" not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def written(hub):
    return [line for line in hub.requests if not line.startswith(("GET", "HEAD"))]


def files_of(hub, name="me/student", kind="models"):
    repo = hub.repos[kind, name]
    return repo.commits[repo.branches["main"]]
