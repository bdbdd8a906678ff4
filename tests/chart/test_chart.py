"""The chart as helm renders it: hardened pods, permissions that are no wider than named, values that are checked."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cache import REPOSITORY, cache_root
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


@pytest.fixture(scope="module")
def helm() -> str:
    found = sorted((cache_root() / "programs").glob("helm-*/helm"))
    if not found:
        pytest.skip("needs helm: `make cluster-up` builds it")
    return str(found[-1])


def try_render(helm: str, *values: str) -> subprocess.CompletedProcess[str]:
    sets = [argument for value in values for argument in ("--set", value)]
    command = [helm, "template", "kvoffload", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.37.0", *sets]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def render(helm: str, *values: str) -> list[dict[str, Any]]:
    done = try_render(helm, *values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


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
    assert set(deployments) == {"kvoffload-operator", "kvoffload-webhook"}
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
            is_json = field in ("node_resources", "image_pull_secrets")
            parsed[field] = json.loads(value) if is_json else value
        Settings.model_validate(parsed)


def test_no_rule_has_a_wildcard_and_secrets_are_named(objects: list[dict[str, Any]]) -> None:
    roles = [one for one in objects if one["kind"] in ("Role", "ClusterRole")]
    assert len(roles) == 6
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
        for role in render(helm, *MODES[mode]):
            for rule in role.get("rules", []):
                assert "secrets" not in rule.get("resources", []), role["metadata"]["name"]


def test_the_webhook_can_hold_up_nobody(objects: list[dict[str, Any]]) -> None:
    (configuration,) = of_kind(objects, "MutatingWebhookConfiguration").values()
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


def test_given_certificates_are_mounted_and_trusted(helm: str) -> None:
    objects = render(helm, *MODES["provided"])
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        (configuration,) = of_kind(objects, kind).values()
        assert configuration["webhooks"][0]["clientConfig"]["caBundle"] == "TUlORQ=="
    pod = of_kind(objects, "Deployment")["kvoffload-webhook"]["spec"]["template"]["spec"]
    assert next(one for one in pod["volumes"] if one["name"] == "tls")["secret"]["secretName"] == "mine"


def test_cert_manager_s_certificate_names_the_service(helm: str) -> None:
    objects = render(helm, *MODES["cert-manager"])
    (certificate,) = of_kind(objects, "Certificate").values()
    assert f"kvoffload-webhook.{NAMESPACE}.svc" in certificate["spec"]["dnsNames"]
    (configuration,) = of_kind(objects, "MutatingWebhookConfiguration").values()
    wanted = f"{NAMESPACE}/{certificate['metadata']['name']}"
    assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == wanted


def test_daemons_never_preempt_a_user_s_pod(objects: list[dict[str, Any]]) -> None:
    (priority,) = of_kind(objects, "PriorityClass").values()
    assert priority["preemptionPolicy"] == "Never"


def test_two_replicas_have_a_disruption_budget_and_one_has_none(helm: str, objects: list[dict[str, Any]]) -> None:
    assert set(of_kind(objects, "PodDisruptionBudget")) == {"kvoffload-operator", "kvoffload-webhook"}
    one_each = render(helm, "operator.replicas=1", "webhook.replicas=1")
    assert not of_kind(one_each, "PodDisruptionBudget")


def test_images_by_digest_win_over_tags(helm: str) -> None:
    digest = "sha256:" + "a" * 64
    objects = render(helm, f"image.operator.digest={digest}", "image.operator.tag=x", "image.node.tag=y")
    for deployment in of_kind(objects, "Deployment").values():
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"kvoffload/operator@{digest}"
    environment = of_kind(objects, "Deployment")["kvoffload-operator"]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    assert {"name": "KVOFFLOAD_NODE_IMAGE", "value": "kvoffload/node:y"} in environment


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("operator.replica=2", "replica"),
        ("webhook.certificates.mode=none", "mode"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("kubeletRootDir=var/lib/kubelet", "kubeletRootDir"),
        ("logLevel=debug", "logLevel"),
        ("webhook.certificates.mode=cert-manager", "name an issuer, for example --set"),
        ("webhook.certificates.mode=provided", "set webhook.certificates.secretName"),
        ("webhook.certificates.secretName=x", "set webhook.certificates.mode=provided"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_or_what_to_set_instead(helm: str, value: str, said: str) -> None:
    done = try_render(helm, value)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_schema_has_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(properties: dict[str, Any], given: dict[str, Any], path: str) -> None:
        assert set(properties) == set(given), path
        for name, child in properties.items():
            if "properties" in child and "claims" not in child["properties"]:
                compare(child["properties"], given[name], f"{path}.{name}")

    compare(schema["properties"], values, "values")


def test_crds_are_not_templates() -> None:
    assert {path.name for path in Path(CHART / "crds").iterdir()} == {
        "kvoffload.io_kvoffloadpools.yaml",
        "kvoffload.io_kvoffloadregions.yaml",
    }
