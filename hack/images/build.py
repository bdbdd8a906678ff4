"""Build the product's images from the repository's own Dockerfiles, only when what they are made from changed."""

import os
from dataclasses import dataclass
from pathlib import Path

from hack.cache import REPOSITORY, cache_root, content_hash
from hack.cluster import lifecycle
from hack.cluster.settings import ClusterSettings
from hack.console import step
from hack.images.base import BUILD, PYTHON, ensure_base_image
from hack.images.storage import has_image, remove_other_tags, run_buildah
from hack.shell import run

CONTEXT = ("pyproject.toml", "requirements", "README.md", "LICENSE", "agent", "operator", ".dockerignore")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class ProductImage:
    """One image of ours, and the Dockerfile that makes it."""

    repository: str
    dockerfile: Path


OPERATOR = ProductImage("localhost/kvoffload/operator", REPOSITORY / "operator" / "Dockerfile")
NODE = ProductImage("localhost/kvoffload/node", REPOSITORY / "agent" / "Dockerfile")


@dataclass(frozen=True, slots=True)
class BuiltImages:
    """The images that a cluster needs, all built: the base of the vLLM pods, and ours with one tag."""

    python: str
    tag: str

    @property
    def all(self) -> tuple[str, ...]:
        """Every image by name and tag."""
        return (self.python, f"{OPERATOR.repository}:{self.tag}", f"{NODE.repository}:{self.tag}")


def build_images(*, log: Path) -> BuiltImages:
    """Build what changed. The tag is `dev-` and a hash of everything that goes into our images."""
    python, build = ensure_base_image(PYTHON, log=log), ensure_base_image(BUILD, log=log)
    tag = "dev-" + content_hash([REPOSITORY / name for name in CONTEXT], python, build)
    for product in (OPERATOR, NODE):
        image = f"{product.repository}:{tag}"
        if not has_image(image):
            with step(f"Building {image} (log: {log})"):
                _build(product, image=image, python=python, build=build, log=log)
    return BuiltImages(python=python, tag=tag)


def _build(product: ProductImage, *, image: str, python: str, build: str, log: Path) -> None:
    site = ["--build-arg", f"SSL_CERT_FILE={CERTIFICATES}"] if os.environ.get("SSL_CERT_FILE") else []
    volumes = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.exists() else []
    run_buildah(
        "build", "--layers", "--isolation=chroot", "--pull=never", *site, *volumes,
        "--build-arg", f"BASE_IMAGE={python}", "--build-arg", f"BUILD_IMAGE={build}",
        "--file", product.dockerfile, "--tag", image, "--tag", f"{product.repository}:dev", REPOSITORY,
        log=log,
    )  # fmt: skip
    remove_other_tags(product.repository, keep=[image, f"{product.repository}:dev"])


def load_images(images: BuiltImages, settings: ClusterSettings) -> None:
    """Import into the cluster's runtime what it does not hold yet."""
    held = set(lifecycle.list_images(settings))
    for image in images.all:
        if image in held:
            continue
        with step(f"Loading {image} into the cluster"):
            archive = cache_root() / "image-archives" / "image.tar"
            archive.parent.mkdir(parents=True, exist_ok=True)
            archive.unlink(missing_ok=True)
            try:
                run_buildah("push", "--quiet", image, f"docker-archive:{archive}:{image}")
                lifecycle.load_image(archive, settings)
            finally:
                archive.unlink(missing_ok=True)
            repository = image.rpartition(":")[0]
            run(lifecycle.ctr(settings, "images", "tag", "--force", image, f"{repository}:dev"))
