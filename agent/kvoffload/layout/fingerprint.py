"""The identity of an engine's KV bytes: equal digests only where equal keys mean equal bytes.

Pure, standard library only. The engine collects the fields (`kvoffload_engine.identity`), the daemon makes a
namespace of keys from the digest. Whatever changes what a page holds, or what a key stands for, must be a field;
whatever does not (names of pods, hosts and served models, ports) must not be.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

FORMAT_VERSION = 1
"""Raised when our own layout of a part changes: older bytes are then not hit."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest and the fields that it was made of, which the engine's log shows at DEBUG."""

    digest: bytes
    fields: Mapping[str, object]


def fingerprint(fields: Mapping[str, object]) -> Fingerprint:
    """SHA-256 over the fields as canonical JSON. Raises TypeError for a value that has no stable JSON form.

    No default conversion: an object's repr may hold an address, and two engines would never share.
    """
    named = {"format": FORMAT_VERSION, **fields}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Fingerprint(hashlib.sha256(text.encode()).digest(), named)
