"""Tables that people write: each has what the code has, and what it leaves out is named here with the reason.

docs/reference/conditions.md has a test of its own (tests/unit/kvoffload_operator/test_conditions_page.py), and so have
the pages that are generated (test_docs.py).
"""

import re
from collections.abc import Mapping
from inspect import getmembers, getsource
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cache import REPOSITORY
from hack.cluster.settings import ClusterSettings
from hack.docs.settings_page import read_values
from kvoffload.api import keys
from kvoffload.api.conditions import PoolReason, RegionReason
from kvoffload.api.pool import KVOffloadPool, KVOffloadPoolSpec
from kvoffload.api.schema import build_crds
from kvoffload.errors import RefusalReason
from kvoffload.layout.gate import LayoutReason
from kvoffload_engine import environment
from kvoffload_engine.budget import DEFAULT_STEP_SECONDS
from kvoffload_engine.compat import NEWEST, OLDEST
from kvoffload_engine.plugin import MAX_BLOCKS_PER_CHUNK, blocks_per_chunk
from kvoffload_engine.preflight import PreflightReason
from kvoffload_engine.transfer.checksums import MODES
from kvoffload_node.findings import _build_degraded as build_degraded
from kvoffload_operator.resources.daemonset import build_daemonset
from operator_builders import daemonset_options, spec_of
from printed_commands import documentation_pages

DOCS = REPOSITORY / "docs"
CHART = REPOSITORY / "charts" / "kvoffload"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((CHART / "rules" / "kvoffload.yaml").read_text())["groups"]
    for rule in group["rules"]
}


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next of its level or above."""
    text = (DOCS / page).read_text()
    level = next(line.split()[0] for line in text.splitlines() if line.lstrip("# ") == heading and line[0] == "#")
    return re.split(rf"^#{{1,{len(level)}}} ", text.partition(f"{level} {heading}\n")[2], flags=re.MULTILINE)[0]


def rows(text: str, *, header: str) -> list[list[str]]:
    """The cells of the table whose first column is headed so."""
    (body,) = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|: ]+\n((?:\|.*\n?)+)", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))] for line in body.strip().splitlines()]


def names(text: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`]+)`", text)


def assert_all(found: set[str], known: set[str], left_out: Mapping[str, str]) -> None:
    """`found` is `known` but for what is left out; what is left out is known, and not found."""
    assert found == known - set(left_out)
    assert set(left_out) <= known


# ---------------------------------------------------------------- first-pool.md

FIELDS_NOT_OF_A_FIRST_POOL = {
    "nodeSelector": "in the manifest above the table",
    "mode": "the page's first section",
    "tolerations": "the default is what GPU nodes need",
    "namespaceSelector": "the default is every namespace of users",
    "numaPolicy": "the default is right for engines over several sockets",
    "evictionPolicy": "there is one",
    "maxEnginesPerNode": "the alert KVOffloadRefusals asks for it",
    "hugetlbfsMount": "install.md speaks of it, beside the mounts",
}


def test_a_first_pool_s_fields_have_the_defaults_of_the_schema() -> None:
    crd = next(one for one in build_crds().values() if one["spec"]["names"]["kind"] == "KVOffloadPool")
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    table = rows(section("first-pool.md", "What to choose"), header="field")
    assert_all({names(row[0])[0] for row in table}, set(spec["properties"]), FIELDS_NOT_OF_A_FIRST_POOL)
    for row in table:
        (field,) = names(row[0])
        schema = spec["properties"][field]
        value = getattr(schema.get("default"), "value", schema.get("default"))
        assert row[1] == ("required" if field in spec["required"] else f"`{value}`" if value else "none"), field
        for other in names(row[2]):
            assert other in schema.get("enum", [other]), f"{field} has no {other}"


@pytest.mark.parametrize("page", documentation_pages(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_pool_that_a_page_shows_is_one_that_the_api_takes(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for one in yaml.safe_load_all(block):
            if isinstance(one, dict) and one.get("kind") == "KVOffloadPool":
                pool = KVOffloadPool.from_manifest(one)
                assert pool.spec.capacity % pool.spec.page_size.num_bytes == 0
                assert set(one["spec"]) <= {field.alias for field in KVOffloadPoolSpec.model_fields.values()}


# ---------------------------------------------------------------- install.md

VALUES_NOT_FOR_A_SITE = {
    "nameOverride": "a taste",
    "image.operator.repository": "in the command above the table",
    "image.operator.tag": "in the command above the table",
    "image.node.repository": "in the command above the table",
    "image.node.tag": "in the command above the table",
    "image.pullPolicy": "the default is right for tags that never move",
    "logLevel": "for who looks for a fault",
    "operator.replicas": "a trade, not a property of the site",
    "operator.applyCRDs": "upgrade.md speaks of it",
    "operator.resources": "scheduling of our own pods",
    "operator.nodeSelector": "scheduling of our own pods",
    "operator.tolerations": "scheduling of our own pods",
    "operator.affinity": "scheduling of our own pods",
    "operator.priorityClassName": "scheduling of our own pods",
    "webhook.timeoutSeconds": "an answer takes milliseconds",
    "webhook.certificates.days": "the operator renews them",
    "webhook.resources": "scheduling of our own pods",
    "webhook.nodeSelector": "scheduling of our own pods",
    "webhook.tolerations": "scheduling of our own pods",
    "webhook.affinity": "scheduling of our own pods",
    "webhook.priorityClassName": "scheduling of our own pods",
    "node.resources": "scheduling of our own pods",
    "node.priorityClass": "scheduling of our own pods",
    "networkPolicy.enabled": "security.md speaks of it",
    "monitoring.podMonitor.labels": "monitoring.md speaks of it",
    "monitoring.podMonitor.interval": "monitoring.md speaks of it",
    "monitoring.prometheusRule.labels": "monitoring.md speaks of it",
    "monitoring.prometheusRule.additionalRuleLabels": "monitoring.md speaks of it",
    "monitoring.prometheusRule.runbookUrl": "monitoring.md speaks of it",
    "monitoring.prometheusRule.alerts": "monitoring.md speaks of it",
    "monitoring.dashboard.namespace": "monitoring.md speaks of it",
    "monitoring.dashboard.labels": "monitoring.md speaks of it",
    "monitoring.dashboard.annotations": "monitoring.md speaks of it",
}


def test_every_value_is_in_the_table_of_what_you_have_or_left_out_for_a_reason() -> None:
    table = rows(section("install.md", "Install the chart"), header="you have")
    values = {row.key for row in read_values((CHART / "values.yaml").read_text())}

    def of(named: str) -> set[str]:
        return {key for key in values if f"{key}.".startswith(f"{named}.") or named.startswith(f"{key}.")}

    set_by = {name.partition("=")[0] for _, cell in table for name in names(cell)}
    left_out = set().union(*map(of, VALUES_NOT_FOR_A_SITE))
    assert not [name for name in VALUES_NOT_FOR_A_SITE if not of(name)]
    assert set().union(*map(of, set_by)) == values - left_out


# ---------------------------------------------------------------- use-a-pool.md

WRITTEN_BY_THE_WEBHOOK = {
    keys.INJECTED_ANNOTATION,
    keys.REPLICATED_LAYOUT_ANNOTATION,
    keys.SKIP_REASON_ANNOTATION,
    keys.WEBHOOK_REPLICA_ANNOTATION,
    keys.SAFE_TO_EVICT_ANNOTATION,
}
VARIABLES_NOT_THE_USER_S = {
    environment.SOCKET_VARIABLE: "the webhook's",
    environment.POOL_VARIABLE: "the webhook's",
    environment.REPLICATED_LAYOUT_VARIABLE: "the webhook's",
    environment.WEIGHTS_ID_VARIABLE: "the webhook's, from the annotation",
    environment.DECISION_VARIABLE: "the plugin's own",
}


def constants(module: Any, ending: str) -> set[str]:
    return {value for name, value in getmembers(module) if name.endswith(ending)}


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Did it work?", WRITTEN_BY_THE_WEBHOOK),
        ("Hints that you can give", constants(keys, "_ANNOTATION") - WRITTEN_BY_THE_WEBHOOK),
    ],
)
def test_every_annotation_of_a_pod_is_explained(heading: str, expected: set[str]) -> None:
    assert {names(row[0])[0] for row in rows(section("use-a-pool.md", heading), header="annotation")} == expected


def test_every_variable_that_is_the_user_s_is_explained_with_its_default() -> None:
    table = {
        names(row[0])[0]: row[1] for row in rows(section("use-a-pool.md", "Hints that you can give"), header="variable")
    }
    assert_all(set(table), constants(environment, "_VARIABLE"), VARIABLES_NOT_THE_USER_S)
    assert f"{blocks_per_chunk({})} (default) to {MAX_BLOCKS_PER_CHUNK}" in table[environment.BLOCKS_PER_CHUNK_VARIABLE]
    checksum = table[environment.CHECKSUM_VARIABLE]
    assert set(names(checksum)) == set(MODES)
    facts = (REPOSITORY / "agent/kvoffload_engine/facts.py").read_text()  # imports vLLM, which is not here
    (default,) = re.findall(r'get\(CHECKSUM_VARIABLE, "(\w+)"\)', facts)
    assert f"`{default}` (default)" in checksum
    assert f"{DEFAULT_STEP_SECONDS:g} unless the chart says otherwise" in table[environment.DEADLINE_VARIABLE]


# ---------------------------------------------------------------- troubleshooting.md

REASONS_OF_A_POOL_ELSEWHERE = {
    PoolReason.SOME_NODES_NOT_READY: "`status.problems` has each node's own reason",
    PoolReason.NO_NODE_READY: "`status.problems` has each node's own reason",
    PoolReason.REGIONS_PENDING: "`status.problems` has each node's own reason",
    PoolReason.REGIONS_DEGRADED: "the regions have their own reasons",
    PoolReason.INVALID_SPEC: "the message names the fields",
    PoolReason.OBSERVING: "it was told so",
    PoolReason.PAUSED: "it was told so",
    PoolReason.ROLLOUT_IN_PROGRESS: "it passes",
    PoolReason.OVERLAPS_ANOTHER_POOL: "the pool is ready, and worse than asked: the runbook",
    PoolReason.CRD_OUTDATED: "the pool is ready, and worse than asked: the runbook",
    PoolReason.CRD_NEWER: "the pool is ready, and worse than asked: upgrade.md",
    PoolReason.FALLBACK_IN_USE: "it was told so",
    PoolReason.DAEMONSET_NAME_TAKEN: "the message has the remedy",
    RegionReason.NODE_SHORT_OF_PAGES: "the pool says NodesShortOfPages",
    RegionReason.TAINT_NOT_TOLERATED: "the message has the remedy",
    RegionReason.DAEMON_PENDING: "the message has the scheduler's words",
    RegionReason.DAEMON_NOT_REPORTING: "the message has the remedy",
    RegionReason.DAEMON_FAILING: "the message has the remedy",
    RegionReason.REGION_UNUSABLE: "the message has path, cause and remedy",
    RegionReason.SHARED_MEMORY_FALLBACK: "it was told so",
    RegionReason.SHRINK_WAITS: "the pool is ready, and worse than asked: the runbook",
    RegionReason.ATTACHER_MISSING: "the pool is ready, and worse than asked: the runbook",
    RegionReason.NUMA_NODE_OUT_OF_REACH: "the pool is ready, and worse than asked: the runbook",
}


def reasons_that_want_something_done() -> set[str]:
    """Reasons of pools and regions for which docs/reference/conditions.md has a remedy that is not to wait."""
    found: set[str] = set()
    for kind in ("KVOffloadPool", "KVOffloadRegion"):
        table = rows(section("reference/conditions.md", kind), header="reason")
        found |= {names(row[0])[0] for row in table if row[-1] not in ("nothing", "wait")}
    return found


def test_every_reason_why_a_pool_is_not_ready_is_explained_or_left_out_for_a_reason() -> None:
    table = rows(section("troubleshooting.md", "The pool is not ready"), header="reason")
    explained = {name for row in table for name in names(row[0]) if name in {*PoolReason, *RegionReason}}
    assert_all(explained, reasons_that_want_something_done(), REASONS_OF_A_POOL_ELSEWHERE)


def test_every_reason_of_an_engine_that_declines_is_explained() -> None:
    table = rows(section("troubleshooting.md", "The engine serves without offload"), header="reason")
    of_the_layout = {LayoutReason.SEVERAL_GROUPS.value, LayoutReason.NO_KV_BYTES.value}
    assert {name for row in table for name in names(row[0])} == {one.value for one in PreflightReason} | of_the_layout


# ---------------------------------------------------------------- runbook.md

REFUSALS_THAT_RAISE_NOTHING = {RefusalReason.RATE.value: "an answer to a reservation, no refused session: not counted"}
DEGRADATIONS_ELSEWHERE = {PoolReason.REGIONS_DEGRADED.value: "the metric has the regions' own reasons"}


def excluded_by(alert: str) -> set[str]:
    """The reasons that an alert's expression leaves out."""
    (reasons,) = re.findall(r'reason!~"([^"]*)"', ALERTS[alert]["expr"])
    return set(reasons.split("|"))


def test_every_refusal_that_raises_an_alert_is_in_the_runbook() -> None:
    found = re.findall(r"`([A-Z]\w+)`[:,]", section("runbook.md", "KVOffloadRefusals"))
    known = {reason.value for reason in RefusalReason}
    assert excluded_by("KVOffloadRefusals") < known
    assert_all(set(found), known - excluded_by("KVOffloadRefusals"), REFUSALS_THAT_RAISE_NOTHING)


def test_every_degradation_that_raises_an_alert_is_in_the_runbook() -> None:
    found = re.findall(r"`([A-Z]\w+)`:", section("runbook.md", "KVOffloadPoolDegraded"))
    known = {
        names(reason)[0]
        for reason, condition, *_ in rows(section("reference/conditions.md", "KVOffloadPool"), header="reason")
        if condition == "Degraded"
    }
    known |= {RegionReason[name].value for name in re.findall(r"RegionReason\.(\w+)", getsource(build_degraded))}
    known -= {PoolReason.AS_ASKED.value}
    assert excluded_by("KVOffloadPoolDegraded") < known
    assert_all(set(found), known - excluded_by("KVOffloadPoolDegraded"), DEGRADATIONS_ELSEWHERE)


# ---------------------------------------------------------------- security.md

MOUNTS = {
    "the hugetlbfs": "hugepages",
    "its state folder": "state",
    "its pod's handoff folder": "handoff",
    "the handoff folder": "handoff",
    "the kubelet's pods folder": "kubelet-pods",
}


def test_what_runs_on_a_node_has_the_rights_that_the_security_page_says() -> None:
    table = {row[0]: row[1:] for row in rows(section("security.md", "What runs with what"), header="process")}
    assert set(table) == {"operator, webhook", "daemon", "attacher", "vLLM pod"}
    manifest = build_daemonset("main", spec_of(), capacity_bytes=64 << 20, options=daemonset_options())
    pod = manifest["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["daemon", "attacher"]
    for container in pod["containers"]:
        user, capabilities, sees = table[container["name"]]
        assert user == str(pod["securityContext"]["runAsUser"])
        assert (capabilities == "none") == (container["securityContext"]["capabilities"] == {"drop": ["ALL"]})
        assert {MOUNTS[folder] for folder in sees.split(", ")} == {one["name"] for one in container["volumeMounts"]}
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert table["operator, webhook"][:2] == [re.findall(r"runAsUser: (\d+)", helpers)[0], "none"]
    assert "drop: [ALL]" in helpers


# ---------------------------------------------------------------- hack/README.md


def test_the_local_cluster_s_variables_have_the_defaults_that_hack_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows((REPOSITORY / "hack" / "README.md").read_text(), header="variable")
    for row in table:
        monkeypatch.delenv(names(row[0])[0], raising=False)
    settings = ClusterSettings.from_environment()
    assert {names(row[0])[0]: row[1].strip("`") for row in table} == {
        "KVOFFLOAD_CLUSTER_NAME": settings.name,
        "KVOFFLOAD_CLUSTER_HUGEPAGES": str(settings.num_hugepages),
    }


# ---------------------------------------------------------------- every page


def test_every_page_names_the_versions_of_vllm_that_the_engine_knows() -> None:
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    found = [
        (str(page), versions)
        for page in documentation_pages()
        if page.parent == DOCS or page.parent == REPOSITORY
        for versions in re.findall(r"(?:vLLM|outside|a vLLM of) (\d\.\d+ to \d\.\d+)", page.read_text())
    ]
    assert len(found) > 5
    assert [one for one in found if one[1] != known] == []


def test_every_page_names_the_kubernetes_that_the_chart_wants() -> None:
    wanted = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    found = {
        version
        for page in documentation_pages()
        for version in re.findall(r"Kubernetes (\d\.\d+) (?:or newer|and newer)", page.read_text())
    }
    assert found == {wanted}
