"""`make demo`: the whole system on a real local cluster, from nothing to one page of figures."""

import time

from hack.cache import REPOSITORY
from hack.cluster.settings import ClusterSettings
from hack.console import main_guard, say
from hack.demo.run import MANIFESTS, OUTPUT, run
from hack.demo.summary import print_summary


def main() -> None:
    """Run the demo and print its summary."""
    started = time.monotonic()
    summary, shared = run(ClusterSettings.from_environment())
    print_summary(summary, shared.kubernetes_view)
    say(f"\nCross-engine hits (chunks that B loaded and A had stored): {shared.figures.cross_engine_hits}")
    say(f"Figures: {OUTPUT / 'summary.json'}; took {time.monotonic() - started:.0f} s.")
    say(
        f'The cluster and the chart still run. To go on by hand: eval "$(make -s env)"; kubectl apply -f '
        f"{MANIFESTS.relative_to(REPOSITORY)}; examples/README.md shows how to ask. `make demo-down` ends them."
    )


if __name__ == "__main__":
    main_guard(main)
