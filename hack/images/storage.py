"""buildah with its storage inside our cache, so that images survive between runs and the user's own stay untouched."""

from collections.abc import Sequence
from pathlib import Path

from hack.cache import cache_root
from hack.shell import is_successful, run

RUN_ROOT = Path("/run/kvoffload-images")


def storage_root() -> Path:
    """Return the folder of image layers."""
    return cache_root() / "containers"


def buildah(*arguments: str | Path) -> list[str]:
    """Return a buildah command on our storage. Chroot isolation: the host's network, and no runtime to configure."""
    return ["buildah", "--root", str(storage_root()), "--runroot", str(RUN_ROOT), *(str(part) for part in arguments)]


def run_buildah(*arguments: str | Path, log: Path | None = None) -> str:
    """Run buildah and return its standard output (empty with a log)."""
    return run(buildah(*arguments), log=log)


def has_image(image: str) -> bool:
    """The storage holds this image."""
    return is_successful(buildah("inspect", "--type", "image", image), timeout_seconds=60)


def remove_other_tags(repository: str, *, keep: Sequence[str]) -> None:
    """Remove the images of a repository but those named, so that the storage does not grow with every change."""
    listed = run_buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()
    for image in listed:
        if image.rpartition(":")[0] == repository and image not in keep:
            run_buildah("rmi", "--force", image)
