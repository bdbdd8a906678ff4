"""What the demo found, as one readable page and as `build/demo/summary.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hack.demo.kubernetes import Kubernetes


@dataclass(frozen=True, slots=True)
class Summary:
    """The demo's figures, each read from the running system. The JSON file has exactly these keys."""

    pool_capacity_bytes: int
    used_bytes: int
    deduplicated_bytes: int
    cached_tokens_first_request_b: int
    outputs_equal: bool
    cached_tokens_after_restart: int
    replicated_layout: bool
    plain_layout_capacity_chunks: int
    capacity_chunks: int
    stored_bytes_per_rank: list[int]
    hugepages_free_before: int
    hugepages_free_after: int
    worker_kernel_page_size_bytes: int

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


_MEANINGS: Mapping[str, str] = {
    "pool_capacity_bytes": "huge pages that the pool keeps on the node",
    "used_bytes": "held by cached chunks after the prompts",
    "deduplicated_bytes": "not stored, since both ranks hold the same bytes",
    "cached_tokens_first_request_b": "of server B's first request, which it had never seen",
    "outputs_equal": "B's answers are those of A's warm requests, token for token",
    "cached_tokens_after_restart": "of B's first request after it was deleted and made again",
    "replicated_layout": "one copy for all ranks, decided by the workers",
    "plain_layout_capacity_chunks": "chunks that the pool holds with replicatedLayout: Never",
    "capacity_chunks": "chunks that it holds with one copy for all ranks",
    "stored_bytes_per_rank": "copied by each rank: half of every chunk",
    "hugepages_free_before": "pages free on the machine before the pool was made",
    "hugepages_free_after": "and after it was deleted",
    "worker_kernel_page_size_bytes": "page size of the region in a vLLM worker, from its smaps",
}
assert set(_MEANINGS) == {field.name for field in fields(Summary)}


def print_summary(summary: Summary, kubernetes_view: str) -> None:
    """Print the figures beside what kubectl showed while the servers ran."""
    console = Console(width=120)
    table = Table(title="kvoffload demo", title_justify="left", show_header=False, box=None, padding=(0, 1))
    for name, value in asdict(summary).items():
        table.add_row(name, _readable(name, value), f"[dim]{_MEANINGS[name]}[/dim]")
    console.print()
    console.print(kubernetes_view, highlight=False, markup=False)
    console.print(table)


def read_kubernetes_view(kubernetes: Kubernetes) -> str:
    """Return `kubectl get kvpool,kvregion` as a user sees it."""
    return kubernetes.kubectl("get", "kvpool,kvregion")


def _readable(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_readable(name, item) for item in value)
    if isinstance(value, int) and name.endswith(("_bytes", "_per_rank")):
        return f"{value / 2**20:,.2f} MiB" if value >= 2**20 else f"{value:,} B"
    return str(value)
