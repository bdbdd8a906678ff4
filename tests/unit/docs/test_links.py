"""Links and paths of the pages outside docs/: mkdocs, which checks those inside, does not see them."""

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from hack.cache import REPOSITORY
from printed_commands import documentation_pages

PAGES = [page for page in documentation_pages() if REPOSITORY / "docs" not in page.parents]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"^[a-z]+:")
FOLDERS = ("agent", "operator", "tests", "hack", "bench", "charts", "crds", "docs", "examples")
PACKAGES = ("operator/kvoffload_operator", "agent/kvoffload_node", "agent/kvoffload_engine", "tests/engine")
NO_PATHS = ("kvoffload.io/", "kvoffload/", "registry.example.com/", "build/", "logs/")
"""Labels, images, and what commands make."""
NOT_KEPT = ("__init__.py", "docs/design/NNNN-title.md")
"""Files that there must not be, and a pattern of names."""


def without_code(text: str) -> str:
    """The page without its fenced blocks, which may show links of other files."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as mkdocs and, for these headings, GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {slugify(heading.replace("`", ""), "-") for heading in headings}


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    """From the root, the page's folder or a package. A name alone: in the folder of a path before it in its line,
    as the tables of tests have it, or the only one of that name."""
    names = Counter(path.name for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.*"))
    for line in without_code(re.sub(r"::\w+`", "`", page.read_text())).splitlines():
        folders = [page.parent, REPOSITORY, *(REPOSITORY / package for package in PACKAGES)]
        for span in re.findall(r"`([\w.*-][\w.*/-]*/[\w.*/-]*|\w+\.(?:py|md|yaml))`", line):
            if span.startswith(NO_PATHS) or span in NOT_KEPT:
                continue
            found = [path for folder in folders for path in [*folder.glob(span), *folder.glob(f"{span}.py")]]
            assert found or names[span] == 1, f"{span} in: {line}"
            folders += [path if path.is_dir() else path.parent for path in found]


def test_every_test_that_a_page_names_is_there() -> None:
    """`file::test`, of which `...` leaves the end away."""
    texts: dict[str, str] = {}
    for path in (REPOSITORY / "tests").rglob("*.py"):
        texts[path.name] = texts.get(path.name, "") + path.read_text()
    named = [
        (page, *found)
        for page in documentation_pages()
        for found in re.findall(r"`(\w+\.py)::(\w+)(\.\.\.)?`", page.read_text())
    ]
    assert len(named) > 25
    for page, file, test, cut in named:
        assert f"def {test}{'' if cut else '('}" in texts.get(file, ""), f"{page}: {file}::{test}"


def test_every_long_test_is_on_the_page_of_long_runs() -> None:
    """By its name, or by that of its file alone, as where the whole file is long or single cases of a test are."""
    page = (REPOSITORY / "docs" / "reference" / "long-runs.md").read_text()
    named = re.findall(r"`(\w+\.py)(?:::(\w+))?(?:\.\.\.)?`", page)
    whole = {file for file, test in named if not test}
    long = [(path, path.read_text()) for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)]
    long = [(path, text) for path, text in long if "mark.long" in text]
    assert len(long) > 10
    for path, text in long:
        if path.name in whole:
            continue
        tests = re.findall(r"^@pytest\.mark\.long\n(?:@.*\n)*def (\w+)", text, flags=re.MULTILINE)
        assert text.count("mark.long") == len(tests), f"{path.name} is not named as a whole"
        for test in tests:
            assert any(file == path.name and test.startswith(start) for file, start in named if start), test
