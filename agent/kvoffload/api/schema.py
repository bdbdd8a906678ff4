"""The CRDs, generated from the models: `python -m kvoffload.api.schema crds/` writes them, with `--check` compares.

Turns pydantic's JSON schema into a structural one: references are put in, `anyOf` with null becomes an optional field,
titles go, and what the models carry as `x-kubernetes-*` stays.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvoffload.api.keys import GROUP, POOL_PLURAL, REGION_PLURAL, VERSION
from kvoffload.api.pool import (
    MAX_POOL_NAME_LENGTH,
    POOL_COLUMNS,
    POOL_NAME_PATTERN,
    KVOffloadPool,
    KVOffloadPoolSpec,
    KVOffloadPoolStatus,
)
from kvoffload.api.region import REGION_COLUMNS, KVOffloadRegion, KVOffloadRegionSpec, KVOffloadRegionStatus

Schema = dict[str, Any]

_DROPPED = ("title", "$defs", "readOnly")
_POOL_NAME_RULE = {
    "rule": f"size(self.metadata.name) <= {MAX_POOL_NAME_LENGTH} && self.metadata.name.matches('{POOL_NAME_PATTERN}')",
    "messageExpression": "'metadata.name ' + self.metadata.name + ' must be a DNS label (lower case letters, digits "
    f"and -) of at most {MAX_POOL_NAME_LENGTH} characters'",
    "message": f"metadata.name must be a DNS label of at most {MAX_POOL_NAME_LENGTH} characters",
}


def structural_schema(model: type[BaseModel]) -> Schema:
    """OpenAPI v3 structural schema of a model, without references."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    if model.model_computed_fields:  # written, never read: only the other mode has them
        schema["properties"] = (
            model.model_json_schema(by_alias=True, mode="serialization")["properties"] | schema["properties"]
        )
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        overrides = {key: value for key, value in schema.items() if key != "$ref"}
        return _structural({**target, **overrides}, definitions)
    if "anyOf" in schema and "x-kubernetes-int-or-string" not in schema:
        (only,) = (option for option in schema["anyOf"] if option.get("type") != "null")
        overrides = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        return _structural({**only, **overrides}, definitions)
    result: Schema = {}
    for key, value in schema.items():
        if key in _DROPPED:
            continue
        if key == "properties":
            result[key] = {name: _structural(child, definitions) for name, child in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            result[key] = _structural(value, definitions)
        elif key == "propertyNames":
            continue  # not part of a structural schema; the operator checks label keys
        elif key == "const":
            result["enum"] = [value]
        elif key == "description":
            result[key] = " ".join(value.split())
        else:
            result[key] = value
    if result.get("type") == "integer":
        result["format"] = "int64"
    return result


def _crd(
    kind: str,
    *,
    model: type[BaseModel],
    spec: type[BaseModel],
    status: type[BaseModel],
    plural: str,
    short_name: str,
    columns: list[dict[str, str | int]],
    rules: list[dict[str, str]],
) -> Schema:
    root: Schema = {
        "description": model.__doc__,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "apiVersion of this representation of the object."},
            "kind": {"type": "string", "description": "kind of the object."},
            "metadata": {"type": "object"},
            "spec": structural_schema(spec),
            "status": structural_schema(status),
        },
    }
    if rules:
        root["x-kubernetes-validations"] = rules
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["kvoffload"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def build_crds() -> dict[str, Schema]:
    """Both CRDs by file name."""
    return {
        f"{GROUP}_{POOL_PLURAL}.yaml": _crd(
            "KVOffloadPool",
            model=KVOffloadPool,
            spec=KVOffloadPoolSpec,
            status=KVOffloadPoolStatus,
            plural=POOL_PLURAL,
            short_name="kvpool",
            columns=POOL_COLUMNS,
            rules=[_POOL_NAME_RULE],
        ),
        f"{GROUP}_{REGION_PLURAL}.yaml": _crd(
            "KVOffloadRegion",
            model=KVOffloadRegion,
            spec=KVOffloadRegionSpec,
            status=KVOffloadRegionStatus,
            plural=REGION_PLURAL,
            short_name="kvregion",
            columns=REGION_COLUMNS,
            rules=[],
        ),
    }


def fields_only_in(crd: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted paths of the fields that `crd` has in our API version and `other` has not, sorted."""
    return sorted(_fields_of(crd) - _fields_of(other))


def _fields_of(crd: Mapping[str, Any]) -> set[str]:
    ours = [one for one in crd.get("spec", {}).get("versions", []) if one["name"] == VERSION]
    return {path for one in ours for path in field_paths(one["schema"]["openAPIV3Schema"])}


def field_paths(schema: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Dotted paths of all properties of a structural schema."""
    paths: set[str] = set()
    for name, child in schema.get("properties", {}).items():
        paths.add(f"{prefix}{name}")
        paths |= field_paths(child, f"{prefix}{name}.")
    if isinstance(schema.get("items"), Mapping):
        paths |= field_paths(schema["items"], f"{prefix.removesuffix('.')}[].")
    return paths


def render(crd: Schema) -> str:
    """The YAML text of a CRD."""
    plain = json.loads(json.dumps(crd))  # enums and tuples become what YAML knows, and no aliases are written
    header = "# Generated by `python -m kvoffload.api.schema` from agent/kvoffload/api; do not edit.\n"
    return header + str(yaml.safe_dump(plain, sort_keys=False, width=110, allow_unicode=True))


def main(arguments: list[str] | None = None) -> int:
    """Write or compare; 1 where a file differs."""
    parser = argparse.ArgumentParser(prog="python -m kvoffload.api.schema", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="where the files are, such as crds charts/kvoffload/crds")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a file differs")
    options = parser.parse_args(arguments)
    stale = []
    for folder in options.folders:
        for name, crd in build_crds().items():
            path, text = folder / name, render(crd)
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path)
            if not options.check:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in stale:
        print(f"{path}: {'differs from the models; run make generate' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
