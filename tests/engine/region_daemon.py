"""A daemon that writes its region's status, for the engine's tests."""

from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess


class RegionDaemon(DaemonProcess):
    """One that writes its status to a (scripted) API server."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, from_api=True, **options)

    def __enter__(self) -> "RegionDaemon":
        assert self.api is not None
        self.api.make_region("first")
        self.api.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        assert self.api is not None
        self.api.stop()

    def engines(self) -> list[dict[str, Any]]:
        """The region's `status.engines`, as it was last told."""
        assert self.api is not None
        return list(self.api.statuses[-1].get("engines", [])) if self.api.statuses else []
