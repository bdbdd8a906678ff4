"""`compat.REQUIRED` holds every name of vLLM that we import or call on a parent class: read from our source, so that no
vLLM is needed. What we override is compared with the real classes in `tests/engine/compat_checks.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvoffload_engine
from kvoffload_engine import compat

SOURCES = sorted(Path(kvoffload_engine.__file__).parent.rglob("*.py"))
ALLOWED = {
    "vllm": "whose version is looked at before anything is required",
    "vllm._custom_ops": "it loads a device's kernels, which an API server needs not: compat_checks.py looks for it",
    "vllm.v1.attention.backends.utils": "compat uses it with 0.28 alone",
    "OffloadingConnector.register_cross_layers_kv_cache": "0.28 alone has it",
    "OffloadingConnector.get_transfer_results": "0.30 and newer have it",
    "OffloadingConnector.get_external_cache_hit_sources": "0.32 and newer have it",
    "OffloadingConnector.__init__": "every class has it",
    "OffloadingSpec.__init__": "every class has it",
}
"""Names that are used without being required, with the reason."""


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Modules and names of vLLM that a source imports, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            yield from (f"{node.module}.{one.name}" for one in node.names)


def inherited_calls(tree: ast.AST) -> Iterator[str]:
    """`Parent.method` of each `super().method` in a class whose parent is vLLM's."""
    parents = {one.rsplit(".", 1)[1] for one in imported_names(tree) if "." in one}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in parents]
        for inner in ast.walk(node) if bases else ():
            if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "super()":
                yield f"{bases[0]}.{inner.attr}"


def required_names() -> set[str]:
    """Modules; modules' names; classes; classes' methods."""
    names = set(compat.REQUIRED)
    for module, paths in compat.REQUIRED.items():
        for path in paths:
            names |= {path, f"{module}.{path}", f"{module}.{path.split('.')[0]}"}
    return names


@pytest.mark.parametrize("source", SOURCES, ids=[one.stem for one in SOURCES])
def test_every_name_of_vllm_that_a_module_uses_is_required(source: Path) -> None:
    tree = ast.parse(source.read_text())
    used = {*imported_names(tree), *inherited_calls(tree)}
    assert used - required_names() - set(ALLOWED) == set()


def test_every_exception_is_one_that_is_used() -> None:
    trees = [ast.parse(source.read_text()) for source in SOURCES]
    used = {name for tree in trees for name in (*imported_names(tree), *inherited_calls(tree))}
    assert set(ALLOWED) <= used
    assert set(ALLOWED) & required_names() == set()
