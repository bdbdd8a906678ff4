"""Fills in what docs/sizing.md shows of `kubectl kvoffload plan`: the commands' real output, and the table of models.

Called by `reference.py`. `<!-- plan: ARGUMENTS -->` to `<!-- /plan -->` becomes that command with its output,
`<!-- table -->` to `<!-- /table -->` the table.
"""

import re
import shlex

from typer.testing import CliRunner

from kvoffload.layout.model_bytes import read_shape
from kvoffload_cli.__main__ import app
from kvoffload_cli.models import read_config
from kvoffload_cli.plan import BLOCK_TOKENS, MLA_BLOCK_TOKENS
from kvoffload_cli.sizing import GIB, Engine, plan_sizing

MODELS = (
    ("deepseek-ai/DeepSeek-V3", 8),
    ("deepseek-ai/DeepSeek-V3.2", 8),
    ("moonshotai/Kimi-K2-Instruct", 16),
    ("deepseek-ai/DeepSeek-V2-Lite", 2),
    ("meta-llama/Llama-3.1-70B-Instruct", 4),
    ("meta-llama/Llama-3.1-70B-Instruct", 16),
    ("meta-llama/Llama-3.1-8B-Instruct", 1),
    ("Qwen/Qwen3-32B", 4),
)
TABLE_BYTES = 100 * GIB


def fill_in(text: str) -> str:
    """The page with every marked part replaced by what the code says now."""
    text = re.sub(
        r"<!-- plan: (.*?) -->\n.*?<!-- /plan -->",
        lambda match: f"<!-- plan: {match[1]} -->\n{plan_output(match[1])}<!-- /plan -->",
        text,
        flags=re.DOTALL,
    )
    return re.sub(
        r"<!-- table -->\n.*?<!-- /table -->",
        lambda _: f"<!-- table -->\n{models_table()}<!-- /table -->",
        text,
        flags=re.DOTALL,
    )


def plan_output(arguments: str) -> str:
    """A fenced block with the command and what it prints."""
    result = CliRunner().invoke(
        app, ["plan", *shlex.split(arguments)], env={"COLUMNS": "140", "NO_COLOR": "1"}, catch_exceptions=False
    )
    if result.exit_code:
        raise RuntimeError(f"plan {arguments} failed: {result.output}")
    lines = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    return f"```text\n$ kubectl kvoffload plan {arguments}\n{lines}\n```\n"


def models_table() -> str:
    """The packaged models with their bytes, layout and tokens."""
    rows = [
        "| model | ranks | bytes per token and rank | layout | tokens | plain | times |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for name, num_ranks in MODELS:
        shape = read_shape(read_config(name)[0])
        engine = Engine(
            shape=shape,
            tensor_parallel=num_ranks,
            block_tokens=MLA_BLOCK_TOKENS if shape.is_mla else BLOCK_TOKENS,
        )
        plan = plan_sizing(engine, capacity_bytes=TABLE_BYTES, page_name="1Gi")
        rows.append(
            f"| {name} | {num_ranks} | {plan.kv.bytes_per_token:,} | {plan.verdict.decision.value} "
            f"| {plan.num_tokens:,} | {plan.plain_num_tokens:,} | {plan.num_tokens / plan.plain_num_tokens:.1f} |"
        )
    return "\n".join(rows) + "\n"
