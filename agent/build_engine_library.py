"""Write the engine library: the folder that an injected vLLM pod has on its PYTHONPATH.

    python3 agent/build_engine_library.py TARGET

Run when the node image is built (`agent/Dockerfile`), and by the tests that run a real vLLM in processes. Standard
library only. The folder holds the parts of the core that the engine needs, the engine agent, and a dist-info whose
entry point makes vLLM load our plugin:

```
TARGET/kvoffload/{__init__,errors,units}.py   TARGET/kvoffload/{layout,protocol}/
TARGET/kvoffload_engine/                      TARGET/kvoffload_engine-<version>.dist-info/{METADATA,...}
```
"""

import pathlib
import shutil
import sys

import tomllib

AGENT = pathlib.Path(__file__).resolve().parent
CORE_PARTS = ("__init__.py", "errors.py", "units.py", "layout", "protocol")
ENTRY_POINT_GROUP = "vllm.general_plugins"


def build_engine_library(target: pathlib.Path) -> None:
    """Replace `target` by a whole engine library of this checkout."""
    project = tomllib.loads((AGENT.parent / "pyproject.toml").read_text())["project"]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for part in CORE_PARTS:
        _copy(AGENT / "kvoffload" / part, target / "kvoffload" / part)
    _copy(AGENT / "kvoffload_engine", target / "kvoffload_engine")
    information = target / f"kvoffload_engine-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kvoffload-engine\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\n"
    )
    entries = project["entry-points"][ENTRY_POINT_GROUP]
    lines = [f"{name} = {value}" for name, value in sorted(entries.items())]
    (information / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
    (information / "top_level.txt").write_text("kvoffload\nkvoffload_engine\n")


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy2(source, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build_engine_library.py TARGET")
    build_engine_library(pathlib.Path(sys.argv[1]))
