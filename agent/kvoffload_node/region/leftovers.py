"""What a region leaves on the node when it ends, also where no daemon had it open: files of pages, journals, the
catalog.

Runs in the node daemon, called by `daemon.py` at its end. Only names that `region.py` gives are touched, and files are
unlinked, never cut: an engine that still maps one keeps its pages until it ends.
"""

from pathlib import Path

from kvoffload_node.index.catalog import Catalog, catalog_path, read_catalog, write_catalog

REGION_FILES = "tenant-*.region"
JOURNALS = "tenant-*.journal"
ORDERS = "tenant-*.order"


def region_folder(mount: Path, pool: str) -> Path:
    """The pool's folder on its hugetlbfs (or tmpfs)."""
    return mount / f"kvoffload-{pool}"


def remove_region(folder: Path, state_folder: Path) -> None:
    """Give back what is ours. Of the catalog the epoch stays: an engine that outlives the region must never take the
    slots of a later one for those that it was given in this."""
    for path in (*folder.glob(REGION_FILES), *state_folder.glob(JOURNALS), *state_folder.glob(ORDERS)):
        path.unlink(missing_ok=True)
    catalog = read_catalog(catalog_path(state_folder))
    if catalog is not None:
        nothing = Catalog(boot_id="", extent_bytes=0, span_bytes=0, epoch=catalog.epoch)
        write_catalog(catalog_path(state_folder), nothing)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def release_region(state_folder: Path) -> None:
    """What is retained is the next region's of this pool's name, whatever its uid."""
    catalog = read_catalog(catalog_path(state_folder))
    if catalog is not None:
        catalog.region_uid = ""
        write_catalog(catalog_path(state_folder), catalog)
