"""transformers' own tests of models, from the source distribution of the installed version.

pip fetches it; it holds ModelTesterMixin, but no GenerationTesterMixin, which lies in transformers' repository alone:
TRANSFORMERS_TESTS=<checkout>/tests, of the installed version or of one near it, lets a student pass its tests, too.
"""

import functools
import importlib
import os
import re
import subprocess
import sys
import tarfile
import types
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from transformers import testing_utils

PACKAGE = "transformers_tests"  # the name that their folder of tests gets here
CHECKOUT = "TRANSFORMERS_TESTS"  # names the tests of a checkout, which has more of them than a source distribution
NOT_DISTRIBUTED = {f"{PACKAGE}.exporters.test_export": "ExportTesterMixin",
                   f"{PACKAGE}.generation.test_utils": "GenerationTesterMixin"}  # fmt: skip


OWN_ATTENTION = "the attention of a student is its own and cannot be exchanged"
EXCLUDED = {  # why some tests cannot hold for a student
    "test_can_set_attention_dynamically": OWN_ATTENTION,
    "test_config_attn_implementation_setter": OWN_ATTENTION,
    "test_correct_missing_keys": "loads a student from a teacher, whose config does not say what heads hold",
}


def fetch_tests(folder):
    """Return a folder with the tests; fetch it once for all processes, and skip where no registry can be reached."""
    if CHECKOUT in os.environ:
        return Path(os.environ[CHECKOUT])
    name = f"transformers-{transformers.__version__}"
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).is_dir():
            how = ["download", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "--dest", str(folder)]
            wanted = f"transformers=={transformers.__version__}"
            done = subprocess.run([sys.executable, "-m", "pip", *how, wanted], capture_output=True, text=True)
            if "(from versions: none)" in done.stderr:
                pytest.skip(f"no package registry can be reached, and transformers' tests come from its {name}.tar.gz")
            assert done.returncode == 0, done.stderr
            with tarfile.open(folder / f"{name}.tar.gz") as archive:
                members = [member for member in archive.getmembers() if member.name.startswith(f"{name}/tests/")]
                archive.extractall(folder / f"{name}.unfinished", members, filter="data")
            (folder / f"{name}.unfinished" / name).rename(folder / name)
    return folder / name / "tests"


@functools.cache
def import_mixins(folder, config):
    """Import the classes whose tests a model inherits; an empty class stands for one that is not distributed."""
    pytest.importorskip("parameterized")
    folder = fetch_tests(folder)
    folders = [folder, *{folder / name.split(".")[1] for name in NOT_DISTRIBUTED}]
    for path in (Path(testing_utils.__file__), *(path for each in folders for path in each.glob("*.py"))):
        for mark in re.findall(r"\bmark\.(\w+)", path.read_text()):
            config.addinivalue_line("markers", mark)  # or pytest refuses it
    add_package(PACKAGE, folder)
    for name, mixin in NOT_DISTRIBUTED.items():
        parent, _, module = name.rpartition(".")
        here = folder / parent.rpartition(".")[2]
        add_package(parent, here)
        sys.modules[f"tests.{here.name}"] = sys.modules[parent]  # as the tests of a checkout import each other
        if not (here / f"{module}.py").exists():
            sys.modules[name] = types.ModuleType(name)
            setattr(sys.modules[name], mixin, type(mixin, (), {}))
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    return common.ModelTesterMixin, common.GenerationTesterMixin


def suite_of(mixins, student, make, **sizes):
    """Make the class whose tests a student has to pass, of a function that makes its config and inputs."""

    class Inputs:
        is_training = True

        def get_config(self):
            return make()[0]

        def prepare_config_and_inputs_for_common(self):
            return make()

    class Suite(*mixins, unittest.TestCase):
        all_model_classes = (student,)
        has_attentions = False  # weights between tokens

        def setUp(self):
            self.model_tester = Inputs()
            vars(self.model_tester).update(sizes)

        def _prepare_for_class(self, inputs, model_class, return_labels=False):
            inputs = super()._prepare_for_class(inputs, model_class, return_labels=return_labels)
            labels = inputs.get("input_ids", torch.zeros(3, dtype=torch.long, device=testing_utils.torch_device))
            return {**inputs, "labels": labels} if return_labels else inputs

    return Suite


def check_suite(suite, mixin, excluded, least):
    """Run the tests of a mixin on a suite: none may fail, and so many have to pass."""
    failed, passed = [], 0
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if hasattr(mixin, name) and name not in excluded:
            result = unittest.TestResult()
            suite(name).run(result)
            failed += [f"{name}: {trace}" for _, trace in result.failures + result.errors]
            passed += result.wasSuccessful() and not result.skipped
    assert not failed, "\n".join(failed)
    assert passed >= least


def add_package(name, folder):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]
