"""Imports go down the house, eager, lazy and for types alike; each outside library has its room."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path("linearizer")
ORDER = """cli page vllm_plugin serve workers pipeline checks publish encoders report evaluate train method teacher
kernels student hub run plan""".split()  # importing to the right
TABLES = ("linearizer.student.update_rules.",)  # which checkpoints carry and plans read
GROUND = {"__version__", "errors", "progress", "amounts"}
HEAVY = {"torch", "transformers", "gradio", "plotly", "huggingface_hub", "datasets", "safetensors"}
PURE = [
    "plan",
    "run",
    "student/update_rules.py",
    *(f"method/{name}.py" for name in ("decide", "by_prices", "by_freedoms")),
]
MAX_MODULES = 20  # of a folder of a room other than the student, which a checkpoint carries
SEAMS = {  # library -> the only places that may import it
    "argparse": ["cli"],
    "gradio": ["page"],
    "fastapi": ["serve"],
    "uvicorn": ["serve"],
    "vllm": ["vllm_plugin"],
    "spaces": ["page/zerogpu.py"],
    "huggingface_hub": [
        *(f"hub/{name}.py" for name in ("models", "errors", "repository", "jobs_api")),
        *(f"publish/{name}.py" for name in ("card", "push")),
    ],
    "plotly": ["report"],
    "datasets": ["hub/models.py"],
    "diffusers": ["encoders/denoiser.py", "encoders/modeling_denoiser.py"],
    "lm_eval": ["evaluate/tasks.py"],
    "peft": ["train/lora.py"],
}
FILES = sorted(ROOT.rglob("*.py"))


@cache
def imports(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def rank(name):
    return len(ORDER) if name in GROUND else ORDER.index(name)


def inside(path, places):
    return any(path.is_relative_to(ROOT / place) for place in places)


def test_imports_go_down():
    for path in FILES:
        importing = room(path)
        for name in imports(path) if importing not in ("__init__", "__main__") else ():
            if name.startswith("linearizer.") and not name.startswith(TABLES):
                imported = name.split(".")[1]
                assert importing == imported or rank(importing) < rank(imported), f"{path} imports {name}"


@pytest.mark.parametrize("name", ORDER)
def test_no_room_imports_in_a_circle(name):
    paths = {".".join(path.with_suffix("").parts): path for path in FILES if room(path) == name}
    graph = {key: {m for i in imports(p) for m in (i, i.rpartition(".")[0])} & paths.keys() for key, p in paths.items()}
    list(TopologicalSorter({key: imported - {key} for key, imported in graph.items()}).static_order())


def test_no_room_is_a_drawer():
    for name in set(ORDER) - {"pipeline", "checks", "student"}:
        folders = Counter(path.parent for path in FILES if room(path) == name and path.stem != "__init__")
        assert max(folders.values()) <= MAX_MODULES, name


def test_what_is_pure_imports_nothing_heavy():
    for path in FILES:
        if inside(path, PURE):
            assert not {name.split(".")[0] for name in imports(path)} & HEAVY, path


def test_each_library_has_its_room():
    for path in FILES:
        for library in {name.split(".")[0] for name in imports(path)} & SEAMS.keys():
            assert inside(path, SEAMS[library]), f"{path} imports {library}"


def test_a_checkpoint_carries_the_definition_and_what_its_heads_need():
    """transformers follows `from .x import y` alone: no package, no `from . import x`."""
    from transformers.dynamic_module_utils import get_relative_import_files

    from linearizer.student.modeling_linearized import CODE, OTHER_CODE

    carried = {CODE[0]: CODE, **{entry: (*CODE, *others) for entry, others in OTHER_CODE.items()}}
    for entry, names in carried.items():
        path = ROOT / "student" / f"{entry}.py"
        assert {Path(file).stem for file in get_relative_import_files(path)} | {entry} == {*names}
    files = [path for path in FILES if room(path) == "student" and path.name != "__init__.py"]
    assert {path.stem for path in files} == {*chain(*carried.values())}
    for path in files:
        known = {"torch", "transformers", "safetensors"} | sys.stdlib_module_names
        assert {name.split(".")[0] for name in imports(path)} <= known, path
        assert "from . import" not in path.read_text(encoding="utf-8"), path


def test_what_a_checkpoint_carries_can_be_read():
    from linearizer.student.modeling_linearized import CODE, OTHER_CODE

    most = {"": (6, 1900), "other_heads": (7, 2070), "feature_maps": (10, 2670), "matrix_rule": (12, 3135)}
    for entry, (files, lines) in most.items():
        names = *CODE, *OTHER_CODE.get(entry, ())
        counts = [len((ROOT / "student" / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in names]
        assert len(names) <= files and sum(counts) <= lines, (entry, len(names), sum(counts))


def test_an_encoders_checkpoint_carries_what_needs_torch_and_transformers_alone():
    from transformers.dynamic_module_utils import get_relative_import_files

    entry = ROOT / "encoders" / "modeling_encoder.py"
    carried = {Path(file) for file in get_relative_import_files(entry)} | {entry}
    assert {path.stem for path in carried} >= {"attention_both_ways", "attention_interface"}
    for path in carried:
        assert {name.split(".")[0] for name in imports(path)} <= {"torch", "transformers"} | sys.stdlib_module_names, (
            path
        )


def test_attention_of_transformers_is_known_to_one_file_of_each_kind_of_student_and_to_observers():
    for path in FILES:
        if path.name not in ("attention_interface.py", "observing.py"):
            text = path.read_text(encoding="utf-8")
            assert "AttentionInterface" not in text and "ALL_ATTENTION_FUNCTIONS" not in text, path


def test_each_room_says_what_it_does():
    for name in set(ORDER) - {"pipeline", "checks"}:
        assert ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8"))), name


def test_the_page_opens_without_what_only_its_steps_need():
    heavy = {"torch", "transformers", "plotly", "datasets", "scipy"}
    seen = f"import sys, linearizer.page.site; print(*{heavy!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_job_is_followed_without_what_only_its_work_needs():
    seen = "import sys, linearizer.workers.hub_jobs; print(*{'torch', 'transformers', 'scipy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_test_file_imports_another():
    for path in Path("tests").rglob("test_*.py"):
        assert not [name for name in imports(path) if name.startswith("tests.") and ".test_" in name], path
