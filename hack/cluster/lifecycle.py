"""Bring the cluster up and down.

`up` looks at each part and starts only what is missing or has another configuration, so that it is a no-op on a running
cluster and mends a half-started one. `down` works from the record and the pid files, whatever state they are in, and
can be repeated.

The huge pages are reserved before the kubelet starts: it reads the node's capacity then. When more are asked for later,
the kubelet is started again; pods keep running meanwhile.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster import machine, processes
from hack.cluster.archive import write_single_file_image
from hack.cluster.configuration import READERS, component_commands, configuration_files
from hack.cluster.packages import ensure_packages
from hack.cluster.pki import ensure_pki
from hack.cluster.programs import ensure_programs
from hack.cluster.record import MachineRecord
from hack.cluster.settings import PAUSE_IMAGE, ClusterSettings
from hack.console import StepError, require_root, say, step, wait_until
from hack.shell import is_successful, run

CONTROL_PLANE = ("etcd", "apiserver", "controller-manager", "scheduler")
NODE = ("containerd", "kubelet", "proxy")
NEEDS_ROOT = "the local cluster needs root: network namespaces, mounts, cgroups and huge pages are made"


def up(settings: ClusterSettings) -> None:
    """Make the cluster run; returns when its node is Ready."""
    require_root(NEEDS_ROOT)
    with _locked(settings):
        settings.logs.mkdir(parents=True, exist_ok=True)
        build_log = settings.logs / "build.log"
        ensure_packages(build_log)
        programs = ensure_programs(build_log)
        has_pages = MachineRecord.read(settings.run).hugepages_added >= settings.num_hugepages
        if has_pages and not find_outdated(settings) and is_ready(settings):
            say(f"==> The cluster {settings.name} is running")
            return
        with step(f"Starting the cluster {settings.name} (logs: {settings.logs})"):
            _start_all(settings, programs)


def _start_all(settings: ClusterSettings, programs: list[Path]) -> None:
    record = MachineRecord.read(settings.run)
    if record.is_new and settings.run.exists():
        shutil.rmtree(settings.run)  # sockets, addresses and process ids of another boot
    record.write(settings.run)
    _link_programs(settings, programs)
    ensure_pki(settings)
    for program in find_outdated(settings):
        processes.stop(program, settings)
    for name, content in configuration_files(settings).items():
        (settings.state / name).parent.mkdir(parents=True, exist_ok=True)
        (settings.state / name).write_text(content)
    machine.ensure_mounts(settings, record)
    if machine.ensure_hugepages(settings, record):
        processes.stop("kubelet", settings)
    machine.ensure_network(settings, record)
    machine.ensure_cgroups(settings)
    _ensure_started("etcd", settings)
    _ensure_started("apiserver", settings)
    _wait_for("apiserver", "the API server", settings, lambda: is_api_ready(settings), timeout_seconds=90)
    _ensure_started("controller-manager", settings)
    _ensure_started("scheduler", settings)
    _ensure_started("containerd", settings)
    _wait_for("containerd", "containerd", settings, lambda: is_successful(ctr(settings, "version")), timeout_seconds=30)
    if PAUSE_IMAGE not in list_images(settings):
        write_single_file_image(programs[-1], image=PAUSE_IMAGE, target=settings.run / "pause.tar")
        load_image(settings.run / "pause.tar", settings)
    _ensure_started("kubelet", settings)
    _ensure_started("proxy", settings)
    _wait_for("kubelet", "the node to be Ready", settings, lambda: is_ready(settings), timeout_seconds=120)


def down(settings: ClusterSettings) -> None:
    """End every process of the cluster and give back what it changed on this machine; the logs stay."""
    require_root(NEEDS_ROOT)
    with _locked(settings), step(f"Stopping the cluster {settings.name}"):
        record = MachineRecord.read(settings.run)
        processes.stop("kubelet", settings)
        _end_pods(settings)
        for name in (*reversed(NODE), *reversed(CONTROL_PLANE)):
            processes.stop(name, settings)
        machine.release_cgroups(settings)
        machine.release_network(settings, record)
        machine.release_regions(settings, record)
        machine.release_mounts(settings, record)
        machine.release_hugepages(settings, record)
        _remove_container_log_links(settings)
        for path in (*map(Path, record.folders), *_stored_paths(settings), settings.run):
            _remove(path)
        _report_what_is_left(settings)


def find_outdated(settings: ClusterSettings) -> list[str]:
    """Programs that were started with another configuration than they would be now, as before a pull of this clone."""
    files = configuration_files(settings)
    written = {name: settings.state / name for name in READERS}
    return [READERS[name] for name, path in written.items() if path.exists() and path.read_text() != files[name]]


def is_api_ready(settings: ClusterSettings) -> bool:
    """The API server answers that it is ready."""
    return is_successful([*kubectl(settings), "get", "--raw", "/readyz"])


def is_ready(settings: ClusterSettings) -> bool:
    """Every program of the cluster lives and the node is Ready."""
    if any(processes.find_running(name, settings) is None for name in (*CONTROL_PLANE, *NODE)):
        return False
    return is_successful(
        [*kubectl(settings), "wait", "--for=condition=Ready", f"node/{settings.node_name}", "--timeout=1s"]
    )


def kubectl(settings: ClusterSettings) -> list[str]:
    """Return the beginning of a kubectl command for this cluster."""
    return [f"{settings.binaries}/kubectl", f"--kubeconfig={settings.kubeconfig}"]


def ctr(settings: ClusterSettings, *arguments: str) -> list[str]:
    """Return a containerd client command in the namespace of Kubernetes' containers."""
    return [
        f"{settings.binaries}/ctr",
        "--address",
        str(settings.containerd_socket),
        "--namespace",
        "k8s.io",
        *arguments,
    ]


def list_images(settings: ClusterSettings) -> list[str]:
    """Return the names of the images that the runtime holds."""
    return run(ctr(settings, "images", "ls", "-q")).split()


def load_image(archive: Path, settings: ClusterSettings) -> None:
    """Import a docker or OCI archive into the runtime."""
    run(ctr(settings, "images", "import", str(archive)))


def _ensure_started(name: str, settings: ClusterSettings) -> None:
    if processes.find_running(name, settings) is None:
        processes.start(name, component_commands(settings)[name], settings)


def _wait_for(
    name: str, described: str, settings: ClusterSettings, is_true: Callable[[], bool], *, timeout_seconds: float
) -> None:
    log = settings.logs / f"{name}.log"

    def holds() -> bool:
        if processes.find_running(name, settings) is None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise StepError(f"{name} ended while we waited for {described}:\n{tail}", log=log)
        return is_true()

    wait_until(described, holds, timeout_seconds=timeout_seconds, log=log)


def _link_programs(settings: ClusterSettings, programs: list[Path]) -> None:
    settings.binaries.mkdir(parents=True, exist_ok=True)
    for program in programs:
        link = settings.binaries / program.name
        if not link.is_symlink() or link.readlink() != program:
            link.unlink(missing_ok=True)
            link.symlink_to(program)


def _end_pods(settings: ClusterSettings) -> None:
    """End every process in the cluster's cgroups, then the shims that waited for them."""
    for pid in machine.read_cgroup_processes(settings):
        processes.end_process(pid, patience_seconds=0)
    for pid in processes.find_shims(settings):
        processes.end_process(pid, patience_seconds=2)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _stored_paths(settings: ClusterSettings) -> list[Path]:
    return [path for path in settings.state.iterdir() if path != settings.logs] if settings.state.is_dir() else []


def _remove_container_log_links(settings: ClusterSettings) -> None:
    """The kubelet keeps links to its containers' logs in one fixed folder."""
    folder = Path("/var/log/containers")
    for link in folder.iterdir() if folder.is_dir() else []:
        if link.is_symlink() and link.readlink().is_relative_to(settings.logs):
            link.unlink()


def _report_what_is_left(settings: ClusterSettings) -> None:
    left = [f"process {pid}" for pid in processes.find_shims(settings)]
    left += [f"mount {path}" for path in machine.read_mount_points() if path.is_relative_to(settings.state)]
    left += [f"cgroup {path}" for path in machine.cgroup_folders(settings) if path.exists()]
    left += [str(path) for path in (settings.namespace_path, settings.run) if path.exists()]
    if left:
        raise StepError(f"could not give back: {', '.join(left)}")


@contextmanager
def _locked(settings: ClusterSettings) -> Iterator[None]:
    """Two commands at once would mend each other's half-done work."""
    settings.state.mkdir(parents=True, exist_ok=True)
    settings.logs.mkdir(parents=True, exist_ok=True)
    with (settings.logs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("    waiting for another cluster command to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
