"""Imports point down, and each outside library has its one seam."""

import ast
import subprocess
import sys
from pathlib import Path

import linearizer

ROOT = Path(linearizer.__file__).parent
LAYERS = [  # a module may import from the layers after its own
    {"__main__"},
    {"page"},
    {"desk", "watch"},
    {"evaluation_page"},
    {"evaluation_views"},
    {"limits", "outbox", "views"},
    {"markup"},
    {"runs"},
    {"terminal"},
    {"slices"},
    {"worker"},
    {"examination"},
    {"bench"},
    {"evaluation_estimate"},
    {"estimates", "jobs", "pipeline", "publishing"},
    {"teaching"},
    {"buying"},
    {"loading"},
    {"asking", "room", "visitors", "working"},
    {"decision"},
    {"estimate", "trying"},
    {"model_card", "space"},
    {"card_metadata"},
    {"arguments", "command", "duet", "evaluation_table", "report", "trained"},
    {"evaluation", "folders"},
    {"plan", "run"},
    {
        "approximation",
        "checkpoint",
        "comparison",
        "distillation",
        "ablation",
        "eviction",
        "gates",
        "generation",
        "initialisation",
        "inspection",
        "language",
        "measurement",
        "needle",
        "pricing",
        "recall",
        "speed",
        "tasks",
    },  # steps
    {"training"},
    {"adapters", "learner", "losses", "schedule", "training_state"},  # what training is made of
    {
        "attention_loss",
        "memory",
        "outputs",
        "probe",
        "recording",
        "subjects",
        "picture",
        "chart_picture",
        "support",
        "teacher",
        "text",
    },  # what steps are made of
    {"loss_kernels", "row_blocks"},
    {
        "answers",
        "chart_style",
        "charts",
        "run_charts",
        "evaluation_charts",
        "prediction_charts",
        "hub",
        "patience",
        "uploads",
        "weights",
        "runtime",
        "zerogpu",
    },  # seams
    {
        "allocation",
        "strategies",
        "purchase",
        "prices",
        "recipes",
        "request",
        "captions",
        "profile",
        "samples",
        "tables",
        "spectrum",
        "cost",
        "progress",
        "provenance",
        "ranks",
        "units",
        "files",
        "journal",
        "locks",
        "turns",
        "devices",
        "errors",
    },  # ground
]
INSIDE = {
    "charts": ["chart_style"],
    "run_charts": ["chart_style"],
    "prediction_charts": ["chart_style"],
    "evaluation_charts": ["chart_style", "prediction_charts"],
    "outputs": ["subjects"],
    "chart_picture": ["picture"],
    "run": ["plan"],
    "probe": ["support", "teacher"],
    "hub": ["weights"],
    "answers": ["hub"],
    "patience": ["answers"],
    "uploads": ["answers", "hub", "patience"],
}  # besides, within its own layer
SEAMS = {  # library -> the modules that may import it
    "gradio": {"page", "zerogpu"},
    "spaces": {"zerogpu"},
    "huggingface_hub": {"hub", "uploads", "answers", "patience", "card_metadata"},
    "PIL": {"picture", "chart_picture"},
    "datasets": {"hub", "text"},
    "lm_eval": {"tasks"},
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).parts[0].removesuffix(".py"), path


def imports(path):
    """Names of the modules that a file imports, relative ones with their dot."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from (f"linearizer.{alias.name}" for alias in node.names) if name == "linearizer" else [name]


def layer_of(name):
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


def test_imports_point_down():
    for name, path in modules():
        if name in ("runtime", "__init__"):
            continue
        for imported in imports(path):
            if imported.startswith("linearizer."):
                other = imported.split(".")[1]
                ground = layer_of(name) == layer_of(other) == len(LAYERS) - 1
                allowed = layer_of(other) > layer_of(name) or other in (name, *INSIDE.get(name, [])) or ground
                assert allowed, f"{name} imports {other}"


def test_the_runtime_stands_alone():
    for name, path in modules():
        if name == "runtime":
            for imported in imports(path):
                root = imported.split(".")[0]
                assert root in {"", "torch", "transformers", "triton"} or root in sys.stdlib_module_names, (
                    f"{path.name}: {imported}"
                )


def test_each_library_has_its_seam():
    for name, path in modules():
        for imported in imports(path):
            library = imported.split(".")[0]
            assert name in SEAMS.get(library, {name}), f"{name} imports {library}"


def test_attention_of_transformers_is_known_to_one_file():
    for _, path in modules():
        if path.name != "attention.py":
            assert "AttentionInterface" not in path.read_text(encoding="utf-8")
            assert "ALL_ATTENTION_FUNCTIONS" not in path.read_text(encoding="utf-8")


def test_the_page_opens_without_what_only_its_steps_need():
    heavy = {"torch", "transformers", "plotly", "datasets", "scipy"}
    seen = f"import sys, linearizer.page.site; print(*{heavy!r} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", seen], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
