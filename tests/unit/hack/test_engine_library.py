"""The folder that injected pods have on their PYTHONPATH: whole, minimal, and found by vLLM's plugin loader."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    script = REPOSITORY / "agent" / "build_engine_library.py"
    specification = importlib.util.spec_from_file_location("build_engine_library", script)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    target = tmp_path_factory.mktemp("engine") / "lib"
    module.build_engine_library(target)
    return target


def test_it_holds_the_engine_and_only_the_parts_of_the_core_that_the_engine_needs(library):
    assert {path.name for path in (library / "kvoffload").iterdir()} == {
        "__init__.py", "errors.py", "units.py", "layout", "protocol",
    }  # fmt: skip
    assert {path.name.partition("-")[0] for path in library.iterdir()} == {"kvoffload", "kvoffload_engine"}
    assert not list(library.rglob("__pycache__"))


def test_python_finds_the_plugin_with_nothing_but_the_folder_on_its_path(library):
    program = (
        "from importlib.metadata import entry_points; "
        "print([(p.name, p.value) for p in entry_points(group='vllm.general_plugins')])"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[('kvoffload', 'kvoffload_engine.plugin:register')]"


def test_it_is_rebuilt_without_what_an_older_version_left(library):
    stray = library / "kvoffload" / "gone.py"
    stray.write_text("")
    subprocess.run([sys.executable, REPOSITORY / "agent" / "build_engine_library.py", library], check=True)
    assert not stray.exists()
