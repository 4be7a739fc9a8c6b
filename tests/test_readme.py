"""README.md is short, shows a result, and names every command. tests/docs/ runs its blocks."""

import re

from tests.commands import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_at_most_150_lines():
    assert len(README.splitlines()) <= 150


def test_the_readme_shows_a_result_with_its_picture_and_its_table():
    assert "<!-- table: results/demo/demo_B4/table2.md" in README
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / path).is_file() for path in pictures)


def test_the_readme_names_every_command_that_is_installed():
    scripts = re.findall(r"^(alma-\w+) =", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(scripts) == 11
    for script in scripts:
        assert script in README
