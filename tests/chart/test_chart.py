"""The chart as helm renders it: hardened pods, permissions that are no wider than named, settings that the code knows.

What each value does is in the chart's own suites (charts/kvoffload/tests); test_manifests.py runs them.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cache import REPOSITORY
from hack.docs.settings_page import read_values
from kvoffload_operator.settings import Settings

CHART = REPOSITORY / "charts" / "kvoffload"
NAMESPACE = "kvoffload-system"
MODES = {
    "self": [],
    "cert-manager": ["webhook.certificates.mode=cert-manager", "webhook.certificates.issuerRef.name=mine"],
    "provided": [
        "webhook.certificates.mode=provided",
        "webhook.certificates.secretName=mine",
        "webhook.certificates.caBundle=TUlORQ==",
    ],
}


def render(helm: str, *values: str) -> list[dict[str, Any]]:
    sets = [argument for value in values for argument in ("--set", value)]
    command = [helm, "template", "kvoffload", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.37.0", *sets]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.fixture(scope="module")
def objects(helm: str) -> list[dict[str, Any]]:
    return render(helm, "operator.replicas=2")


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_every_template_makes_at_most_one_object() -> None:
    for path in CHART.glob("templates/*/*.yaml"):
        assert len(re.findall(r"^kind:", path.read_text(), re.MULTILINE)) == 1, path


def test_every_object_carries_the_recommended_labels(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "kvoffload", one["metadata"]["name"]
        assert one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm", one["metadata"]["name"]


@pytest.mark.parametrize("mode", MODES)
def test_pods_run_as_nobody_with_nothing_to_write_to(helm: str, mode: str) -> None:
    deployments = of_kind(render(helm, *MODES[mode]), "Deployment")
    assert set(deployments) == {"kvoffload-operator", "kvoffload-webhook-0", "kvoffload-webhook-1"}
    for deployment in deployments.values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]
            assert container["readinessProbe"]
            assert container["livenessProbe"]
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_what_the_chart_sets_is_what_the_settings_know(objects: list[dict[str, Any]]) -> None:
    known = {f"KVOFFLOAD_{name.upper()}" for name in Settings.model_fields}
    for deployment in of_kind(objects, "Deployment").values():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        names = [variable["name"] for variable in container["env"]]
        assert set(names) <= known
        assert len(names) == len(set(names))
        values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        parsed = {}
        for name, value in values.items():
            field = name.removeprefix("KVOFFLOAD_").lower()
            is_json = field in ("node_resources", "node_labels", "node_pod_annotations", "image_pull_secrets")
            parsed[field] = json.loads(value) if is_json else value
        Settings.model_validate(parsed)


def test_no_rule_has_a_wildcard_and_secrets_are_named(objects: list[dict[str, Any]]) -> None:
    roles = [one for one in objects if one["kind"] in ("Role", "ClusterRole")]
    assert len(roles) == 10
    for role in roles:
        for rule in role["rules"]:
            for part in ("apiGroups", "resources", "verbs"):
                assert "*" not in rule[part], role["metadata"]["name"]
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                assert rule["resourceNames"] == ["kvoffload-webhook-tls"]
                assert role["kind"] == "Role"
            assert not {"impersonate", "escalate", "bind"} & set(rule["verbs"])


def test_no_secret_can_be_touched_where_certificates_are_not_ours(helm: str) -> None:
    for mode in ("cert-manager", "provided"):
        objects = render(helm, *MODES[mode])
        for role in objects:
            for rule in role.get("rules", []):
                assert "secrets" not in rule.get("resources", []), role["metadata"]["name"]


def test_roles_for_people_are_bound_to_nobody(objects: list[dict[str, Any]]) -> None:
    roles = [one for one in objects if one["kind"] in ("Role", "ClusterRole")]
    unbound = {identity_of(role) for role in roles} - bound_roles(objects)
    people = {("ClusterRole", f"kvoffload-{name}") for name in ("viewer", "editor", "doctor")}
    assert unbound == people | {("Role", "kvoffload-doctor")}


def identity_of(role: dict[str, Any]) -> tuple[str, str]:
    return role["kind"], role["metadata"]["name"]


def bound_roles(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Kind and name of the roles that bindings name."""
    references = [one["roleRef"] for one in objects if "roleRef" in one]
    return {(reference["kind"], reference["name"]) for reference in references}


def test_the_webhook_can_hold_up_nobody(objects: list[dict[str, Any]]) -> None:
    configurations = of_kind(objects, "MutatingWebhookConfiguration")
    assert set(configurations) == {"kvoffload-webhook-0", "kvoffload-webhook-1"}
    for configuration in configurations.values():
        (webhook,) = configuration["webhooks"]
        assert webhook["failurePolicy"] == "Ignore"
        assert webhook["sideEffects"] == "None"
        assert webhook["timeoutSeconds"] == 2
        assert webhook["objectSelector"]["matchExpressions"] == [{"key": "kvoffload.io/pool", "operator": "Exists"}]
        (excluded,) = webhook["namespaceSelector"]["matchExpressions"]
        assert excluded["operator"] == "NotIn"
        assert set(excluded["values"]) == {"kube-system", NAMESPACE}
        assert webhook["rules"][0]["operations"] == ["CREATE"]
        assert "caBundle" not in webhook["clientConfig"], "the leader's"
    (validating,) = of_kind(objects, "ValidatingWebhookConfiguration").values()
    assert validating["webhooks"][0]["failurePolicy"] == "Ignore"


def test_the_schema_has_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(properties: dict[str, Any], given: dict[str, Any], path: str) -> None:
        assert set(properties) == set(given), path
        for name, child in properties.items():
            if "properties" in child and "claims" not in child["properties"]:
                compare(child["properties"], given[name], f"{path}.{name}")

    compare(schema["properties"], values, "values")


def test_every_value_is_set_by_a_case_that_renders() -> None:
    """Of the suites, whose asserts look at what comes of it. A case whose value the schema refuses does not count."""
    changed: set[str] = set()
    for path in CHART.glob("tests/*_test.yaml"):
        suite = yaml.safe_load(path.read_text())
        for case in suite["tests"]:
            if not any("failedTemplate" in one for one in case["asserts"]):
                changed |= set(leaves({**suite.get("set", {}), **case.get("set", {})}))
    for row in read_values((CHART / "values.yaml").read_text()):
        assert [key for key in changed if f"{key}.".startswith(f"{row.key}.")], f"no suite sets {row.key}"


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")


@pytest.mark.parametrize("value", ["0.25", "1", "0"])
def test_the_step_deadline_can_be_given_on_the_command_line(helm: str, value: str) -> None:
    """helm takes a number with a point in `--set` for a string."""
    deployments = [one for one in render(helm, f"engine.stepDeadlineSeconds={value}") if one["kind"] == "Deployment"]
    found = {
        variable["value"]
        for one in deployments
        for container in one["spec"]["template"]["spec"]["containers"]
        for variable in container["env"]
        if variable["name"] == "KVOFFLOAD_ENGINE_STEP_DEADLINE_SECONDS"
    }
    assert found == ({value} if float(value) else set())


def test_crds_are_not_templates() -> None:
    assert {path.name for path in Path(CHART / "crds").iterdir()} == {
        "kvoffload.io_kvoffloadpools.yaml",
        "kvoffload.io_kvoffloadregions.yaml",
    }
