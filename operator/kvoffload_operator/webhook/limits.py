"""Limits of the API server and of the kernel that a pod may reach only with our part: then we leave our part out.

Runs in the webhook, called by `injection.py`; pure.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.api.keys import WEBHOOK_REPLICA_ANNOTATION

MAX_ANNOTATION_BYTES = 256 << 10
"""The API server's limit for names and values of all annotations of an object; it denies a pod with more."""
MAX_POD_BYTES = 1 << 20
"""As JSON. etcd takes 1.5 MiB, and after us the API server notes who set each field."""
MAX_VARIABLE_BYTES = 128 << 10
"""Linux's limit for `NAME=value` with its end: with a longer one no process starts."""


def find_excess(pod: Mapping[str, Any], annotations: Mapping[str, str], operations: Sequence[Mapping[str, Any]]) -> str:
    """Which limit the pod would pass with these annotations and operations, with both numbers; empty if none."""
    together = {**(pod["metadata"].get("annotations") or {}), **annotations, WEBHOOK_REPLICA_ANNOTATION: "0"}
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in together.items())
    if num_bytes > MAX_ANNOTATION_BYTES:
        return f"the annotations would have {num_bytes} bytes with ours, the API server takes {MAX_ANNOTATION_BYTES}"
    num_bytes = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in (pod, operations))
    if num_bytes > MAX_POD_BYTES:
        return f"the pod would have {num_bytes} bytes with our part, at most {MAX_POD_BYTES} are injected"
    for operation in operations:
        for variable in _variables(operation):
            num_bytes = len(f"{variable['name']}={variable.get('value', '')}".encode()) + 1
            if num_bytes > MAX_VARIABLE_BYTES:
                return f"{variable['name']} would have {num_bytes} bytes, Linux takes {MAX_VARIABLE_BYTES}"
    return ""


def _variables(operation: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Environment variables that an operation sets."""
    if "/env" not in operation["path"]:
        return ()
    value = operation["value"]
    return value if isinstance(value, list) else [value]
