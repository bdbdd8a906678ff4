"""The demo's steps, each on the real system; `make demo` prints what comes of them, the end-to-end tests assert it.

```
 pool (Auto) ── server A: each prompt cold, then warm ── server B: the same prompts, first time
             ── B deleted and made again: warm at once ── Prometheus' figures
 pool (Never) ── server A: each prompt ── the plain layout's figures
```
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hack.cache import BUILD, cache_root
from hack.cluster import lifecycle, machine
from hack.cluster.settings import HUGEPAGE_BYTES, ClusterSettings
from hack.console import StepError, say, step, wait_until
from hack.demo import servers
from hack.demo.installation import DAEMON_SELECTOR, NAMESPACE, create_pool, delete_pool, install_chart, read_region
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import Prometheus, running_prometheus
from hack.demo.servers import (
    Answer,
    Server,
    ServerFiles,
    demo_prompts,
    start_servers,
    stop_servers,
    wait_server,
    write_manifests,
)
from hack.demo.summary import Summary, read_kubernetes_view
from hack.images.build import BuiltImages, build_images, load_images
from hack.vllm.environment import ensure_vllm_environment
from hack.vllm.models import ensure_model
from kvoffload.layout.extents import plan_extent_bytes

POOL = "demo"
SERVERS = ("vllm-a", "vllm-b")
OUTPUT = BUILD / "demo"
MANIFESTS = OUTPUT / "manifests"
NODE = 'component="node"'


@dataclass(frozen=True, slots=True)
class Stage:
    """What every step needs: the cluster, our images, and what the vLLM pods mount."""

    kubernetes: Kubernetes
    images: BuiltImages
    files: ServerFiles


@dataclass(frozen=True, slots=True)
class Figures:
    """What Prometheus and the region's status say while a pool's servers run."""

    capacity_bytes: int
    used_bytes: int
    deduplicated_bytes: int
    cross_engine_hits: int
    num_chunks: int
    stored_bytes_per_rank: list[int]
    layouts: list[str]

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one chunk takes in the pool."""
        return self.used_bytes // self.num_chunks

    @property
    def capacity_chunks(self) -> int:
        """Chunks that the whole pool holds; a chunk never straddles two extents."""
        extent_bytes = plan_extent_bytes(self.capacity_bytes, HUGEPAGE_BYTES)
        return self.capacity_bytes // extent_bytes * (extent_bytes // self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class SharedRun:
    """What the run with one copy for all ranks showed."""

    cold_a: list[Answer]
    warm_a: list[Answer]
    first_b: list[Answer]
    restarted_b: list[Answer]
    figures: Figures
    page_sizes: dict[int, int]
    kubernetes_view: str
    region: dict[str, Any]


def prepare(settings: ClusterSettings) -> Stage:
    """Bring up the cluster, build and load the images, and make vLLM's environment and the tiny model."""
    lifecycle.up(settings)
    images = build_images(log=cache_root() / "logs" / "images.log")
    load_images(images, settings)
    files = ServerFiles(image=images.python, environment=ensure_vllm_environment(), model=ensure_model("tiny-deepseek"))
    kubernetes = Kubernetes(settings)
    kubernetes.ensure_namespace(servers.NAMESPACE)
    write_manifests(files, MANIFESTS, pool=POOL)
    return Stage(kubernetes=kubernetes, images=images, files=files)


def remove_leftovers(stage: Stage) -> None:
    """Remove what an earlier demo left, also where its operator does not run any more. Before an upgrade: a daemon that
    is replaced while its pool is deleted would leave its pages to the next pool of that name."""
    stop_servers(stage.kubernetes, names=SERVERS)
    if stage.kubernetes.is_known("kvpool"):
        stage.kubernetes.delete("kvpool", POOL)
        selector = f"--selector={DAEMON_SELECTOR}={POOL}"
        stage.kubernetes.kubectl("delete", "daemonsets", selector, f"--namespace={NAMESPACE}", "--wait=true")
        delete_pool(stage.kubernetes, name=POOL)


def clean(stage: Stage) -> None:
    """Remove the servers, then the pool, and with it the daemon and its pages."""
    stop_servers(stage.kubernetes, names=SERVERS)
    delete_pool(stage.kubernetes, name=POOL)


def run_shared(stage: Stage, prometheus: Prometheus) -> SharedRun:
    """Two servers on one pool: the second finds what the first stored, also after it was made again."""
    kubernetes, prompts = stage.kubernetes, demo_prompts()
    with step("Making a pool of 256Mi in 2Mi pages"):
        create_pool(kubernetes, pool_manifest(), name=POOL)
    with step("Starting vLLM servers A and B (two ranks each; B by a shell)"):
        server_a, server_b = start_servers(kubernetes, stage.files, names=SERVERS, pool=POOL)
        wait_attached(stage, server_a)
        wait_attached(stage, server_b)
    with step("Sending the prompts to A, each twice"):
        cold_a = ask(server_a, prompts)
        wait_stored(prometheus)
        say(
            "    again, from the cache. Answers may differ from the first ones: vLLM's CPU kernels for latent\n"
            "    attention round differently for a whole prompt and for the rest of one, whoever kept the cache"
        )
        warm_a = ask(server_a, prompts)
    with step("Sending the same prompts to B, which has never seen them"):
        first_b = ask(server_b, prompts)
    page_sizes = servers.read_region_page_sizes(server_b.pod)
    with step("Deleting B's pod; sending the prompts to its successor"):
        kubernetes.delete("pod", server_b.pod["metadata"]["name"], namespace=servers.NAMESPACE)
        successor = wait_server(kubernetes, name="vllm-b")
        wait_attached(stage, successor)
        restarted_b = ask(successor, prompts)
    with step("Asking Prometheus"):
        figures = read_figures(stage, prometheus)
    return SharedRun(
        cold_a=cold_a,
        warm_a=warm_a,
        first_b=first_b,
        restarted_b=restarted_b,
        figures=figures,
        page_sizes=page_sizes,
        kubernetes_view=read_kubernetes_view(kubernetes),
        region=read_region(kubernetes, pool=POOL),
    )


def run_plain(stage: Stage, prometheus: Prometheus) -> Figures:
    """The same prompts to server A on a pool that keeps a part for every rank."""
    with step("Making the pool again with replicatedLayout: Never, for comparison"):
        clean(stage)
        create_pool(stage.kubernetes, f"{pool_manifest()}  replicatedLayout: Never\n", name=POOL)
    with step("Starting server A and sending it the prompts"):
        (server_a,) = start_servers(stage.kubernetes, stage.files, names=["vllm-a"], pool=POOL)
        wait_attached(stage, server_a)
        ask(server_a, demo_prompts())
        wait_stored(prometheus)
        return read_figures(stage, prometheus)


def run(
    settings: ClusterSettings, *, while_shared: Callable[[Stage, Prometheus], None] = lambda _stage, _prometheus: None
) -> tuple[Summary, SharedRun]:
    """All of it; `while_shared` is called while both servers run. Returns the summary and the answers behind it."""
    stage = prepare(settings)
    with step("Removing what an earlier demo left"):
        remove_leftovers(stage)
    with step("Installing the chart"):
        install_chart(stage.kubernetes, stage.images)
    free_before = machine.read_hugepages("free")
    with running_prometheus(stage.kubernetes, OUTPUT / "prometheus") as prometheus:
        shared = run_shared(stage, prometheus)
        while_shared(stage, prometheus)
        plain = run_plain(stage, prometheus)
    with step("Removing the servers and the pool"):
        clean(stage)
        free_after = wait_pages_free(free_before)
    summary = summarize(shared, plain, free_before=free_before, free_after=free_after)
    summary.write(OUTPUT / "summary.json")
    return summary, shared


def summarize(shared: SharedRun, plain: Figures, *, free_before: int, free_after: int) -> Summary:
    """Bring the figures of both runs together."""
    figures = shared.figures
    if len(shared.page_sizes) != len(figures.stored_bytes_per_rank):
        raise StepError(f"{len(shared.page_sizes)} processes of server B map the region, not one for each rank")
    return Summary(
        pool_capacity_bytes=figures.capacity_bytes,
        used_bytes=figures.used_bytes,
        deduplicated_bytes=figures.deduplicated_bytes,
        cached_tokens_first_request_b=shared.first_b[0].cached_tokens,
        outputs_equal=[answer.text_tokens for answer in shared.first_b]
        == [answer.text_tokens for answer in shared.warm_a],
        cached_tokens_after_restart=shared.restarted_b[0].cached_tokens,
        replicated_layout=set(figures.layouts) == {"replicated"},
        plain_layout_capacity_chunks=plain.capacity_chunks,
        capacity_chunks=figures.capacity_chunks,
        stored_bytes_per_rank=figures.stored_bytes_per_rank,
        hugepages_free_before=free_before,
        hugepages_free_after=free_after,
        worker_kernel_page_size_bytes=min(shared.page_sizes.values()),
    )


def pool_manifest() -> str:
    """Return the demo's pool; its spec is the last part of the text."""
    return (servers.EXAMPLES / "pool.yaml").read_text()


def ask(server: Server, prompts: list[list[int]]) -> list[Answer]:
    """Send the prompts one after another and say what came back."""
    answers = [server.complete(prompt) for prompt in prompts]
    for answer in answers:
        say(f"    {server.name}: {answer.cached_tokens} cached tokens, answer {list(answer.text_tokens)}")
    return answers


def wait_attached(stage: Stage, server: Server) -> None:
    """Wait until the region says that the server's engine is attached and which layout its ranks confirmed."""
    uid = server.pod["metadata"]["uid"]

    def engines() -> list[dict[str, Any]]:
        found = read_region(stage.kubernetes, pool=POOL).get("status", {}).get("engines", [])
        return [engine for engine in found if engine["podUID"] == uid and engine.get("confirmedLayout")]

    wait_until(
        f"{server.name} to attach to the pool",
        lambda: bool(engines()),
        timeout_seconds=30,
        explain=lambda: (
            f"annotations: {server.pod['metadata'].get('annotations')}\n{stage.kubernetes.log_tail(server.pod)}"
        ),
        log=stage.kubernetes.settings.logs / "pods",
    )
    (engine,) = engines()
    say(f"    {server.name} is attached: layout {engine['confirmedLayout']} {engine.get('reason', '')}")


def wait_stored(prometheus: Prometheus) -> None:
    """Wait until the stores of the last prompts are sealed: the number of ready chunks stands still and is not 0."""
    last = -1.0

    def stands_still() -> bool:
        nonlocal last
        prometheus.wait_scraped()
        before, last = last, prometheus.value(f'sum(kvoffload_slots{{{NODE},state="ready"}})')
        return last == before and last > 0

    wait_until("chunks to be stored", stands_still, timeout_seconds=60, explain=lambda: f"{last:.0f} are stored")


def wait_pages_free(before: int) -> int:
    """Wait until as many pages are free as before the pool was made; returns how many are."""
    wait_until(
        f"{before} pages to be free again",
        lambda: machine.read_hugepages("free") >= before,
        timeout_seconds=30,
        explain=lambda: f"{machine.read_hugepages('free')} are free",
    )
    return machine.read_hugepages("free")


def read_figures(stage: Stage, prometheus: Prometheus) -> Figures:
    """Read everything from Prometheus but the layouts, which stand in the region's status."""
    prometheus.wait_scraped()
    prometheus.value('count(up{component="operator"} == 1)')
    by_rank = {
        int(labels["rank"]): int(value)
        for labels, value in prometheus.query(f"sum by (rank) (kvoffload_rank_stored_bytes_total{{{NODE}}})")
    }
    region = read_region(stage.kubernetes, pool=POOL)
    return Figures(
        capacity_bytes=int(prometheus.value(f"kvoffload_pool_capacity_bytes{{{NODE}}}")),
        used_bytes=int(prometheus.value(f"sum(kvoffload_pool_used_bytes{{{NODE}}})")),
        deduplicated_bytes=int(prometheus.value(f"kvoffload_deduplicated_bytes_total{{{NODE}}}")),
        cross_engine_hits=int(prometheus.value(f"kvoffload_cross_engine_hits_total{{{NODE}}}")),
        num_chunks=int(prometheus.value(f'sum(kvoffload_slots{{{NODE},state="ready"}})')),
        stored_bytes_per_rank=[by_rank[rank] for rank in sorted(by_rank)],
        layouts=[engine.get("confirmedLayout", "") for engine in region["status"]["engines"]],
    )
