"""What the chart's tests run: helm, helm-unittest, kubeconform, promtool, and JSON schemas of all Kubernetes kinds.

`python -m hack.chart` builds what the cache lacks; run by `make test-unit` before tests/chart. kubeconform would fetch
schemas from the network; ours are written from the OpenAPI documents that the Go module of Kubernetes carries, which
the cluster is built from as well, so that manifests are held against the very version that they are tried on, and from
other projects' CRDs (hack/foreign_crds.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.cache import cache_root, made_whole
from hack.cluster.packages import PROMTOOL, ensure_packages
from hack.cluster.programs import PROGRAMS, GoProgram, download_module, ensure_program
from hack.cluster.settings import KUBERNETES_VERSION
from hack.console import main_guard, step
from hack.foreign_crds import FOREIGN_CRDS, VERSIONS, find_foreign_crd

HELM = next(program for program in PROGRAMS if program.name == "helm")
HELM_UNITTEST = GoProgram(
    name="helm-unittest",
    version="1.1.2",
    module="github.com/helm-unittest/helm-unittest",
    packages=("github.com/helm-unittest/helm-unittest/cmd/helm-unittest",),
    binaries=("helm-unittest",),
    replaces="github.com/vmware-labs/yaml-jsonpath v0.3.2 => github.com/helm-unittest/yaml-jsonpath v0.4.0",
)
KUBECONFORM = GoProgram(
    name="kubeconform",
    version="0.8.0",
    module="github.com/yannh/kubeconform",
    packages=("github.com/yannh/kubeconform/cmd/kubeconform",),
    binaries=("kubeconform",),
)
SCHEMA_LOCATION = "{{.Group}}-{{.ResourceAPIVersion}}-{{.ResourceKind}}.json"
"""Name of a kind's schema as kubeconform spells it: kind in small letters; the core group is `v1`, as its version."""

_PROSE = ("default", "description", "example")


@dataclass(frozen=True, slots=True)
class ChartTools:
    """Paths in the cache."""

    helm: Path
    helm_unittest: Path
    kubeconform: Path
    schemas: Path
    """Folder of one strict JSON schema a kind, named by SCHEMA_LOCATION."""
    foreign_schemas: Path
    """The same for FOREIGN_CRDS."""

    @property
    def are_there(self) -> bool:
        """Everything is in the cache."""
        paths = (self.helm, self.helm_unittest, self.kubeconform, self.schemas, self.foreign_schemas)
        return all(path.exists() for path in paths)


def find_chart_tools() -> ChartTools:
    """Return where the tools are, or will be."""
    return ChartTools(
        helm=HELM.folder / "helm",
        helm_unittest=HELM_UNITTEST.folder / "helm-unittest",
        kubeconform=KUBECONFORM.folder / "kubeconform",
        schemas=cache_root() / "programs" / f"kubernetes-schemas-{KUBERNETES_VERSION}",
        foreign_schemas=cache_root() / "programs" / f"crd-schemas-{VERSIONS}",
    )


def ensure_chart_tools() -> ChartTools:
    """Build and write what the cache lacks."""
    tools = find_chart_tools()
    ensure_packages(cache_root() / "logs" / "chart.log", PROMTOOL)
    for program in (HELM, HELM_UNITTEST, KUBECONFORM):
        ensure_program(program, log=cache_root() / "logs" / "chart.log")
    if not tools.schemas.exists():
        with step(f"Writing JSON schemas from Kubernetes {KUBERNETES_VERSION}'s OpenAPI documents"):
            documents = download_module("k8s.io/kubernetes", KUBERNETES_VERSION) / "api" / "openapi-spec" / "v3"
            with made_whole(tools.schemas) as target:
                for path in sorted(documents.glob("*__v*_openapi.json")):
                    for name, schema in kind_schemas(json.loads(path.read_text())):
                        (target / name).write_text(json.dumps(schema))
    if not tools.foreign_schemas.exists():
        with step("Writing JSON schemas from other projects' CRDs"), made_whole(tools.foreign_schemas) as target:
            for kind in FOREIGN_CRDS:
                name, schema = crd_schema(yaml.safe_load(find_foreign_crd(kind).read_text()))
                (target / name).write_text(json.dumps(schema))
    return tools


def kind_schemas(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file name and JSON schema of every kind of an OpenAPI v3 document, with all that it refers to inside.

    Strict: a property that the API does not have is refused, as the API server's own strict validation does.
    """
    definitions = {
        name: make_strict(schema) for name, schema in document.get("components", {}).get("schemas", {}).items()
    }
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            needed = {one: definitions[one] for one in _referred_to(name, definitions)}
            file_name = f"{kind['group'] or kind['version']}-{kind['version']}-{kind['kind'].lower()}.json"
            yield file_name, {"$ref": f"#/definitions/{name}", "definitions": needed}


def crd_schema(crd: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return file name and strict JSON schema of the one version of a CustomResourceDefinition."""
    (version,) = crd["spec"]["versions"]
    schema = make_strict(version["schema"]["openAPIV3Schema"])
    # what the API server knows of every object
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    return f"{crd['spec']['group']}-{version['name']}-{crd['spec']['names']['kind'].lower()}.json", schema


def make_strict(schema: Any) -> Any:
    """Return a schema whose objects take no property that they do not name, and whose references stay inside it."""
    if isinstance(schema, list):
        return [make_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: make_strict(value) for key, value in schema.items() if key not in ("properties", *_PROSE)}
    if "$ref" in schema:
        strict["$ref"] = schema["$ref"].replace("#/components/schemas/", "#/definitions/")
    if "properties" in schema:
        strict["properties"] = {name: make_strict(child) for name, child in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    return strict


def _referred_to(name: str, definitions: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [reference.removeprefix("#/definitions/") for reference in _references(definitions[one])]
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):  # JSONSchemaProps has a property of that name
                yield value
            else:
                yield from _references(value)


def main() -> None:
    """Make the tools ready."""
    ensure_chart_tools()


if __name__ == "__main__":
    main_guard(main)
