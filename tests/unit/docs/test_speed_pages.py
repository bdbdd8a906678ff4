"""The pages of speed have the rows that the bench has, by name, unit and target, as its source spells them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cache import REPOSITORY
from hack.docs.speed_pages import FOLDER, fill_in, table

ROW = {
    "part": "daemon",
    "measured": "on a day",
    "name": "look-up",
    "unit": "us/key",
    "ours": 0.30211,
    "ours_p10": 0.2,
    "ours_p90": 1792.0,
    "reference": 0.25,
    "reference_name": "vLLM",
    "ratio": 1.2084,
    "target": "at most 0.6",
    "met": True,
}


def pattern(node: ast.AST) -> str | None:
    """What a string of the source looks like once it is filled in; None for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern(part) or ".+" for part in parts)
        case _:
            return None


def rows_of_source(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Of each `Row(name, ...)`: the patterns that its name may have, each with all patterns of its function.

    A name that is a variable is given by `name = ...`, or by the first of each tuple of a `for name, ... in (...)`.
    """
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        strings = {found for node in ast.walk(function) if (found := pattern(node))}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Row":
                named = call.args[0]
                direct = pattern(named)
                given = [direct] if direct else list(values_of(function, named))
                assert given, f"{path}:{call.lineno}: write the row's name where this test can see it"
                yield from ((name, strings) for name in given)


def values_of(function: ast.FunctionDef, variable: ast.expr) -> Iterator[str]:
    assert isinstance(variable, ast.Name)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable.id)], value=value) if found := pattern(value):
                yield found
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=variable.id), *_]), iter=ast.Tuple(elts=tuples)):
                yield from (found for one in tuples if isinstance(one, ast.Tuple) if (found := pattern(one.elts[0])))


def rows_of_pages() -> list[list[str]]:
    parts = [
        part
        for page in FOLDER.glob("speed-*.md")
        for part in re.findall(r"<!-- bench: \w+ -->\n(.*?)<!-- /bench -->", page.read_text(), flags=re.DOTALL)
    ]
    lines = [line for part in parts for line in part.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith("| what |")]


def test_every_row_of_the_pages_is_one_of_the_bench_and_every_row_of_the_bench_is_there() -> None:
    of_bench = [row for path in sorted((REPOSITORY / "bench").glob("*.py")) for row in rows_of_source(path)]
    assert len(of_bench) > 20
    used = set()
    for cells in rows_of_pages():
        name, unit, target = cells[0], cells[1], cells[-2]
        found = [row for row in of_bench if re.fullmatch(row[0], name)]
        assert found, f"the bench has no row {name!r}: run make bench"
        used |= {row[0] for row in found}
        for cell in (unit, target):
            assert any(re.fullmatch(one, cell) for _, strings in found for one in strings), f"{name}: {cell!r}"
    assert used == {name for name, _ in of_bench}, "a row of the bench is on no page: run make bench"


def test_the_tables_are_such_as_the_bench_writes() -> None:
    head = table([ROW]).splitlines()[:2]
    for page in FOLDER.glob("speed-*.md"):
        text = page.read_text()
        assert text.count("\n".join(head)) == text.count("<!-- bench: ") >= 1


def test_a_part_that_was_measured_is_written_anew_and_every_other_stays() -> None:
    kept = "between\n<!-- bench: engine -->\nkept\n<!-- /bench -->\n"
    page = f"before\n<!-- bench: daemon -->\nold\n<!-- /bench -->\n{kept}"
    assert fill_in(page, [ROW, ROW | {"name": "other", "reference": None, "ratio": None, "met": False}]) == (
        "before\n<!-- bench: daemon -->\nMeasured on a day.\n\n"
        "| what | unit | ours (p10 to p90) | reference | ratio | target | met |\n|---|---|---|---|---|---|---|\n"
        "| look-up | us/key | 0.302 (0.2 to 1,792) | 0.25 (vLLM) | 1.21 | at most 0.6 | yes |\n"
        "| other | us/key | 0.302 (0.2 to 1,792) | not here |  | at most 0.6 | no |\n"
        f"<!-- /bench -->\n{kept}"
    )


@pytest.mark.parametrize("name", ["daemon", "engine", "webhook"])
def test_every_part_of_the_bench_is_on_a_page(name: str) -> None:
    assert any(f"<!-- bench: {name} -->" in page.read_text() for page in FOLDER.glob("speed-*.md"))


def test_the_comparison_names_rows_for_ours_and_gives_no_figure_of_them() -> None:
    """Figures of ours stand where the bench writes them."""
    section = (
        (REPOSITORY / "docs" / "comparison.md").read_text().partition("## Measured")[2].partition("\nWhat these")[0]
    )
    named = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(named) == 5
    assert set(named) <= {cells[0] for cells in rows_of_pages()}
