"""What the docs say is what the code says: generated pages, alert rules and their runbook, dashboard, links."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from hack.docs import dashboard, reference
from hack.docs.panels import PANELS, dashboard_queries
from kvoffload.errors import RefusalReason
from kvoffload_engine.preflight import PreflightReason
from kvoffload_node.metrics import HELP
from kvoffload_operator import metrics as operator_metrics

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "charts" / "kvoffload" / "rules" / "kvoffload.yaml"
RULE_TESTS = ROOT / "tests" / "chart" / "rules" / "alerts.yaml"
DOCS = ROOT / "docs"
SUFFIXES = ("_total", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("page", reference.PAGES)
def test_generated_page_is_current(page: str) -> None:
    assert (DOCS / page).read_text() == reference.PAGES[page](), "run python -m hack.docs.reference"


def test_no_page_needs_mkdocs_to_show_a_file_and_each_that_shows_one_is_compared() -> None:
    texts = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    assert not [page for page, text in texts.items() if "--8<--" in text]
    assert {page for page, text in texts.items() if "<!-- file: " in text} <= set(reference.PAGES)


def test_every_example_is_in_the_docs() -> None:
    shown = set(re.findall(r"^<!-- file: examples/(\S+) -->$", (DOCS / "examples.md").read_text(), flags=re.MULTILINE))
    assert shown == {path.name for path in (ROOT / "examples").glob("*.yaml")}


def test_the_tests_that_the_readme_names_are_there() -> None:
    named = re.findall(r"`(\w+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert named
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in texts.get(file, "")] == []


def test_dashboard_is_current() -> None:
    assert dashboard.PATH.read_text() == dashboard.render(), "run python -m hack.docs.dashboard"


def known_metrics() -> set[str]:
    of_operator = {
        family.name
        for metric in vars(operator_metrics).values()
        if isinstance(metric, MetricWrapperBase)
        for family in metric.describe()
    }
    return set(HELP) | of_operator


def metrics_in(expression: str) -> set[str]:
    names = set(re.findall(r"\bkvoffload_[a-z_]+", expression))
    return {next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name) for name in names}


def test_every_metric_in_rules_and_dashboard_is_one_that_we_export(rules: list[dict[str, str]]) -> None:
    expressions = [rule["expr"] for rule in rules] + [query for _, query in dashboard_queries()]
    used = set().union(*(metrics_in(expression) for expression in expressions))
    assert used
    assert used <= known_metrics() | {name.removesuffix("_total") for name in known_metrics()}


def test_every_query_of_the_dashboard_is_listed_without_variables() -> None:
    queries = dashboard_queries()
    assert len(queries) == sum(len(panel.queries) for panel in PANELS)
    assert not [query for _, query in queries if "$" in query]


def test_every_alert_has_a_runbook_entry_and_a_test(rules: list[dict[str, str]]) -> None:
    alerts = {rule["alert"] for rule in rules}
    entries = set(re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE))
    assert entries == alerts
    cases = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {case["alertname"] for one in cases for case in one["alert_rule_test"] if case["exp_alerts"]}
    assert fired == alerts


def test_refusal_reasons_of_the_runbook_are_ours() -> None:
    section = (DOCS / "runbook.md").read_text().partition("## KVOffloadRefusals")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z][A-Za-z]+)`", section)) <= {reason.value for reason in RefusalReason}


def test_every_reason_of_an_engine_that_declines_is_explained() -> None:
    section = (DOCS / "troubleshooting.md").read_text().partition("## The engine serves without offload")[2]
    table = section.partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == {reason.value for reason in PreflightReason}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
@pytest.mark.parametrize("arguments", [["check", "rules", str(RULES)], ["test", "rules", RULE_TESTS.name]])
def test_promtool_passes_the_rules(arguments: list[str]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=RULE_TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
