"""How huge pages are reserved on a node: one wording for conditions, `doctor`, `plan` and the node daemon's own words.

Pure. The commands raise the node's number of pages, and leave a larger one alone: other programs may use the rest, or
an administrator has reserved the pages already and the kubelet, which counts them only when it starts, does not know.
"""

from kvoffload.api.pool import PageSize

SYSCTL_FILE = "/etc/sysctl.d/90-kvoffload.conf"
MEMINFO = "/proc/meminfo"
RESTART_KUBELET = "systemctl restart kubelet"


def pages_file(size: PageSize, name: str = "nr_hugepages") -> str:
    """The kernel's file with a count of pages of this size: `nr_hugepages` all of them, `free_hugepages`."""
    return f"/sys/kernel/mm/hugepages/hugepages-{size.num_bytes >> 10}kB/{name}"


def raise_to(size: PageSize, num_pages: int) -> str:
    """A shell line that raises the number of pages on the node to `num_pages`."""
    return f"n=$(cat {pages_file(size)}); [ $n -ge {num_pages} ] || n={num_pages}; {_keep(size)}"


def raise_beside_others(size: PageSize, num_pages: int) -> str:
    """A shell line that raises the number of pages so far that `num_pages` are free, beside those in use."""
    want = f"want=$(( n - $(cat {pages_file(size, 'free_hugepages')}) + {num_pages} ))"
    return f"n=$(cat {pages_file(size)}); {want}; [ $n -ge $want ] || n=$want; {_keep(size)}"


def _keep(size: PageSize) -> str:
    """2Mi: set `n` now and at every boot. 1Gi: print the kernel arguments to boot with.

    sysctl counts pages of the kernel's default size: with `default_hugepagesz=1G` it would ask for 512 times as much.
    """
    if size is PageSize.GI_1:
        return "echo hugepagesz=1G hugepages=$n"
    is_default = f"grep -q '^Hugepagesize: *2048 kB' {MEMINFO}"
    return f"{is_default} && echo vm.nr_hugepages=$n > {SYSCTL_FILE} && sysctl -p {SYSCTL_FILE}"


def reserve_remedy(size: PageSize, num_pages: int) -> str:
    """What to do on a node whose kubelet must know of `num_pages` pages in all."""
    command = raise_to(size, num_pages)
    if size is PageSize.GI_1:
        return (
            f"on the node put what `{command}` prints on the kernel's command line and reboot; where it has "
            f"{num_pages} already, `{RESTART_KUBELET}` alone"
        )
    return (
        f"on the node run `{command}`, which never lowers the number and stays over a reboot, then "
        f"`{RESTART_KUBELET}`, which counts pages only when it starts; where it has {num_pages} already, the "
        "restart alone"
    )
