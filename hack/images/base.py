"""Base images without a registry: Debian made by debootstrap, once per list of packages."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hack.cache import cache_root, content_hash
from hack.console import step
from hack.images.storage import has_image, remove_other_tags, run_buildah
from hack.shell import run

SUITE = "bookworm"
# left out of the image: package files, lists and documents; /dev is the runtime's
EXCLUDED = ("./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*",
            "./usr/share/man/*", "./usr/share/locale/*", "./var/log/*")  # fmt: skip


@dataclass(frozen=True, slots=True)
class BaseImage:
    """One Debian base image: its repository, and what it has beside Debian's minimum."""

    repository: str
    packages: tuple[str, ...]

    @property
    def image(self) -> str:
        """Name and tag; the tag changes with the content asked for."""
        return f"{self.repository}:{SUITE}-{content_hash([], *self.packages, *EXCLUDED)}"


# what the images are based on, and what the vLLM pods of the demo run in (their Python and vLLM are mounted)
PYTHON = BaseImage("localhost/kvoffload/base-python", ("python3", "ca-certificates", "libnuma1"))
# the same with what a build stage needs
BUILD = BaseImage("localhost/kvoffload/base-build", (*PYTHON.packages, "python3-venv"))


def ensure_base_image(base: BaseImage, *, log: Path) -> str:
    """Make the base image if our storage lacks it; returns its name."""
    if has_image(base.image):
        return base.image
    with step(f"Making the base image {base.image} by debootstrap (log: {log})"):
        packages = cache_root() / "debian-packages"
        packages.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="kvoffload-base-"))
        try:
            root, archive = folder / "root", folder / "root.tar"
            options = ["--variant=minbase", f"--cache-dir={packages}", f"--include={','.join(base.packages)}"]
            run(["debootstrap", *options, SUITE, root], log=log)
            run(["tar", "-C", root, "-cf", archive, *(f"--exclude={pattern}" for pattern in EXCLUDED), "."], log=log)
            container = run_buildah("from", "scratch").strip()
            run_buildah("add", "--quiet", container, archive, "/", log=log)
            run_buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container, log=log)
            run_buildah("commit", "--quiet", "--rm", container, base.image, log=log)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        remove_other_tags(base.repository, keep=[base.image])
    return base.image
