"""Events are written once, and what the API server refuses for a good reason is no failure of ours."""

from typing import Any

import pytest

from kvoffload_operator.events import EventRecorder, Regarding
from kvoffload_operator.kube import ApiServerError, Resource


class EventsRefused:
    """An API server that answers every event with one error."""

    def __init__(self, error: ApiServerError) -> None:
        self.error = error
        self.num_asked = 0

    async def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self.num_asked += 1
        raise self.error


ENDING = "unable to create new content in namespace x because it is being terminated"


async def record_twice(error: ApiServerError) -> int:
    kube = EventsRefused(error)
    recorder = EventRecorder(kube, instance="operator-0")  # type: ignore[arg-type]
    for _ in range(2):
        await recorder.record(Regarding.pool("main", "uid"), reason="Ready", note="", warning=False)
    return kube.num_asked


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


async def test_a_right_that_is_missing_is_told() -> None:
    with pytest.raises(ApiServerError):
        await record_twice(ApiServerError(403, "Forbidden", 'cannot create resource "events"'))
