"""Other names for namespaces, pods and nodes, the same wherever a name stands. Pure but for the key. For --redact."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any

TOKEN = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9.]*[A-Za-z0-9])?")
"""Everything that could be a name, or names with dots between them, as a region's is."""
NAMESPACED = re.compile(r"([a-z0-9][-a-z0-9]*)/([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?)")


class Pseudonyms:
    """Names and what stands for them, by a key that nobody keeps: who knows a name cannot look for it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._by_name: dict[str, str] = {}
        self._namespaces: set[str] = set()

    def add(self, kind: str, names: Iterable[str]) -> None:
        """Learn names of a kind: `namespace`, `pod`, `node`."""
        for name in filter(None, names):
            digest = hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()
            self._by_name.setdefault(name, f"{kind}-{digest[:10]}")
            if kind == "namespace":
                self._namespaces.add(name)

    def learn(self, text: str) -> None:
        """Learn the names that stand behind a known namespace and a slash, as those of pods that are gone do."""
        self.add("pod", (name for namespace, name in NAMESPACED.findall(text) if namespace in self._namespaces))

    def renamed(self, content: Any) -> Any:
        """A document or a text with every known name replaced; no key of a document is a name."""
        if isinstance(content, str):
            return TOKEN.sub(lambda found: self._replace(found[0]), content)
        if isinstance(content, dict):
            return {key: self.renamed(value) for key, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.renamed(one) for one in content]
        return content

    def _replace(self, token: str) -> str:
        if token in self._by_name or "." not in token:
            return self._by_name.get(token, token)
        head, _, tail = token.partition(".")
        return f"{self._replace(head)}.{self._replace(tail)}"
