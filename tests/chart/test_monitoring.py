"""The chart's monitoring templates: nothing without its switch; what the switches bring is tested elsewhere."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_rendering import CHART, render
from hack.cache import REPOSITORY
from hack.docs import dashboard

SWITCHES = ("podMonitor", "prometheusRule", "dashboard")


@pytest.fixture(scope="module")
def switched_on(helm: str) -> dict[str, list[dict[str, Any]]]:
    labels = "monitoring.podMonitor.labels.release=prom,monitoring.prometheusRule.labels.release=prom"
    return render(helm, *(f"monitoring.{switch}.enabled=true" for switch in SWITCHES), labels)


def test_all_is_off_by_default(helm: str) -> None:
    objects = render(helm)
    assert not {"PodMonitor", "PrometheusRule"} & set(objects)
    assert "ConfigMap" not in objects


def test_pod_monitor_selects_our_pods_and_gives_daemons_pool_and_node(switched_on: dict[str, Any]) -> None:
    (monitor,) = switched_on["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ns"]}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    deployments = [one["spec"]["template"]["metadata"]["labels"] for one in switched_on["Deployment"]]
    assert len(deployments) == 3
    assert all(wanted <= labels.items() for labels in deployments)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = [
        port["name"]
        for one in switched_on["Deployment"]
        for container in one["spec"]["template"]["spec"]["containers"]
        for port in container["ports"]
    ]
    assert ports.count(endpoint["port"]) == 3
    assert {"pool", "node"} <= {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]}


def test_prometheus_rule_holds_the_tested_rules(switched_on: dict[str, Any]) -> None:
    (rule,) = switched_on["PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((CHART / "rules" / "kvoffload.yaml").read_text())


def test_changed_rules_are_rules_and_every_other_stays_as_tested(helm: str, tmp_path: Path) -> None:
    changes = "alerts.KVOffloadNoHits.enabled=false,alerts.KVOffloadRefusals.for=1h,runbookUrl=https://x/runbook/"
    sets = [f"monitoring.prometheusRule.{one}" for one in ("enabled=true", *changes.split(","))]
    (rule,) = render(helm, *sets)["PrometheusRule"]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((CHART / "rules" / "kvoffload.yaml").read_text())["groups"][0]["rules"]
    expected = {one["alert"]: one for one in tested if one["alert"] != "KVOffloadNoHits"}
    expected["KVOffloadRefusals"]["for"] = "1h"
    anchors = set(re.findall(r"^## (\w+)$", (REPOSITORY / "docs/runbook.md").read_text(), flags=re.MULTILINE))
    for one in rule["spec"]["groups"][0]["rules"]:
        address, _, anchor = one["annotations"].pop("runbook_url").partition("#")
        assert address == "https://x/runbook/"
        assert anchor in {name.lower() for name in anchors}
        assert one == expected.pop(one["alert"])
    assert not expected


def test_dashboard_is_the_generated_one_with_the_sidecars_label(switched_on: dict[str, Any]) -> None:
    (config_map,) = switched_on["ConfigMap"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["kvoffload.json"]) == dashboard.build_dashboard()
