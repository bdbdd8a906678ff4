"""The generated CRDs keep the API rules of the project, and the files in the repository are what the models say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoffload.api.pool import KVOffloadPoolSpec
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.api.schema import build_crds, main, render

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "crds", ROOT / "charts" / "kvoffload" / "crds")
CRDS = {name: yaml.safe_load(render(crd)) for name, crd in build_crds().items()}
Schema = dict[str, Any]


def walk(schema: Schema, path: str, name: str = "") -> Iterator[tuple[str, str, Schema]]:
    """Every schema below, with its path and the field's name (empty for items and values)."""
    yield path, name, schema
    for field, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{field}", field)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}[]")


def root_of(crd: Schema) -> Schema:
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def all_schemas(part: str) -> list[tuple[str, str, Schema]]:
    return [found for crd in CRDS.values() for found in walk(root_of(crd)["properties"][part], part, part)]


def test_the_files_in_the_repository_are_what_the_models_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", *map(str, FOLDERS)]) == 0, capsys.readouterr().out


def test_check_names_a_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path)])
    stale = next(tmp_path.iterdir())
    stale.write_text(stale.read_text() + "# edited\n")
    assert main(["--check", str(tmp_path)]) == 1
    assert str(stale) in capsys.readouterr().out.splitlines()[-1]


def test_no_field_is_a_float() -> None:
    for path, _, schema in all_schemas("spec") + all_schemas("status"):
        assert schema.get("type") != "number", path
        assert schema.get("format") not in ("float", "double"), path


def test_every_list_map_and_string_is_bounded() -> None:
    for path, name, schema in all_schemas("spec") + all_schemas("status"):
        match schema.get("type"):
            case "array":
                assert "maxItems" in schema, path
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, path
            case "string":
                bounded = {"maxLength", "enum"} & set(schema) or schema.get("format") == "date-time"
                assert bounded, path
        assert schema.get("x-kubernetes-preserve-unknown-fields") is None, (path, name)


def test_counts_of_bytes_are_int64() -> None:
    found = 0
    for path, name, schema in all_schemas("spec") + all_schemas("status"):
        if name.endswith("Bytes"):
            found += 1
            assert schema["type"] == "integer", path
            assert schema["format"] == "int64", path
            assert schema["minimum"] >= 0, path
    assert found > 10


def test_every_integer_has_a_minimum_and_a_maximum_that_a_double_holds_exactly() -> None:
    for path, _, schema in all_schemas("spec") + all_schemas("status"):
        if schema.get("type") == "integer":
            assert float(schema["maximum"]) == schema["maximum"] <= 2**60, path
            assert "minimum" in schema, path


def test_every_field_is_described_beginning_with_its_name() -> None:
    for path, name, schema in all_schemas("spec") + all_schemas("status"):
        if name not in ("", "spec", "status"):
            first = schema["description"].split()[0].rstrip(":,.")
            assert first == name, f"{path}: {schema['description']}"


def test_every_field_of_the_spec_has_a_default_or_is_required() -> None:
    may_be_absent = {"namespaceSelector", "limit", "tolerationSeconds"}  # absence means something, and is described
    for path, _, schema in all_schemas("spec"):
        for field, child in schema.get("properties", {}).items():
            assert "default" in child or field in schema.get("required", []) or field in may_be_absent, (
                f"{path}.{field}"
            )
            if field in may_be_absent:
                assert "absent" in child["description"], f"{path}.{field}"


def test_lists_say_how_they_are_merged_and_conditions_are_list_maps() -> None:
    for path, name, schema in all_schemas("spec") + all_schemas("status"):
        if schema.get("type") != "array":
            continue
        if schema["items"].get("type") == "object":
            assert schema["x-kubernetes-list-type"] in ("map", "atomic"), path
        if name == "conditions":
            assert schema["x-kubernetes-list-type"] == "map", path
            assert schema["x-kubernetes-list-map-keys"] == ["type"], path


def test_the_schema_is_structural() -> None:
    for crd in CRDS.values():
        for path, _, schema in walk(root_of(crd), "$"):
            assert not {"$ref", "title", "propertyNames", "const", "$defs"} & set(schema), path
            typed = "type" in schema or schema.get("x-kubernetes-int-or-string")
            assert typed, path
            if "anyOf" in schema:
                assert schema["x-kubernetes-int-or-string"] is True, path


def test_kinds_are_cluster_scoped_with_short_names_status_and_columns() -> None:
    short = {}
    for crd in CRDS.values():
        spec = crd["spec"]
        (version,) = spec["versions"]
        assert spec["scope"] == "Cluster"
        assert version["subresources"] == {"status": {}}
        assert version["name"] == "v1alpha1"
        names = {column["name"] for column in version["additionalPrinterColumns"]}
        assert {"Ready", "Capacity", "Used", "Engines", "Age"} <= names
        short[spec["names"]["kind"]] = spec["names"]["shortNames"]
    assert short == {"KVOffloadPool": ["kvpool"], "KVOffloadRegion": ["kvregion"]}


def test_every_printer_column_points_at_a_field_that_exists() -> None:
    for crd in CRDS.values():
        known = {path.removeprefix("$") for path, _, _ in walk(root_of(crd), "$")}
        for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
            path = column["jsonPath"]
            if "[?(" in path:
                path = path.split("[?(")[0]
            if not path.startswith(".metadata"):
                assert path in known, column


def test_every_rule_has_a_message_and_a_field() -> None:
    rules = [
        rule
        for crd in CRDS.values()
        for _, _, schema in walk(root_of(crd), "$")
        for rule in schema.get("x-kubernetes-validations", [])
    ]
    assert len(rules) >= 8
    for rule in rules:
        assert rule["message"], rule
        assert "fieldPath" in rule or "metadata.name" in rule["rule"], rule


@pytest.mark.parametrize("model", [KVOffloadPoolSpec, KVOffloadRegionSpec])
def test_what_the_api_server_defaults_is_what_the_model_defaults(model: type[KVOffloadPoolSpec]) -> None:
    name = "kvoffload.io_kvoffloadpools.yaml" if model is KVOffloadPoolSpec else "kvoffload.io_kvoffloadregions.yaml"
    defaults = {
        field: child["default"]
        for field, child in root_of(CRDS[name])["properties"]["spec"]["properties"].items()
        if "default" in child
    }
    least = (
        {"capacity": "64Mi"}
        if model is KVOffloadPoolSpec
        else {"poolName": "p", "nodeName": "n", "capacityBytes": 0, "pageSizeBytes": 4096}
    )
    assert model.model_validate(least) == model.model_validate({**defaults, **least})
    assert set(defaults) | set(least) >= {
        info.alias for info in model.model_fields.values() if not (info.default is None and not info.is_required())
    }
