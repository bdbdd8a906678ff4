"""What the cluster needs from this machine: huge pages, mounts, cgroups and a network namespace.

Every `ensure_` looks at the machine, does what is missing and records it; every `release_` undoes what is recorded.

```
 this host  172.30.7.254 --veth-- 172.30.7.1  namespace `kvo`: node0, API server :6443, etcd (loopback)
            route 10.245.0.0/24 via .1        bridge cni0 10.245.0.1 -- pods
```
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from hack.cluster.record import MachineRecord
from hack.cluster.settings import ClusterSettings
from hack.console import StepError, say, wait_until
from hack.shell import is_successful, run

HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGETLBFS = Path("/dev/hugepages")
NODE_STATE = Path("/var/lib/kvoffload")  # where the chart keeps the daemons' state on a node
MANAGED_MOUNTS = NODE_STATE / "mounts"  # and pools with `hugetlbfsMount: Managed` make their mounts
CGROUPS = Path("/sys/fs/cgroup")
NAMESPACES = Path("/run/netns")
CPU_SHARES = "8192"  # of eight processes: all pods together would otherwise weigh as much as one process outside
CGROUP_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids")


def read_hugepages(what: str) -> int:
    """Read one of the kernel's counters of 2 MiB pages: `nr`, `free` or `resv`."""
    return int((HUGEPAGES / f"{what}_hugepages").read_text())


def read_mount_points(kind: str | None = None) -> list[Path]:
    """Return the mount points of this machine in the order of mounting, of one file system type or of all."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(row[1].replace("\\040", " ")) for row in rows if kind is None or row[2] == kind]


def ensure_hugepages(settings: ClusterSettings, record: MachineRecord) -> bool:
    """Reserve this cluster's pages beside those that others reserved; True when their number changed."""
    missing = settings.num_hugepages - record.hugepages_added
    if missing <= 0:
        return False
    counter = HUGEPAGES / "nr_hugepages"
    before = read_hugepages("nr")
    record.hugepages_added += missing
    record.write(settings.run)
    counter.write_text(str(before + missing))
    reserved = read_hugepages("nr")
    if reserved < before + missing:
        record.hugepages_added -= before + missing - reserved
        record.write(settings.run)
        release_hugepages(settings, record)
        raise StepError(
            f"asked the kernel for {missing} pages of 2 MiB beside the {before} that there were, got "
            f"{reserved - before}: memory is too full or too fragmented; free some, or lower "
            "KVOFFLOAD_CLUSTER_HUGEPAGES"
        )
    say(f"    {missing} pages of 2 MiB reserved (now {reserved} on this machine)")
    return True


def release_hugepages(settings: ClusterSettings, record: MachineRecord) -> None:
    """Lower the kernel's number of pages by what this cluster added."""
    if record.hugepages_added:
        (HUGEPAGES / "nr_hugepages").write_text(str(max(0, read_hugepages("nr") - record.hugepages_added)))
        record.hugepages_added = 0
        record.write(settings.run)
    if left := read_hugepages("nr"):
        say(
            f"    {left} pages of 2 MiB stay, which this cluster did not reserve; where a condition's remedy did, "
            "docs/uninstall.md says how they are given back"
        )


def ensure_mounts(settings: ClusterSettings, record: MachineRecord) -> None:
    """Mount hugetlbfs, and on a machine with a hybrid cgroup hierarchy the hugetlb controller."""
    if HUGETLBFS not in read_mount_points("hugetlbfs"):
        HUGETLBFS.mkdir(exist_ok=True)
        _mount(["-t", "hugetlbfs", "-o", "pagesize=2M", "hugetlbfs"], HUGETLBFS, settings, record)
    if not is_cgroup_v2() and CGROUPS / "hugetlb" not in read_mount_points("cgroup"):
        (CGROUPS / "hugetlb").mkdir(exist_ok=True)
        _mount(["-t", "cgroup", "-o", "hugetlb", "hugetlb"], CGROUPS / "hugetlb", settings, record)
    if not NODE_STATE.exists() and str(NODE_STATE) not in record.folders:
        record.folders.append(str(NODE_STATE))
        record.write(settings.run)
    if MANAGED_MOUNTS not in read_mount_points():
        # mounts made by a pool's init container reach the node, as they do where systemd makes the root shared
        MANAGED_MOUNTS.mkdir(parents=True, exist_ok=True)
        _mount(["--bind", str(MANAGED_MOUNTS)], MANAGED_MOUNTS, settings, record)
        run(["mount", "--make-shared", MANAGED_MOUNTS])


def release_regions(settings: ClusterSettings, record: MachineRecord) -> None:
    """Remove what daemons that could not clean up left on hugetlbfs: the pages are counted until the files are gone."""
    others = [path for path in settings.run_parent.glob("*/state.json") if path.parent != settings.run]
    if others:
        return  # another cluster's daemons keep their files on the same mount
    for folder in HUGETLBFS.glob("kvoffload-*"):
        if folder.name not in record.regions_before:
            shutil.rmtree(folder)


def release_mounts(settings: ClusterSettings, record: MachineRecord) -> None:
    """Unmount what lies below the cluster's folders, and what `ensure_mounts` mounted."""
    own = (settings.state, settings.run)
    below = [path for path in read_mount_points() if any(path.is_relative_to(folder) for folder in own)]
    mounted = [Path(path) for path in reversed(record.mounts)]
    if NAMESPACES in mounted and any(NAMESPACES.iterdir()):
        mounted.remove(NAMESPACES)  # somebody else uses it by now
    for path in [*reversed(below), *mounted]:
        if path in read_mount_points():
            run(["umount", "-l", path])
    if str(CGROUPS / "hugetlb") in record.mounts:
        (CGROUPS / "hugetlb").rmdir()
    record.mounts.clear()
    record.write(settings.run)


def _mount(options: list[str], target: Path, settings: ClusterSettings, record: MachineRecord) -> None:
    record.mounts.append(str(target))
    record.write(settings.run)
    run(["mount", *options, target])


def is_cgroup_v2() -> bool:
    """The machine has the unified hierarchy at /sys/fs/cgroup."""
    return (CGROUPS / "cgroup.controllers").exists()


def cgroup_folders(settings: ClusterSettings) -> list[Path]:
    """Return the cluster's cgroup in every hierarchy: two kubelets below one root would delete each other's pods."""
    if is_cgroup_v2():
        return [CGROUPS / settings.name]
    return [path / settings.name for path in sorted(CGROUPS.iterdir()) if path.is_dir() and path.name != "unified"]


def ensure_cgroups(settings: ClusterSettings) -> None:
    """Make the cluster's cgroup root."""
    if is_cgroup_v2():
        available = (CGROUPS / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{name}" for name in CGROUP_V2_CONTROLLERS if name in available)
        (CGROUPS / "cgroup.subtree_control").write_text(wanted)
    for folder in cgroup_folders(settings):
        folder.mkdir(exist_ok=True)
        if folder.parent.name == "cpuset":
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((folder.parent / name).read_text())
        if (folder / "cpu.shares").exists():
            (folder / "cpu.shares").write_text(CPU_SHARES)


def read_cgroup_processes(settings: ClusterSettings) -> set[int]:
    """Return the ids of all processes in the cluster's cgroups: its pods, and nothing else."""
    return {
        int(line)
        for folder in cgroup_folders(settings)
        if folder.is_dir()
        for listing in folder.rglob("cgroup.procs")
        for line in listing.read_text().split()
    }


def release_cgroups(settings: ClusterSettings) -> None:
    """Remove the cluster's cgroups once the processes that were killed in them are reaped."""
    wait_until(
        "the pods' processes to be gone",
        lambda: not read_cgroup_processes(settings),
        timeout_seconds=20,
        explain=lambda: f"still there: {sorted(read_cgroup_processes(settings))}",
    )
    for root in (*cgroup_folders(settings), CGROUPS / "unified" / settings.name):
        if root.is_dir():
            for folder, _, _ in os.walk(root, topdown=False):
                Path(folder).rmdir()


def ensure_network(settings: ClusterSettings, record: MachineRecord) -> None:
    """Make the node's namespace, the veth pair, and the routes between this host and the pods."""
    name, host_end = settings.name, f"{settings.name}-h"
    if NAMESPACES not in read_mount_points():
        record.mounts.append(str(NAMESPACES))  # `ip netns add` mounts the folder on itself
        record.write(settings.run)
    if settings.namespace_path not in read_mount_points("nsfs"):
        settings.namespace_path.unlink(missing_ok=True)  # left by a reboot where /run is on a disk
        run(["ip", "netns", "add", name])
    run(["ip", "-n", name, "link", "set", "lo", "up"])
    if not is_successful(["ip", "link", "show", host_end]):
        run(["ip", "link", "add", host_end, "type", "veth", "peer", "name", "eth0", "netns", name])
    run(["ip", "addr", "replace", f"{settings.host_address}/24", "dev", host_end])
    run(["ip", "link", "set", host_end, "up"])
    run(["ip", "-n", name, "addr", "replace", f"{settings.node_address}/24", "dev", "eth0"])
    run(["ip", "-n", name, "link", "set", "eth0", "up"])
    run(["ip", "-n", name, "route", "replace", "default", "via", settings.host_address])
    run(["ip", "route", "replace", settings.pod_cidr, "via", settings.node_address])


def _read_used_namespaces() -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.add(link.stat().st_ino)
    return found


def release_network(settings: ClusterSettings, record: MachineRecord) -> None:
    """Remove the namespaces (the pods' too), the veth pair and with it the route."""
    used = _read_used_namespaces()
    for entry in sorted(NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []:
        is_pods = re.fullmatch(r"cni-[0-9a-f-]+", entry.name) and entry.name not in record.namespaces_before
        # our pods have no process any more; who has one belongs to another runtime
        if entry.name == settings.name or (is_pods and entry.stat().st_ino not in used):
            run(["ip", "netns", "del", entry.name])
    if is_successful(["ip", "link", "show", f"{settings.name}-h"]):
        run(["ip", "link", "del", f"{settings.name}-h"])
