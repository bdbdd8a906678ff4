"""The chart's own suites pass, and what it renders is what the API server's strict validation takes."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from hack.cache import REPOSITORY
from hack.chart import SCHEMA_LOCATION, ChartTools, crd_schema
from hack.cluster.settings import KUBERNETES_VERSION
from printed_commands import documentation_pages

CHART = REPOSITORY / "charts" / "kvoffload"
EXAMPLES = REPOSITORY / "examples"
DIGEST = "sha256:" + "a" * 64
VALUES = {
    "defaults": [],
    "several replicas": ["operator.replicas=3", "webhook.replicas=3"],
    "no replicas": ["operator.replicas=0", "webhook.replicas=0"],
    "switches off": ["networkPolicy.enabled=false", "node.priorityClass.create=false", "operator.applyCRDs=false"],
    "metrics for some": ["networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus"],
    "monitoring": [f"monitoring.{one}.enabled=true" for one in ("podMonitor", "prometheusRule", "dashboard")],
    "digests and pull secrets": [
        f"image.operator.digest={DIGEST}",
        f"image.node.digest={DIGEST}",
        "imagePullSecrets[0].name=mine",
    ],
    "placed": [
        f"{part}.{value}"
        for part in ("operator", "webhook")
        for value in (
            "nodeSelector.zone=a",
            "tolerations[0].operator=Exists",
            "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=zone",
            "priorityClassName=system-cluster-critical",
        )
    ],
    "a site's labels and registry": [
        "commonLabels.team=ml",
        "podAnnotations.note=mesh",
        "global.imageRegistry=registry.example.com/mirror",
        f"image.node.digest={DIGEST}",
    ],
    "cert-manager": ["webhook.certificates.mode=cert-manager", "webhook.certificates.issuerRef.name=mine"],
    "provided": [
        "webhook.certificates.mode=provided",
        "webhook.certificates.secretName=mine",
        "webhook.certificates.caBundle=TUlORQ==",
    ],
}


def render(helm: str, *values: str, file: Path = CHART / "values.yaml") -> str:
    sets = [f"--values={file}", *(argument for value in values for argument in ("--set", value))]
    command = [helm, "template", "kvoffload", str(CHART), "--namespace", "kv", "--include-crds", *sets]
    command += ["--kube-version", KUBERNETES_VERSION]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def our_schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the schemas of our own kinds."""
    folder = tmp_path_factory.mktemp("schemas")
    for path in (REPOSITORY / "crds").glob("*.yaml"):
        name, schema = crd_schema(yaml.safe_load(path.read_text()))
        (folder / name).write_text(json.dumps(schema))
    return folder


def check(tools: ChartTools, our_schemas: Path, *files: Path, stdin: str = "") -> tuple[list[str], int]:
    """What kubeconform refuses, a kind without a schema among it, and how many objects it found valid."""
    folders = (tools.schemas, tools.foreign_schemas, our_schemas)
    locations = [f"-schema-location={folder}/{SCHEMA_LOCATION}" for folder in folders]
    command = [tools.kubeconform, "-strict", "-summary", "-output=json", *locations]
    done = subprocess.run(
        [*command, *(files or ["-"])], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    answer = json.loads(done.stdout)
    return [f"{one['kind']} {one['name']}: {one['msg']}" for one in answer["resources"]], answer["summary"]["valid"]


def test_the_chart_s_own_suites_pass(tools: ChartTools) -> None:
    done = subprocess.run([tools.helm_unittest, "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    num_suites = len(list(CHART.glob("tests/*_test.yaml")))
    assert f"Test Suites: {num_suites} passed, {num_suites} total" in done.stdout


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_it_renders_is_valid(tools: ChartTools, our_schemas: Path, values: list[str]) -> None:
    text = render(str(tools.helm), *values)
    refused, num_valid = check(tools, our_schemas, stdin=text)
    assert refused == []
    assert num_valid == sum(one is not None for one in yaml.safe_load_all(text))


def test_values_that_a_page_shows_are_taken(tools: ChartTools, our_schemas: Path, tmp_path: Path) -> None:
    """Blocks of YAML whose keys are values of the chart."""
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    blocks = [
        block
        for page in documentation_pages()
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        if all(isinstance(one, dict) and set(one) & set(known) for one in yaml.safe_load_all(block))
    ]
    assert blocks
    for block in blocks:
        (tmp_path / "values.yaml").write_text(block)
        refused, _ = check(tools, our_schemas, stdin=render(str(tools.helm), file=tmp_path / "values.yaml"))
        assert refused == [], block


def test_the_examples_are_valid(tools: ChartTools, our_schemas: Path) -> None:
    files = [path for path in EXAMPLES.rglob("*.yaml") if "crds" not in path.parts]
    refused, num_valid = check(tools, our_schemas, *files)
    assert refused == []
    assert num_valid == sum(one is not None for path in files for one in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize(
    ("values", "written", "wrong", "said"),
    [
        ("defaults", "      serviceAccountName:", "      serviceAccount_Name:", "properties 'serviceAccount_Name'"),
        ("defaults", "maxSurge: 1", "maxSurge: true", "got boolean"),
        ("defaults", "failurePolicy: Ignore", "failurePolicy: [Ignore]", "got array, want string"),
        ("cert-manager", "  dnsNames:", "  dnsnames:", "additional properties 'dnsnames'"),
        ("monitoring", "relabelings:", "relabellings:", "additional properties 'relabellings'"),
        ("monitoring", "alert: KVOffloadNoHits", "alert: 1", "got number, want string"),
    ],
)
def test_a_mistake_in_a_template_is_found(
    tools: ChartTools, our_schemas: Path, values: str, written: str, wrong: str, said: str
) -> None:
    text = render(str(tools.helm), *VALUES[values])
    assert written in text
    refused, _ = check(tools, our_schemas, stdin=text.replace(written, wrong))
    assert any(said in one for one in refused)


def test_a_mistake_in_a_pool_is_found(tools: ChartTools, our_schemas: Path) -> None:
    pool = {"apiVersion": "kvoffload.io/v1alpha1", "kind": "KVOffloadPool", "metadata": {"name": "x"}}
    refused, _ = check(tools, our_schemas, stdin=json.dumps({**pool, "spec": {"capacity": "1Gi", "pagesize": "2Mi"}}))
    assert any("additional properties 'pagesize'" in one for one in refused)


def test_it_renders_the_same_bytes_each_time(helm: str) -> None:
    assert len({render(helm, *VALUES["monitoring"]) for _ in range(3)}) == 1


def test_its_tests_are_not_packaged(helm: str, tmp_path: Path) -> None:
    subprocess.run([helm, "package", CHART, "--destination", tmp_path], capture_output=True, check=True)
    (package,) = tmp_path.iterdir()
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert "kvoffload/templates/operator/role.yaml" in names
    assert "kvoffload/crds/kvoffload.io_kvoffloadpools.yaml" in names
    assert not [name for name in names if "/tests/" in name]
