"""`kubectl kvoffload explain pod NAME`: is it injected, attached, replicated, sharing, and why or why not."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from kvoffload.api import keys
from kvoffload.api.keys import SkipReason
from kvoffload.api.pool import KVOffloadPool, Sharing
from kvoffload.api.region import MAX_ENGINES, RegionEngine
from kvoffload.errors import InvalidSpec
from kvoffload_cli.attachment import find_unattached, plugin_log
from kvoffload_cli.facts import ClusterFacts, OptedInPod
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observe import observe_pod
from kvoffload_cli.options import Context, Kubeconfig, Output
from kvoffload_cli.output import OutputFormat, labelled, make_console, print_json, show_bytes
from kvoffload_cli.remedies import SKIP_REMEDIES, why_not_asked
from kvoffload_cli.status import condition_text

app = typer.Typer(help="Explain one object.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One question about the pod and its answer, in lines."""

    question: str
    answer: tuple[str, ...]


@app.command("pod", epilog="Example: kubectl kvoffload explain pod team-a/vllm-0")
def pod_command(
    name: Annotated[str, typer.Argument(help="NAMESPACE/NAME, or NAME in --namespace.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace of the pod; default: the context's.")
    ] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Say why a pod is injected or not.

    Why it is or is not injected, attached, replicated and sharing; predicted beside confirmed.
    """
    if "/" in name:
        namespace, _, name = name.partition("/")
    reader = ClusterReader(kubeconfig=kubeconfig, context=context)
    namespace = namespace or reader.namespace
    facts = observe_pod(reader, namespace=namespace, name=name, now=datetime.now(UTC))
    explanations = explain_pod(facts, namespace=namespace, name=name)
    console = make_console()
    if output is OutputFormat.JSON:
        print_json(console, as_document(explanations))
    else:
        render(console, explanations)


def as_document(explanations: list[Explanation]) -> dict[str, Any]:
    """Answers by question, for programs."""
    return {one.question.lower(): list(one.answer) for one in explanations}


def render(console: Console, explanations: list[Explanation]) -> None:
    """Print the answers for people."""
    for one in explanations:
        labelled(console, one.question, one.answer)


def explain_pod(facts: ClusterFacts, *, namespace: str, name: str) -> list[Explanation]:
    """Answer every question that makes sense for this pod. Raises InvalidSpec for a pod that was not observed."""
    pod = next((one for one in facts.pods if (one.namespace, one.name) == (namespace, name)), None)
    if pod is None:
        raise InvalidSpec(f"no labelled pod {namespace}/{name}")
    if facts.unreadable:
        return _explain_without_pools(facts, pod)
    pool = facts.pool(pod.pool)
    engines = facts.engines.get((namespace, name), ())
    answers = [
        _about_pod(pod),
        Explanation("Pool", tuple(_about_pool(facts, pod, pool))),
        Explanation("Injected", tuple(_about_injection(facts, pod))),
    ]
    if not pod.injected_version:
        return answers
    answers.append(Explanation("Attached", tuple(_about_attachment(facts, pod, engines))))
    answers.append(Explanation("Layout", tuple(_about_layout(pod, engines))))
    engines = tuple(engine for engine in engines if not engine.is_left_alone)
    if pool is not None and engines:
        answers.append(Explanation("Sharing", tuple(_about_sharing(facts, pod, pool))))
        answers.append(
            Explanation(
                "Bytes",
                (
                    *(
                        f"{engine.engine_id}: stored {show_bytes(engine.stored_bytes)}, "
                        f"loaded {show_bytes(engine.loaded_bytes)}"
                        for engine in engines
                    ),
                    *_about_age(facts, pod),
                ),
            )
        )
    return answers


def _explain_without_pools(facts: ClusterFacts, pod: OptedInPod) -> list[Explanation]:
    """What the pod alone says, where the user may not read pools and regions."""
    ask = f"ask an administrator for the ClusterRole {facts.viewer_role}: pools and regions say what became of the pod"
    return [
        _about_pod(pod),
        Explanation("Pool", (pod.pool,)),
        Explanation("Injected", tuple(_about_injection(facts, pod))),
        *([Explanation("Layout", tuple(_about_layout(pod, ())))] if pod.injected_version else []),
        Explanation("Not read", (*facts.unreadable, ask)),
    ]


def _about_pod(pod: OptedInPod) -> Explanation:
    return Explanation("Pod", (f"{pod.namespace}/{pod.name}, {pod.phase} on node {pod.node or '(not scheduled)'}",))


def _about_pool(facts: ClusterFacts, pod: OptedInPod, pool: KVOffloadPool | None) -> Iterator[str]:
    if pool is None and not facts.serves_pools:
        yield f"{pod.pool}: the cluster has no kind KVOffloadPool, its CRDs are not installed"
        return
    if pool is None and not facts.is_absent(pod.pool):
        yield f"{pod.pool} is there, and this version of the plugin cannot read it: {'; '.join(facts.invalid)}"
        return
    if pool is None:
        yield f"{pod.pool} does not exist; there are: {', '.join(one.name for one in facts.pools) or 'none'}"
        return
    yield f"{pool.name}, ready: {condition_text(pool, 'Ready')}, mode {pool.spec.mode.value}"
    region = facts.region(pool=pool.name, node=pod.node)
    if region is not None:
        yield f"on node {pod.node}: region {region.name}, ready: {condition_text(region, 'Ready')}"
    elif pod.node:
        yield f"on node {pod.node}: no region; the pool's nodeSelector does not match the node"


def _about_injection(facts: ClusterFacts, pod: OptedInPod) -> Iterator[str]:
    if pod.injected_version:
        yield f"yes, by version {pod.injected_version}"
        if not pod.has_volume:
            yield f"but the volume {keys.VOLUME_NAME} is gone: another webhook removed it after ours"
    elif pod.skip_reason in list(SkipReason):
        yield f"no: {pod.skip_reason}"
        yield SKIP_REMEDIES[SkipReason(pod.skip_reason)]
    elif pod.skip_reason:
        yield f"no: {pod.skip_reason} (a reason that this version of the plugin does not know)"
    else:
        why, remedy = why_not_asked(facts, pod)
        yield f"no: {why}"
        yield remedy


def _about_attachment(facts: ClusterFacts, pod: OptedInPod, engines: tuple[RegionEngine, ...]) -> Iterator[str]:
    for engine in engines:
        if engine.is_left_alone:
            yield f"no: the engine serves without offload: {engine.message or 'no reason given'}"
            continue
        since = f" since {engine.attached_since:%Y-%m-%d %H:%M:%S} UTC" if engine.attached_since else ""
        model = engine.model or "unnamed"
        yield f"engine {engine.engine_id}{since}, {engine.tensor_parallel_size} ranks, model {model}"
    if pod.ready_since is None and (pod.num_restarts or pod.waiting):
        yield from _about_restarts(pod)
    elif not engines and pod.ready_since is None:
        yield "not yet: an engine attaches when it has loaded its weights"
    elif not engines:
        yield from _about_no_engine(facts, pod)


def _about_no_engine(facts: ClusterFacts, pod: OptedInPod) -> Iterator[str]:
    region, found = facts.region(pool=pod.pool, node=pod.node), find_unattached(facts, pod)
    if found is not None:
        yield f"no: {found.message}"
        yield found.remedy
    elif region is not None and region.status.engines_attached > MAX_ENGINES:
        yield f"not to be told: the region names {MAX_ENGINES} of its {region.status.engines_attached} engines"
        yield plugin_log(pod)
    else:
        yield "no: the pod serves without offload"
        yield "an engine attaches by itself once the region on its node serves"


def _about_restarts(pod: OptedInPod) -> Iterator[str]:
    waits = f", now {pod.waiting}" if pod.waiting else ""
    if not pod.num_restarts and not pod.last_end:
        yield f"not yet: the pod waits: {pod.waiting}"
        return
    times = "once" if pod.num_restarts == 1 else f"{pod.num_restarts} times"
    ended = f", ended last: {pod.last_end}" if pod.last_end else ""
    yield f"no: the pod's containers were started again {times}{ended}{waits}"
    yield f"kubectl -n {pod.namespace} logs {pod.name} --previous"


def _about_age(facts: ClusterFacts, pod: OptedInPod) -> Iterator[str]:
    """How old the figures are: a daemon writes them every half minute (`FIGURES_SECONDS`), while loads go on."""
    region = facts.region(pool=pod.pool, node=pod.node)
    written = None if region is None else facts.reported_at.get(region.name)
    if written is not None:
        age = max(0, round((facts.now - written).total_seconds()))
        yield f"as the daemon wrote at {written:%Y-%m-%d %H:%M:%S} UTC, {age} s ago; it writes what changed every 30 s"
    else:
        yield "as the daemon wrote last; it writes what changed every 30 s"


def _about_layout(pod: OptedInPod, engines: tuple[RegionEngine, ...]) -> Iterator[str]:
    yield f"predicted: {pod.predicted_layout or 'nothing'}"
    for engine in engines:
        if engine.is_left_alone:
            continue
        if not engine.confirmed_layout:
            yield f"confirmed by {engine.engine_id}: not yet, its ranks have not all attached"
            continue
        why = ": ".join(part for part in (engine.reason, engine.message) if part)
        yield f"confirmed by {engine.engine_id}: {engine.confirmed_layout}" + (f" ({why})" if why else "")


def _about_sharing(facts: ClusterFacts, pod: OptedInPod, pool: KVOffloadPool) -> Iterator[str]:
    region = facts.region(pool=pool.name, node=pod.node)
    others = (
        []
        if region is None
        else [
            engine
            for engine in region.status.engines
            if (engine.pod_namespace, engine.pod_name) != (pod.namespace, pod.name) and not engine.is_left_alone
        ]
    )
    if pool.spec.sharing is Sharing.POD:
        yield "with nobody: the pool's sharing is Pod"
        return
    if pool.spec.sharing is Sharing.NAMESPACE:
        others = [engine for engine in others if engine.pod_namespace == pod.namespace]
        yield f"with pods of namespace {pod.namespace} on this node, where model, settings and layout are the same"
    else:
        yield "with every pod of the pool on this node, where model, settings and layout are the same"
    names = sorted({f"{engine.pod_namespace}/{engine.pod_name} ({engine.model or 'unnamed'})" for engine in others})
    yield f"attached now: {', '.join(names)}" if names else "attached now: no other"
