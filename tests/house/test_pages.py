"""What the pages name is there: tests, files, and other pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("supervisord/**/*.md")])
#: Pages whose every claim is followed by its test name so many at least.
CLAIMS = {"docs/reliability.md": 50, "docs/security.md": 12, "docs/realtime.md": 12}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def written() -> set[str]:
    """The names of all tests."""
    text = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    return set(re.findall(r"(?:def|class) (test_\w+|Test\w+)", text)) | set(re.findall(r"^(Test\w+) =", text, re.M))


@pages
def test_every_named_test_exists(page, written):
    named = set(re.findall(r"`(test_\w+|Test\w+)`", page.read_text()))
    assert named - written == set()
    assert len(named) >= CLAIMS.get(str(page.relative_to(ROOT)), 0)


@pages
def test_every_named_file_exists(page):
    for name in re.findall(r"`((?:tests|docs|supervisord|proxy|units|packaging)/[\w/.@-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@pages
def test_every_link_leads_to_a_page_that_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
