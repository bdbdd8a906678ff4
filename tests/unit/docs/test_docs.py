"""What the docs say is what the code says: generated pages, alert rules and their runbook, dashboard, links."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from hack.demo.discovery import documented_job
from hack.docs import dashboard, reference, values_schema
from hack.docs.metrics_page import NOT_FROM_THE_START, values_of
from hack.docs.panels import PANELS, dashboard_queries
from kvoffload.api import keys
from kvoffload.api.conditions import PoolReason, RegionReason
from kvoffload.api.keys import APPLY_CRDS_COMMAND
from kvoffload.api.pool import NodeCounts
from kvoffload.api.region import ConfirmedLayout
from kvoffload.errors import RefusalReason
from kvoffload_engine import environment
from kvoffload_node.index.table import Eviction
from kvoffload_node.metrics import HELP, LABELS
from kvoffload_node.settings import NodeSettings
from kvoffload_operator import metrics as operator_metrics
from kvoffload_operator.kube import KubeClient
from kvoffload_operator.reconcilers.pod import UNATTACHED_REASONS
from kvoffload_operator.settings import Settings
from kvoffload_operator.webhook.server import AdmissionServer
from printed_commands import documentation_pages

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


def test_dashboard_is_current() -> None:
    assert dashboard.PATH.read_text() == dashboard.render(), "run python -m hack.docs.dashboard"


def test_the_schema_of_the_chart_s_values_is_current_and_describes_each() -> None:
    assert values_schema.PATH.read_text() == values_schema.render(), "run make generate"
    undescribed = [
        name for name, schema in properties_of(values_schema.build_schema()) if not schema.get("description")
    ]
    assert undescribed == []


def properties_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property at any depth, also of objects and lists whose names are the user's."""
    for name, child in schema.get("properties", {}).items():
        yield name, child
        yield from properties_of(child)
    for inner in (schema.get("additionalProperties"), schema.get("items")):
        if isinstance(inner, dict):
            yield from properties_of(inner)


def known_metrics() -> set[str]:
    of_operator = {
        family.name
        for metric in vars(operator_metrics).values()
        if isinstance(metric, MetricWrapperBase)
        for family in metric.describe()
    }
    return set(HELP) | of_operator


def test_the_page_of_metrics_has_every_one_that_the_code_has_a_text_for() -> None:
    rows = re.findall(r"^\| `(kvoffload_\w+)` \|", (DOCS / "reference" / "metrics.md").read_text(), flags=re.MULTILINE)
    assert {name.removesuffix("_total") for name in rows} == known_metrics()


def test_the_webhook_times_what_the_page_of_metrics_says() -> None:
    """Its series are there as soon as the routes are, before anybody asks."""
    AdmissionServer(cast("KubeClient", None), operator_namespace="ns").build_app()
    (family,) = operator_metrics.admission_duration_seconds.collect()
    assert set(values_of(family, "webhook")) == set(NOT_FROM_THE_START[family.name, "webhook"])


def metrics_in(expression: str) -> set[str]:
    names = set(re.findall(r"\bkvoffload_[a-z_]+", expression))
    return {next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name) for name in names}


def test_every_metric_in_rules_and_dashboard_is_one_that_we_export(rules: list[dict[str, str]]) -> None:
    expressions = [rule["expr"] for rule in rules] + [query for _, query in dashboard_queries()]
    used = set().union(*(metrics_in(expression) for expression in expressions))
    assert used
    assert used <= known_metrics() | {name.removesuffix("_total") for name in known_metrics()}


def names_on_pages(pattern: str) -> dict[str, Path]:
    """What a pattern finds, with a page that has it."""
    return {name: page for page in documentation_pages() for name in re.findall(pattern, page.read_text())}


def test_every_metric_that_a_page_names_is_ours() -> None:
    packages = {path.name for folder in ("agent", "operator") for path in (ROOT / folder).glob("kvoffload_*")}
    of_tests = {path.name for path in (ROOT / "tests" / "unit").glob("kvoffload_*")}
    known = known_metrics() | {f"{name}_total" for name in known_metrics()} | packages | of_tests
    named = names_on_pages(r"\bkvoffload_[a-z_]+")
    assert {name: page for name, page in named.items() if name not in known} == {}


def test_every_variable_that_a_page_names_is_ours() -> None:
    known = {f"KVOFFLOAD_{name}".upper() for model in (Settings, NodeSettings) for name in model.model_fields}
    for module in (keys, environment):
        known |= {value for name, value in vars(module).items() if name.startswith("ENV_") or "VARIABLE" in name}
    for path in (ROOT / "Makefile", *(ROOT / "hack").rglob("*.py")):
        known |= set(re.findall(r"\bKVOFFLOAD_C[A-Z_]+", path.read_text()))
    named = names_on_pages(r"\bKVOFFLOAD_[A-Z_]+[A-Z]\b")
    assert {name: page for name, page in named.items() if name not in known} == {}


def test_every_label_and_annotation_that_a_page_names_is_ours() -> None:
    known = {value for value in vars(keys).values() if isinstance(value, str) and "kvoffload.io/" in value}
    named = names_on_pages(r"(?<![\w.])((?:[a-z]+\.)?kvoffload\.io/[a-z][a-z-]+)(?![\w-])")
    of_pools = {
        name for name in named if name.startswith((keys.READY_NODE_LABEL_PREFIX, keys.DAEMON_NODE_LABEL_PREFIX))
    }
    assert {name: page for name, page in named.items() if name not in known | of_pools} == {}


def test_every_query_of_the_dashboard_is_listed_without_variables() -> None:
    queries = dashboard_queries()
    assert len(queries) == sum(len(panel.queries) for panel in PANELS)
    assert not [query for _, query in queries if "$" in query]


def test_no_query_of_the_dashboard_makes_up_data() -> None:
    """The end-to-end test says that each returns some: it has to be able to fail."""
    assert not [query for _, query in dashboard_queries() if "vector(" in query or "absent" in query]


def test_what_the_docs_say_to_watch_is_on_the_dashboard() -> None:
    section = (DOCS / "monitoring.md").read_text().partition("## What to watch")[2].partition("\n## ")[0]
    named = {
        name for names in re.findall(r"^\| [^|]+\? \| (.+) \|$", section, re.MULTILINE) for name in names.split("; ")
    }
    assert len(named) > 10
    assert named <= {panel.title for panel in PANELS}


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.build_dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= dashboard.COLUMNS
        taken |= cells


def test_every_alert_has_a_runbook_entry_and_a_test(rules: list[dict[str, str]]) -> None:
    alerts = {rule["alert"] for rule in rules}
    entries = set(re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE))
    assert entries == alerts
    cases = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {case["alertname"] for one in cases for case in one["alert_rule_test"] if case["exp_alerts"]}
    assert fired == alerts


def declared_labels() -> dict[str, set[str]]:
    """Of every metric by its name without suffix: the labels that our processes give it."""
    of_operator = {
        family.name: set(metric._labelnames)
        for metric in vars(operator_metrics).values()
        if isinstance(metric, MetricWrapperBase)
        for family in metric.describe()
    }
    return {name: set(LABELS.get(name, ())) for name in HELP} | of_operator


def test_series_of_the_rules_tests_are_such_as_the_code_emits() -> None:
    """A rule that is tested with a reason that nothing emits is not tested."""
    target_labels = {"pool", "node", "pod"}
    values = {
        "reason": {
            *(reason.value for reason in RefusalReason),
            *Eviction,
            *UNATTACHED_REASONS,
            *PoolReason,
            *RegionReason,
        },
        "layout": {*ConfirmedLayout, "pending"},
        "result": {"hit", "miss", "injected", "unchanged", "skipped", "allowed", "refused", "error", "invalid"},
        "state": {"matching", *NodeCounts.model_fields},
    }
    declared = declared_labels()
    for case in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for series in case["input_series"]:
            if not series["series"].startswith("kvoffload_"):
                continue
            (metric,), labels = metrics_in(series["series"]), re.findall(r'(\w+)="([^"]*)"', series["series"])
            assert {name for name, _ in labels} <= declared[metric] | target_labels, series
            assert all(value in values[name] for name, value in labels if name in values), series


@pytest.mark.parametrize("page", ["upgrade.md", "reference/conditions.md"])
def test_crds_are_upgraded_by_the_command_that_operator_and_doctor_print(page: str) -> None:
    """`tests/e2e/test_crd_versions.py` runs it."""
    assert APPLY_CRDS_COMMAND in (DOCS / page).read_text()


@pytest.mark.parametrize("arguments", [["check", "rules", str(RULES)], ["test", "rules", RULE_TESTS.name]])
def test_promtool_passes_the_rules(arguments: list[str]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=RULE_TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_scrape_configuration(tmp_path: Path) -> None:
    job = documented_job()
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["kvoffload-system"]}}]
    path = tmp_path / "prometheus.yml"  # without the part that Debian's Prometheus is built without
    path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    targets = {relabel.get("target_label") for relabel in job["relabel_configs"]}
    assert {"component", "pool", "node"} <= targets, "the alert rules and the dashboard ask by these"


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
