# ruff: noqa: E501 -- a table of Markdown has one line a row
"""docs/reference/api.md, from the generated CRDs: every field with its type, bounds, default and description.

Called by `hack.docs.reference`. The text about changes stands here because no schema can carry it.
"""

from typing import Any

from hack.docs.settings_page import HEADER
from kvoffload.api.schema import build_crds

Schema = dict[str, Any]

INTRODUCTION = """\
# API `kvoffload.io/v1alpha1`

Both kinds are cluster-scoped. An administrator writes `KVOffloadPool` (`kvpool`); the operator makes one
`KVOffloadRegion` (`kvregion`) for each pool and node, and nobody else should write those. The same text is in
`kubectl explain kvpool.spec`.

```yaml
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: main}
spec:
  nodeSelector: {nvidia.com/gpu.present: "true"}
  capacity: 100Gi
  pageSize: 2Mi
```

A pool's name is a DNS label of at most 40 characters. Quantities are exact: `107374182400`, `100Gi`, `0.5Gi` and `1e11`
are whole numbers of bytes, and what is no multiple of the page size is refused with the two nearest multiples.

## What a change does

| change | what happens |
|---|---|
| `capacity` up | regions are told at once; daemons are replaced node by node (at most 10 % at a time) with the larger limit, keep their blocks, and take the new pages where the node has them |
| `capacity` down | regions are told at once; each daemon gives back what no engine uses and reports `ShrinkWaits`, with the number of extents and who holds them, while blocks in use are in the way; pods get the smaller limit after the last region has shrunk |
| `quotas`, `replicatedLayout`, `maxEnginesPerNode`, `namespaceSelector`, `numaPolicy` | take effect on running daemons; engines that are attached stay |
| `nodeSelector`, or a node's labels | nodes that no longer match lose region, daemon and label (the pages go by `reclaimPolicy`); new ones get them |
| `tolerations`, `fallback`, `hugetlbfsMount` | daemons are replaced node by node |
| `pageSize`, `sharing` | refused: make a second pool |
| `mode: Paused` | engines are detached, pages and blocks are kept, pods created now are left alone |
| `mode: Observe` | a pool that has nothing makes nothing; one that had daemons keeps them and refuses engines |
| deleting the pool | regions, daemons and labels go; pages are freed unless `reclaimPolicy: Retain`; pods serve on without offload |
"""


def build_api_page() -> str:
    """The whole page."""
    parts = [HEADER, INTRODUCTION.strip()]
    for crd in build_crds().values():
        kind = crd["spec"]["names"]["kind"]
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        parts.append(f"## {kind}\n\n{root['description']}")
        for part in ("spec", "status"):
            parts.append(f"### {kind} {part}\n\n{_table(root['properties'][part])}")
            parts.append(_rules(root["properties"][part]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(schema: Schema) -> str:
    rows = ["| field | type | default | description |", "|---|---|---|---|"]
    rows += _rows(schema, "")
    return "\n".join(rows)


def _rows(schema: Schema, prefix: str) -> list[str]:
    rows = []
    required = schema.get("required", [])
    for name, child in schema.get("properties", {}).items():
        default = "required" if name in required else _default(child)
        description = child["description"].replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {_type(child)} | {default} | {description} |")
        if child.get("type") == "array":
            rows += _rows(child["items"], f"{prefix}{name}[].")
        else:
            rows += _rows(child, f"{prefix}{name}.")
    return rows


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    if value in ({}, []) or isinstance(value, dict):
        return "empty"
    return "empty" if value == "" else f"`{getattr(value, 'value', value)}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" if value else "empty" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    match schema["type"]:
        case "array":
            return f"list of {_type(schema['items'])}, at most {schema['maxItems']}"
        case "object" if "additionalProperties" in schema:
            return f"map, at most {schema['maxProperties']}"
        case "integer":
            least, most = schema["minimum"], schema["maximum"]
            return f"integer, at least {least}" if most >= 2**31 else f"integer, {least} to {most}"
        case "string" if schema.get("format") == "date-time":
            return "time"
        case "string":
            return f"string, at most {schema['maxLength']}"
        case other:
            return str(other)


def _rules(schema: Schema) -> str:
    rules = schema.get("x-kubernetes-validations", [])
    if not rules:
        return ""
    return "Refused by the API server:\n\n" + "\n".join(
        f"- `{rule['fieldPath'][1:]}`: {rule['message']}" for rule in rules
    )
