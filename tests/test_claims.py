"""What the project says of itself in several places is the same, and no more than the tests show."""

import re
from pathlib import Path

import linearizer
from linearizer.teacher.support import TESTED


def test_the_package_describes_itself_in_one_sentence():
    (description,) = re.findall(r'^description = "(.*)"$', Path("pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert linearizer.__doc__.splitlines()[0] == description and not re.search("any|most|every", description.lower())


def test_the_readme_names_the_families_that_are_tested():
    (row,) = re.findall(r"^\| as text, tested on random weights \| (.*) \|$", Path("README.md").read_text(), re.M)
    assert {kind.split()[0] for kind in row.split(", ")} == TESTED
