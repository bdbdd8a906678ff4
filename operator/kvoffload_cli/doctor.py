"""`kubectl kvoffload doctor`: what is wrong, on what, and what to do. Status 1 where anything is an error."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console

from kvoffload_cli.checks import CHECKS, Finding, Severity, run_checks
from kvoffload_cli.facts import ClusterFacts
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observe import observe_cluster
from kvoffload_cli.options import Context, Kubeconfig, Output
from kvoffload_cli.output import OutputFormat, escape, make_console, print_json

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}


def command(kubeconfig: Kubeconfig = None, context: Context = None, output: Output = OutputFormat.TEXT) -> None:
    """Find what is wrong, with the remedy.

    Check nodes, kubelets, pages, webhook, certificates, CRDs, pools and pods; status 1 if anything is an error.
    """
    facts = observe_cluster(ClusterReader(kubeconfig=kubeconfig, context=context), now=datetime.now(UTC))
    findings = run_checks(facts)
    console = make_console()
    if output is OutputFormat.JSON:
        print_json(console, as_document(facts, findings))
    else:
        render(console, facts, findings)
    raise typer.Exit(exit_status(findings))


def exit_status(findings: list[Finding]) -> int:
    """1 where something is an error, 0 for warnings alone."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_document(facts: ClusterFacts, findings: list[Finding]) -> dict[str, Any]:
    """Findings and what was looked at, for programs."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "checked": looked_at(facts),
        "notChecked": list(facts.unreadable),
    }


def render(console: Console, facts: ClusterFacts, findings: list[Finding]) -> None:
    """Print the findings for people."""
    for finding in findings:
        style = STYLES[finding.severity]
        head = f"[{style}]{finding.severity.value:<8}[/{style}] [bold]{escape(finding.subject)}[/bold]"
        console.print(f"{head} {escape(finding.message)}", soft_wrap=True)
        console.print(f"{'':<8} -> {escape(finding.remedy)}", soft_wrap=True)
    for sentence in facts.unreadable:
        console.print(f"not checked: {escape(sentence)}", soft_wrap=True)
    counts = ", ".join(f"{count} {name}" for name, count in looked_at(facts).items())
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    console.print(
        f"{len(CHECKS)} checks over {counts}: {errors} errors, {len(findings) - errors} warnings", soft_wrap=True
    )


def looked_at(facts: ClusterFacts) -> dict[str, int]:
    """How many objects of each kind were judged."""
    return {
        "nodes": len(facts.nodes),
        "pools": len(facts.pools),
        "regions": len(facts.regions),
        "daemons": len(facts.daemons),
        "labelled pods": len(facts.pods),
    }
