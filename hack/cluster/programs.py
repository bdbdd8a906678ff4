"""Build Kubernetes, etcd, containerd, helm and the pause program from their Go modules, once per version.

Run by `cluster up`. Nothing here needs root or a running cluster. An interrupted build is resumed by Go's own cache.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hack.cache import cache_root, content_hash, made_whole
from hack.cluster.settings import CONTAINERD_VERSION, ETCD_VERSION, HELM_VERSION, KUBERNETES_VERSION
from hack.console import StepError, say, step
from hack.shell import run

GO_DIRECTIVE = "1.26.0"
COMPILER_GOGC = "400"
"""For the compiler itself: with Go's default a quarter of a build is its garbage collection (etcd: 113 s, so 83 s)."""
PAUSE_SOURCE = """// The process that holds a pod's namespaces: it waits for the signal to end, and reaps its orphans.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signal.Ignore(syscall.SIGCHLD)
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	<-end
}
"""


@dataclass(frozen=True, slots=True)
class GoProgram:
    """Programs of one Go module: the packages to build, and the files that come of them."""

    name: str
    version: str
    module: str
    packages: tuple[str, ...]
    binaries: tuple[str, ...]
    flags: str = ""
    tags: str = ""
    replaces_staging: bool = False
    replaces: str = ""
    """A replacement that the module's own go.mod names: Go heeds only the main module's."""
    main: Path | None = None
    """A main.go of ours over the module's packages, where the module has no program to build; `packages` is empty."""

    @property
    def folder(self) -> Path:
        """Folder in the cache that holds the binaries."""
        made_of = f"-{content_hash([self.main])}" if self.main else ""
        return cache_root() / "programs" / f"{self.name}-{self.version}{made_of}"

    @property
    def is_built(self) -> bool:
        """All binaries are in the cache."""
        return all((self.folder / binary).exists() for binary in self.binaries)


KUBERNETES_BINARIES = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
)  # fmt: skip
CONTAINERD_BINARIES = ("containerd", "containerd-shim-runc-v2", "ctr")
_COMPONENT = "k8s.io/component-base/version"
PROGRAMS = (
    GoProgram(
        name="kubernetes",
        version=KUBERNETES_VERSION,
        module="k8s.io/kubernetes",
        packages=tuple(f"k8s.io/kubernetes/cmd/{binary}" for binary in KUBERNETES_BINARIES),
        binaries=KUBERNETES_BINARIES,
        flags=(
            f"-X {_COMPONENT}.gitVersion=v{KUBERNETES_VERSION}"
            f" -X {_COMPONENT}.gitMajor={KUBERNETES_VERSION.split('.')[0]}"
            f" -X {_COMPONENT}.gitMinor={KUBERNETES_VERSION.split('.')[1]}"
        ),
        replaces_staging=True,
    ),
    GoProgram(
        name="etcd",
        version=ETCD_VERSION,
        module="go.etcd.io/etcd/server/v3",
        packages=("go.etcd.io/etcd/server/v3",),
        binaries=("etcd",),
    ),
    GoProgram(
        name="containerd",
        version=CONTAINERD_VERSION,
        module="github.com/containerd/containerd/v2",
        packages=tuple(f"github.com/containerd/containerd/v2/cmd/{binary}" for binary in CONTAINERD_BINARIES),
        binaries=CONTAINERD_BINARIES,
        flags=f"-X github.com/containerd/containerd/v2/version.Version={CONTAINERD_VERSION}",
        tags="no_zfs no_btrfs no_devmapper",
    ),
    GoProgram(
        name="helm",
        version=HELM_VERSION,
        module="helm.sh/helm/v3",
        packages=("helm.sh/helm/v3/cmd/helm",),
        binaries=("helm",),
    ),
)


def ensure_programs(log: Path) -> list[Path]:
    """Build what the cache lacks and return the paths of all programs, the pause program last."""
    missing = [program.name for program in PROGRAMS if not program.is_built]
    if missing:
        say(f"To be built once, into {cache_root()}: {', '.join(missing)}; all four take 12 to 20 min on two cores")
    paths = []
    for program in PROGRAMS:
        ensure_program(program, log=log)
        paths += [program.folder / binary for binary in program.binaries]
    return [*paths, _ensure_pause(log)]


def ensure_program(program: GoProgram, *, log: Path | None = None) -> Path:
    """Build one program if the cache lacks it, by default with a log of its own; returns the path of its first
    binary."""
    log = log or cache_root() / "logs" / f"{program.name}.log"
    if not program.is_built:
        with step(f"Building {program.name} {program.version} from its Go module (log: {log})"):
            build_program(program, log=log)
    return program.folder / program.binaries[0]


def download_module(module: str, version: str) -> Path:
    """Return the folder of a Go module's source, downloaded once into Go's own cache."""
    downloaded = json.loads(run([_require_go(), "mod", "download", "-json", f"{module}@v{version}"]))
    return Path(downloaded["Dir"])


def build_program(program: GoProgram, *, log: Path) -> None:
    """Write a module that needs only this program, let Go complete it, and build."""
    go = _require_go()
    shutil.rmtree(program.folder, ignore_errors=True)
    with made_whole(program.folder) as target:
        source = target / "src"
        source.mkdir()
        replaces = _staging_replaces(program) if program.replaces_staging else ""
        if program.replaces:
            replaces += f"\nreplace {program.replaces}\n"
        (source / "go.mod").write_text(
            f"module programs\n\ngo {GO_DIRECTIVE}\n\nrequire {program.module} v{program.version}\n{replaces}"
        )
        if program.main:
            shutil.copy(program.main, source / "main.go")
        else:
            imports = "".join(f'\t_ "{package}"\n' for package in program.packages)
            (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n")
        run([go, "mod", "tidy"], cwd=source, log=log)
        output = target / program.binaries[0] if len(program.binaries) == 1 else f"{target}/"
        flags = ["-trimpath", "-tags", program.tags, "-ldflags", f"-s -w {program.flags}"]
        run(
            [go, "build", *flags, "-o", output, *(program.packages or (".",))],
            cwd=source,
            log=log,
            environment={"CGO_ENABLED": "0", "GOGC": COMPILER_GOGC},
        )
        shutil.rmtree(source)


def _staging_replaces(program: GoProgram) -> str:
    """Kubernetes replaces its staging modules by folders of its own; each is also published as v0.MINOR.PATCH."""
    text = (download_module(program.module, program.version) / "go.mod").read_text()
    published = f"v0.{program.version.split('.', 1)[1]}"
    staged = re.findall(r"^\s+(k8s\.io/[a-z-]+) => \./staging", text, flags=re.MULTILINE)
    return "\nreplace (\n" + "".join(f"\t{name} => {name} {published}\n" for name in staged) + ")\n"


def _ensure_pause(log: Path) -> Path:
    binary = cache_root() / "programs" / "pause-1" / "pause"
    if not binary.exists():
        with made_whole(binary.parent) as target:
            (target / "pause.go").write_text(PAUSE_SOURCE)
            run(
                [_require_go(), "build", "-trimpath", "-ldflags", "-s -w", "-o", target / "pause", target / "pause.go"],
                cwd=target,
                log=log,
                environment={"CGO_ENABLED": "0"},
            )
    return binary


def _require_go() -> str:
    go = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin:/usr/lib/go/bin")
    if go is None:
        raise StepError(
            f"Go is not installed; the cluster's programs are built from Go modules with Go {GO_DIRECTIVE} or newer "
            "(1.21 or newer fetches that by itself)"
        )
    return go
