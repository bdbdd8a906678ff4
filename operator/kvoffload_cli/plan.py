"""`kubectl kvoffload plan`: what a pool would hold of a model, and the commands that reserve it. Needs no cluster."""

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from kvoffload.api.pool import MAX_POOL_NAME_LENGTH, POOL_NAME_PATTERN, KVOffloadPool, PageSize
from kvoffload.api.reservation import RESTART_KUBELET, pages_file, raise_beside_others
from kvoffload.errors import InvalidSpec
from kvoffload.layout.model_bytes import AttentionKind, read_shape
from kvoffload.units import format_bytes
from kvoffload_cli.models import read_config
from kvoffload_cli.options import Output
from kvoffload_cli.output import OutputFormat, labelled, make_console, print_json, require_one_of, show_bytes
from kvoffload_cli.sizing import (
    PAGE_BYTES,
    Engine,
    SizingPlan,
    default_capacity,
    is_conditional,
    parse_capacity,
    parse_quota,
    plan_sizing,
)
from kvoffload_operator.observe import describe_spec_error
from kvoffload_operator.webhook.validation import validate_pool_spec

MLA_BLOCK_TOKENS, BLOCK_TOKENS = 64, 16
"""vLLM's usual block sizes on CUDA: 64 with an MLA backend, 16 otherwise. `--block-size` says otherwise."""
YAML_WORDS = frozenset(["true", "false", "yes", "no", "on", "off", "y", "n", "null"])


def command(
    model: Annotated[str, typer.Option("--model", "-m", help="A config.json, a model folder, or a model's name.")],
    tensor_parallel: Annotated[
        int, typer.Option("--tp", "--tensor-parallel-size", min=1, help="Ranks of vLLM's tensor parallelism.")
    ] = 1,
    node_memory: Annotated[str, typer.Option(help="Memory of a node; a quarter of it is left to vLLM.")] = "",
    capacity: Annotated[str, typer.Option(help="Bytes of the pool on each node, instead of --node-memory.")] = "",
    pipeline_parallel: Annotated[
        int, typer.Option("--pp", "--pipeline-parallel-size", min=1, help="Ranks of vLLM's pipeline parallelism.")
    ] = 1,
    nodes: Annotated[int, typer.Option("--nodes", "--nnodes", min=1, help="Nodes of one engine.")] = 1,
    block_size: Annotated[int, typer.Option(min=0, help="Tokens in a block; 0: 64 with MLA, otherwise 16.")] = 0,
    blocks_per_chunk: Annotated[int, typer.Option(min=1, help="GPU blocks in one offloaded chunk.")] = 1,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="As for vLLM.")] = "auto",
    page_size: Annotated[str, typer.Option(help="2Mi or 1Gi.")] = "2Mi",
    quota: Annotated[list[str] | None, typer.Option(help="NAMESPACE=GUARANTEED[:LIMIT], several times.")] = None,
    never_replicated: Annotated[
        bool, typer.Option("--never-replicated", help="As with the pool's replicatedLayout: Never.")
    ] = False,
    pool: Annotated[str, typer.Option(help="Name of the pool in the manifest.")] = "llm",
    output: Output = OutputFormat.TEXT,
) -> None:
    """Size a pool, without a cluster.

    Bytes per token and block, the layout and why, what fits, and the pages to reserve.
    """
    require_one_of("page-size", page_size, PAGE_BYTES)
    config, source = read_config(model)
    shape = read_shape(config)
    if not capacity and not node_memory:
        raise typer.BadParameter("give --node-memory, or the pool's --capacity")
    if capacity and node_memory:
        raise typer.BadParameter("give --node-memory or --capacity, not both: the second is the pool's size as it is")
    engine = Engine(
        shape=shape,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_nodes=nodes,
        block_tokens=block_size or (MLA_BLOCK_TOKENS if shape.is_mla else BLOCK_TOKENS),
        blocks_per_chunk=blocks_per_chunk,
        kv_dtype=kv_dtype,
        replication_allowed=not never_replicated,
    )
    plan = plan_sizing(
        engine,
        capacity_bytes=parse_capacity(capacity, page_size) if capacity else default_capacity(node_memory, page_size),
        page_name=page_size,
        quotas=[parse_quota(text) for text in quota or []],
    )
    require_valid_pool(pool_manifest(plan, pool))
    console = make_console()
    if output is OutputFormat.JSON:
        print_json(console, as_document(plan, model=model, source=source, pool=pool))
    else:
        render(console, plan, model=model, source=source, pool=pool)


def as_document(plan: SizingPlan, *, model: str, source: str, pool: str) -> dict[str, Any]:
    """The plan as one JSON object, for programs."""
    return {
        "model": model,
        "configuration": source,
        "attention": plan.engine.shape.attention.value,
        "kvDtype": plan.kv.kv_dtype,
        "bytesPerToken": plan.kv.bytes_per_token,
        "bytesPerBlock": plan.kv.bytes_per_block,
        "blockTokens": plan.kv.block_tokens,
        "layout": plan.verdict.decision.value,
        "reason": plan.verdict.reason.value,
        "message": plan.verdict.message,
        "slotBytes": plan.row.slot_bytes,
        "plainSlotBytes": plan.plain_row.slot_bytes,
        "capacityBytes": plan.capacity_bytes,
        "blocks": plan.num_blocks,
        "tokens": plan.num_tokens,
        "plainTokens": plan.plain_num_tokens,
        "savedBytesPerToken": plan.saved_bytes_per_token,
        "unusedBytes": plan.waste_bytes,
        "pageSize": plan.page_name,
        "pages": plan.num_pages,
        "quotas": [asdict(quota) for quota in plan.quotas],
        "notes": list(plan.notes),
        "commands": reserve_commands(plan),
        "manifest": pool_manifest(plan, pool),
    }


def render(console: Console, plan: SizingPlan, *, model: str, source: str, pool: str) -> None:
    """Print the plan for people."""
    shape, kv = plan.engine.shape, plan.kv
    labelled(
        console,
        "Model",
        [
            f"{model} ({source})",
            f"{shape.model_type}, {shape.num_layers} layers, {shape.attention.value}, KV in {kv.kv_dtype}",
            *(f"note: {note}" for note in plan.notes),
        ],
    )
    labelled(
        console,
        "Bytes",
        [
            f"{formula(plan)} = {kv.bytes_per_token:,} per token on each rank",
            f"x {kv.block_tokens} tokens = {kv.bytes_per_block:,} per block on each rank",
        ],
    )
    labelled(console, "Layout", [f"{plan.verdict.decision.value}: {plan.verdict.message}", *_layout_remark(plan)])
    saved = plan.plain_row.slot_bytes - plan.row.slot_bytes
    labelled(
        console,
        "Chunk",
        [
            f"{plan.chunk_tokens} tokens in {plan.row.slot_bytes:,} bytes ({show_bytes(plan.row.slot_bytes)})",
            f"one part a rank would be {plan.plain_row.slot_bytes:,}: "
            + (f"saves {saved:,} ({saved / plan.plain_row.slot_bytes:.1%})" if saved else "nothing to save"),
        ],
    )
    labelled(
        console,
        "Pool",
        [
            f"{format_bytes(plan.capacity_bytes)} on each node: {plan.num_extents:,} extents x {plan.slots_per_extent} "
            f"chunks = {plan.num_slots:,} chunks",
            f"{plan.num_blocks:,} blocks, {plan.num_tokens:,} tokens; the plain layout holds {plan.plain_num_tokens:,}",
            f"{show_bytes(plan.waste_bytes)} ({plan.waste_bytes / plan.capacity_bytes:.1%}) stay empty: no chunk lies "
            "across two extents" + ("; --page-size 1Gi loses less" if _prefers_large_pages(plan) else ""),
        ],
    )
    labelled(
        console,
        "Quotas",
        [
            f"{quota.namespace}: guaranteed {quota.guaranteed_tokens:,} tokens, at most {quota.limit_tokens:,}"
            for quota in plan.quotas
        ],
    )
    labelled(console, "Reserve", [f"{plan.num_pages:,} pages of {plan.page_name} on each node:"])
    for text in (*reserve_commands(plan), "", "kubectl apply -f - <<EOF", pool_manifest(plan, pool) + "EOF"):
        console.print(text, markup=False, soft_wrap=True)


def formula(plan: SizingPlan) -> str:
    """The product that gives the bytes per token, with this model's figures."""
    shape, kv = plan.engine.shape, plan.kv
    layers = f"{kv.layers_per_stage} layers"
    of_kv = kv.bytes_per_token_layer - shape.indexer_bytes
    if shape.is_mla and of_kv % shape.latent_elements == 0:
        part = f"{shape.latent_elements} latent elements x {of_kv // shape.latent_elements} bytes"
    elif shape.is_mla:
        part = f"{of_kv} bytes ({kv.kv_dtype})"
    else:
        heads = max(1, shape.num_kv_heads // plan.engine.tensor_parallel)
        width = of_kv // (2 * heads * shape.head_elements)
        part = f"2 x {heads} KV heads x {shape.head_elements} elements x {width} bytes"
    if shape.attention is AttentionKind.SPARSE_MLA:
        part = f"({part} + {shape.indexer_bytes} bytes of indexer)"
    return f"{layers} x {part}"


def reserve_commands(plan: SizingPlan) -> list[str]:
    """Shell lines that reserve the pages on a node, beside those in use; the kubelet counts pages only at its start."""
    size = PageSize(plan.page_name)
    command = raise_beside_others(size, plan.num_pages)
    if size is PageSize.GI_1:
        return [
            "# on each node: put what this prints on the kernel's command line and reboot (1Gi wants unbroken memory)",
            command,
            "# mounted now and at every start; or leave that to us: hugetlbfsMount: Managed in the pool",
            "grep -q /dev/hugepages-1Gi /etc/fstab || "
            "echo 'none /dev/hugepages-1Gi hugetlbfs pagesize=1G 0 0' >> /etc/fstab",
            "mkdir -p /dev/hugepages-1Gi && mount /dev/hugepages-1Gi",
        ]
    return [
        "# on each node, early after its start, while memory is unbroken; adds to the pages in use, never lowers",
        command,
        f"cat {pages_file(size)}   # the kernel reserves what it can: compare",
        f"{RESTART_KUBELET}   # it counts pages only when it starts",
    ]


def pool_manifest(plan: SizingPlan, pool: str) -> str:
    """The KVOffloadPool as YAML."""
    lines = [
        "apiVersion: kvoffload.io/v1alpha1",
        "kind: KVOffloadPool",
        "metadata:",
        f"  name: {_yaml_string(pool)}",
        "spec:",
        '  nodeSelector: {nvidia.com/gpu.present: "true"}',
        f"  capacity: {format_bytes(plan.capacity_bytes)}",
        f"  pageSize: {plan.page_name}",
    ]
    if not plan.engine.replication_allowed:
        lines.append("  replicatedLayout: Never")
    if plan.quotas:
        lines.append("  quotas:")
    for quota in plan.quotas:
        lines += [
            f"  - namespace: {_yaml_string(quota.namespace)}",
            f"    guaranteed: {format_bytes(quota.guaranteed_bytes)}",
            f"    limit: {format_bytes(quota.limit_bytes)}",
        ]
    return "\n".join(lines) + "\n"


def _yaml_string(text: str) -> str:
    """Plain where every YAML reader takes it for a string; a namespace may well be `123`, `1e3` or `on`."""
    is_plain = re.fullmatch(r"[a-z][-a-z0-9]*", text) and text not in YAML_WORDS
    return text if is_plain else json.dumps(text)


def require_valid_pool(manifest: str) -> None:
    """Raises InvalidSpec with all that the API server would refuse the manifest for."""
    document = yaml.safe_load(manifest)
    errors = []
    name = document["metadata"]["name"]
    if len(name) > MAX_POOL_NAME_LENGTH or not re.fullmatch(POOL_NAME_PATTERN, name):
        errors.append(
            f"metadata.name: {name[:MAX_POOL_NAME_LENGTH]!r} ({len(name)} characters) is no DNS label of at most "
            f"{MAX_POOL_NAME_LENGTH} characters (lower case, digits, -); give another --pool"
        )
    try:
        errors += map(str, validate_pool_spec(KVOffloadPool.from_manifest(document).spec).errors)
    except ValidationError as error:
        errors.append(describe_spec_error(error))
    if errors:
        raise InvalidSpec(f"the API server would refuse this pool: {'; '.join(errors)}")


def _layout_remark(plan: SizingPlan) -> list[str]:
    if is_conditional(plan.verdict):
        return ["vLLM says so only when it starts (0.31 and newer); until then count with one part a rank"]
    return []


def _prefers_large_pages(plan: SizingPlan) -> bool:
    return plan.page_name == "2Mi" and plan.waste_bytes * 20 > plan.capacity_bytes
