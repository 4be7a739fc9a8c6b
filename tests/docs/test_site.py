"""The site that `make docs` builds: strict, complete, and without anything that is loaded from another host."""

import re
import subprocess
import sys

import pytest

from fairseq_alma.app.command import all_keys
from fairseq_alma.core.settings import describe
from fairseq_alma.lm.settings import LanguageModelSettings
from launch.slurm import SlurmSettings
from tests.commands import ROOT
from tests.fairseq_alma.report.browser import ARGUMENTS, CHROMIUM
from vision.settings import VisionSettings

pytest.importorskip("material", reason="needs the extra `docs`")
pytestmark = pytest.mark.slow  # the build takes about a minute


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_no_page_loads_anything_from_another_host(site):
    loading = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*>", re.IGNORECASE)
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for tag in loading.findall(page.read_text(encoding="utf-8")):
            is_canonical = 'rel="canonical"' in tag or "rel=canonical" in tag
            assert is_canonical or not re.search(r"(src|href)=[\"']?(https?:)?//", tag), f"{page.name}: {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_search_finds_a_term_of_the_glossary_and_a_class(site):
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    assert "mega-batch" in index
    assert "StreamSettings" in index


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_search_box_works_on_a_page_that_is_opened_as_a_file(site):
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(offline=True).new_page()
        page.goto(f"file://{site}/api/launch.html")
        page.click("input.md-search__input")
        page.keyboard.type("renewed its lease")
        found = page.wait_for_selector(".md-search-result__link[href*='troubleshooting.html']")
        assert found is not None and found.is_visible()
        browser.close()


def test_the_settings_reference_has_every_key_of_both_commands(site):
    page = (site / "settings.html").read_text(encoding="utf-8")
    slurm = {f"launch.{one.name}" for one in describe(SlurmSettings)}
    for key in {*all_keys(LanguageModelSettings), *all_keys(VisionSettings), *slurm}:
        assert f"<code>{key}=</code>" in page, key
