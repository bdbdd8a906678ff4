"""The images' command: `python -m hack.images [--load]`. Called by `make image`."""

import argparse

from hack.cache import cache_root
from hack.cluster.packages import ensure_packages
from hack.cluster.settings import ClusterSettings
from hack.console import main_guard, require_root, say
from hack.images.build import build_images, load_images


def main() -> None:
    """Build what changed, load it when asked to, and print the names."""
    parser = argparse.ArgumentParser(prog="python -m hack.images", description=__doc__)
    parser.add_argument("--load", action="store_true", help="import the images into the running local cluster")
    options = parser.parse_args()
    require_root("building images needs root: debootstrap and buildah change their root folder")
    settings = ClusterSettings.from_environment()
    log = cache_root() / "logs" / "images.log"
    ensure_packages(log)
    images = build_images(log=log)
    if options.load:
        load_images(images, settings)
    for image in images.all:
        say(image)


if __name__ == "__main__":
    main_guard(main)
