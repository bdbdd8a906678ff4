"""Events are written once, and what the API server refuses for a good reason is no failure of ours."""

import re
from typing import Any

import pytest

from kvoffload_operator.events import EventRecorder, Regarding
from kvoffload_operator.kube import ApiServerError, Resource


class EventsRefused:
    """An API server that answers every event with one error."""

    def __init__(self, error: ApiServerError) -> None:
        self.error = error
        self.asked: list[dict[str, Any]] = []

    async def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self.asked.append(manifest)
        raise self.error


ENDING = "unable to create new content in namespace x because it is being terminated"


async def record_twice(error: ApiServerError) -> int:
    kube = EventsRefused(error)
    recorder = EventRecorder(kube, instance="operator-0")  # type: ignore[arg-type]
    for _ in range(2):
        await recorder.record(Regarding.pool("main", "uid"), reason="Ready", note="", warning=False)
    return len(kube.asked)


@pytest.mark.parametrize(
    "error",
    [
        ApiServerError(409, "AlreadyExists", "exists"),
        ApiServerError(404, "NotFound", "no such namespace"),
        ApiServerError(403, "Forbidden", ENDING),
    ],
    ids=["written before", "namespace gone", "namespace ending"],
)
async def test_an_event_that_is_there_or_has_no_place_any_more_is_not_tried_again(error: ApiServerError) -> None:
    assert await record_twice(error) == 1


@pytest.mark.parametrize("name", ["a" * 199 + "-b", "a" * 199 + ".b", "a" * 198 + "-.b"])
async def test_a_cut_name_ends_as_a_name_may(name: str) -> None:
    kube = EventsRefused(ApiServerError(409, "AlreadyExists", "exists"))
    await EventRecorder(kube, instance="x").record(  # type: ignore[arg-type]
        Regarding.pod("team", name, "uid"), reason="Injected", note="", warning=False
    )
    (manifest,) = kube.asked
    assert re.fullmatch(r"a+\.[0-9a-f]{16}", manifest["metadata"]["name"])


@pytest.mark.parametrize("letter", ["a", "é", "€"])
async def test_a_note_has_no_more_bytes_than_the_api_server_takes(letter: str) -> None:
    kube = EventsRefused(ApiServerError(409, "AlreadyExists", "exists"))
    await EventRecorder(kube, instance="x").record(  # type: ignore[arg-type]
        Regarding.pool("main", "uid"), reason="Ready", note=letter * 2000, warning=False
    )
    (manifest,) = kube.asked
    assert 1000 < len(manifest["note"].encode()) <= 1024
    assert manifest["note"].endswith(f"{letter}…")


async def test_a_right_that_is_missing_is_told() -> None:
    with pytest.raises(ApiServerError):
        await record_twice(ApiServerError(403, "Forbidden", 'cannot create resource "events"'))
