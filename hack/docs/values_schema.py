"""The schema of the chart's values: types and descriptions from values.yaml, what a value may be from the table here.

python -m hack.docs.values_schema            write charts/kvoffload/values.schema.json
python -m hack.docs.values_schema --check    fail where the file differs

helm holds every install and upgrade against it. A key that values.yaml does not have is refused, so that a typo is.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import yaml

from hack.docs.settings_page import VALUES, read_keys

PATH = VALUES.with_name("values.schema.json")
Schema = dict[str, Any]

TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
"""Names of the user's own with a text each: labels, annotations, quantities."""
ABSOLUTE_PATH: Schema = {"pattern": "^/"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}
NAME: Schema = {"type": "string", "minLength": 1}
CLOSED: Schema = {"type": "object", "additionalProperties": False}

CONSTRAINTS: Mapping[str, Schema] = {
    "nameOverride": {"maxLength": 40, "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"},
    "image.*.repository": {"minLength": 1, "pattern": "^[^@ ]+$"},
    "image.*.digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {
        "items": {
            **CLOSED,
            "properties": {"name": {"description": "Name of the Secret.", **NAME}},
            "required": ["name"],
        }
    },
    "commonLabels": {
        "additionalProperties": {"type": "string", "maxLength": 63},
        "patternProperties": {r"^(app\.kubernetes\.io|helm\.sh|kvoffload\.io)/": False},
    },
    "podAnnotations": {"patternProperties": {r"^kvoffload\.io/": False}},
    "logLevel": {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]},
    "kubeletRootDir": ABSOLUTE_PATH,
    "hugetlbfs.paths": {"required": ["2Mi", "1Gi"]},
    "hugetlbfs.paths.*": ABSOLUTE_PATH,
    "operator.replicas": {"minimum": 0, "maximum": 5},
    "webhook.replicas": {"minimum": 0, "maximum": 3},
    "webhook.timeoutSeconds": {"minimum": 1, "maximum": 10},
    "webhook.certificates.mode": {"enum": ["self", "cert-manager", "provided"]},
    "webhook.certificates.days": {"minimum": 1, "maximum": 3650},
    "webhook.certificates.caBundle": {"pattern": "^[A-Za-z0-9+/=]*$"},
    "webhook.certificates.issuerRef": {"additionalProperties": True},
    "*.resources": {
        "properties": {
            "requests": {"description": "What the scheduler sets aside, by resource.", **TEXTS},
            "limits": {"description": "The most, by resource.", **TEXTS},
            "claims": {"description": "Names of resource claims.", "type": "array"},
        }
    },
    "*.tolerations": {"items": {"type": "object"}},
    "*.affinity": {"additionalProperties": True},
    "node.priorityClass.value": {"minimum": -(2**31), "maximum": 10**9},
    # helm takes a number with a point in --set for a string
    "engine.stepDeadlineSeconds": {
        "type": ["number", "string"],
        "minimum": 0,
        "maximum": 1,
        "pattern": r"^(0(\.[0-9]+)?|1(\.0+)?)$",
    },
    "networkPolicy.metricsFrom": {
        "items": {
            **CLOSED,
            "minProperties": 1,
            "properties": {
                "namespaceSelector": {"description": "Labels of namespaces.", "type": "object"},
                "podSelector": {"description": "Labels of pods.", "type": "object"},
                "ipBlock": {"description": "A range of addresses.", "type": "object"},
            },
        }
    },
    "monitoring.podMonitor.interval": {"pattern": "^[0-9]+(ms|s|m|h)$"},
    "monitoring.prometheusRule.additionalRuleLabels": {
        "patternProperties": {"^(alertname|severity|pool|node|reason)$": False}
    },
    "monitoring.prometheusRule.runbookUrl": {"pattern": r"^(https?://[^#\s]+)?$"},
    "monitoring.prometheusRule.alerts": {
        "additionalProperties": {
            **CLOSED,
            "properties": {
                "enabled": {"description": "Whether there is such a rule.", "type": "boolean"},
                "for": {"description": "How long it holds before it fires.", **DURATION},
                "severity": {"description": "Its label.", **NAME},
            },
        }
    },
    "monitoring.dashboard.namespace": {"maxLength": 63},
    "monitoring.dashboard.labels": TEXTS,
    # a parent chart's values for all of its charts
    "global": {"additionalProperties": True},
    "global.imageRegistry": {"pattern": "^([^/@ ]+(/[^/@ ]+)*)?$"},
}
"""By the value's name, in which `*` is any: what is added to the type that values.yaml shows, or put in its place."""

TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array"}


def build_schema() -> Schema:
    """The whole schema. Raises ValueError where a value has no comment, or a constraint no value."""
    text = VALUES.read_text()
    comments = {one.key: one.nearest if one.value else one.comment for one in read_keys(text)}
    unused = [name for name in CONSTRAINTS if not any(fnmatchcase(key, name) for key in comments)]
    if unused:
        raise ValueError(f"values.yaml has no {', '.join(unused)}: take the constraint away")
    schema = _object(yaml.safe_load(text), "", comments)
    return {"$schema": "https://json-schema.org/draft-07/schema#", "title": "kvoffload", **schema}


def _object(values: Mapping[str, Any], path: str, comments: Mapping[str, str]) -> Schema:
    properties = {name: _schema(value, f"{path}{name}", comments) for name, value in values.items()}
    return {**CLOSED, "properties": properties}


def _schema(value: Any, key: str, comments: Mapping[str, str]) -> Schema:
    if not comments[key]:
        raise ValueError(f"values.yaml says nothing about {key}: write a comment above it")
    schema: Schema = {"description": comments[key]}
    constraints = [constraint for name, constraint in CONSTRAINTS.items() if fnmatchcase(key, name)]
    if any(constraint is TEXTS or "properties" in constraint for constraint in constraints):
        schema |= CLOSED  # what is below is no key of values.yaml, but the constraint's
    elif isinstance(value, dict):
        schema |= _object(value, f"{key}.", comments) if value else TEXTS
    else:
        schema["type"] = TYPES[type(value)]
    for constraint in constraints:
        schema |= constraint
    if "enum" in schema:
        del schema["type"]
    return schema


def render() -> str:
    """The file's text."""
    return json.dumps(build_schema(), indent=2) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(prog="python -m hack.docs.values_schema", description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if PATH.exists() and PATH.read_text() == render():
        return 0
    if options.check:
        sys.stdout.write(f"{PATH} differs from values.yaml; run make generate\n")
        return 1
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
