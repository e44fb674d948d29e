"""The glossary of the page is that of the README."""

from pathlib import Path

from linearizer.publish.html import GLOSSARY, glossary_html

README = Path(__file__).parents[2] / "README.md"


def test_the_page_and_the_readme_explain_the_same_words_alike():
    table = README.read_text(encoding="utf-8").partition("## Glossary")[2].partition("##")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert dict(rows) == GLOSSARY
    assert all(f"<dt>{word}</dt>" in glossary_html() for word in GLOSSARY)
