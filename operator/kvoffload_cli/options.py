"""Options that several commands share."""

from typing import Annotated

import typer

from kvoffload_cli.output import OutputFormat

Kubeconfig = Annotated[str | None, typer.Option(help="Kubeconfig file; default: $KUBECONFIG or ~/.kube/config.")]
Context = Annotated[str | None, typer.Option(help="Context in the kubeconfig.")]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="text or json.")]
