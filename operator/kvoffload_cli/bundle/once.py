"""A reader that asks for each thing once, so that doctor's findings and the bundle are of the same objects."""

from collections.abc import Callable, Mapping
from typing import Any

from kvoffload_cli.kube import Denied, Reader, ReadFailed


class OnceReader:
    """Remembers lists and objects, and what was refused. Logs, metrics and tries go through."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._answers: dict[tuple[str, ...], Any] = {}

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """All objects of a collection."""
        ask = lambda: self._reader.list_objects(path, labels=labels, fields=fields)  # noqa: E731
        answer: list[dict[str, Any]] = self._once(("list", path, labels, fields), ask)
        return answer

    def get(self, path: str) -> dict[str, Any] | None:
        """One object, None where there is none."""
        answer: dict[str, Any] | None = self._once(("get", path), lambda: self._reader.get(path))
        return answer

    def text(self, path: str, *, query: Mapping[str, str] | None = None) -> str:
        """What a path answers that is no object."""
        return self._reader.text(path, query=query)

    def admit(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """What would be stored of a new object, which is not (dry run)."""
        return self._reader.admit(path, manifest)

    def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        if key not in self._answers:
            try:
                self._answers[key] = ask()
            except (Denied, ReadFailed) as error:
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer
