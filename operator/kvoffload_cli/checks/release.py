"""Checks of the cluster and of what the chart installs. Pure."""

from datetime import timedelta

from kvoffload.api.keys import APPLY_CRDS_COMMAND
from kvoffload_cli.checks.finding import Found, Severity
from kvoffload_cli.facts import CertificateFacts, ClusterFacts, Part, Workload, lacks_image
from kvoffload_cli.remedies import MEND_IMAGE

OLDEST_KUBERNETES = (1, 32)
"""Bound service-account tokens name their node since 1.32; the admission policy of the regions needs that."""
CERTIFICATE_WARNING = timedelta(days=14)
"""Less for a certificate of less than 56 days: a quarter of its validity."""


def kubernetes_is_too_old(facts: ClusterFacts) -> Found:
    """The API server lacks what the admission policy of the regions needs."""
    if (0, 0) < facts.server_version < OLDEST_KUBERNETES:
        found, needed = (".".join(map(str, version)) for version in (facts.server_version, OLDEST_KUBERNETES))
        yield Severity.ERROR, "cluster", f"Kubernetes {found}, needed {needed} or newer", "upgrade the control plane"


def crd_is_missing_or_outdated(facts: ClusterFacts) -> Found:
    """A CRD is not there, not served, or older than this program."""
    for crd in facts.crds:
        remedy = f"{APPLY_CRDS_COMMAND} (helm installs CRDs, and never upgrades them)"
        if not crd.serves_version:
            yield Severity.ERROR, f"crd/{crd.name}", "not installed, or does not serve v1alpha1", remedy
        elif not crd.is_established:
            yield Severity.ERROR, f"crd/{crd.name}", "not established", "kubectl describe crd " + crd.name
        elif crd.missing_fields:
            fields = ", ".join(crd.missing_fields[:5]) + (" ..." if len(crd.missing_fields) > 5 else "")
            message = f"{len(crd.missing_fields)} fields of this version are missing: {fields}"
            yield Severity.ERROR, f"crd/{crd.name}", message, remedy


def object_is_unreadable(facts: ClusterFacts) -> Found:
    """An object holds what this version does not know."""
    for sentence in facts.invalid:
        yield Severity.ERROR, "api", sentence, "use the plugin of the installed version, or correct the object"


def release_is_incomplete(facts: ClusterFacts) -> Found:
    """Operator or webhook is not installed or not running."""
    if Part.DEPLOYMENTS in facts.unread:
        return
    for component, effect in (
        ("operator", "pools are not reconciled"),
        ("webhook", "labelled pods start, and are not injected"),
    ):
        workloads = [one for one in facts.workloads if one.component == component]
        if not workloads:
            yield Severity.ERROR, component, f"no Deployment: {effect}", install_command(facts)
        component_is_ready = any(one.num_ready for one in workloads)
        for one in workloads:
            if one.num_ready < max(1, one.num_desired):
                subject = f"deployment/{one.namespace}/{one.name}"
                severity = Severity.WARNING if component_is_ready else Severity.ERROR
                message = f"{one.num_ready} of {one.num_desired} replicas are ready" + (
                    "" if component_is_ready else f": {effect}"
                )
                look = f"kubectl -n {one.namespace} describe deployment {one.name}"
                scale = f"kubectl -n {one.namespace} scale deployment {one.name} --replicas=1"
                if one.failures:
                    message, look = f"{message} ({one.failures[0]})", mend_rollout(one)
                yield severity, subject, message, look if one.num_desired else scale


def rollout_is_unfinished(facts: ClusterFacts) -> Found:
    """Operator or webhook run, and not as the last `helm upgrade` asked: their new pods do not come, or not yet."""
    for one in facts.workloads:
        if one.num_ready < max(1, one.num_desired) or not (one.is_rolling_out or one.failures):
            continue
        subject, still = f"deployment/{one.namespace}/{one.name}", "the old pods still serve"
        if one.failures:
            yield Severity.ERROR, subject, f"its new pods do not run, {still}: {one.failures[0]}", mend_rollout(one)
        else:
            remedy = f"kubectl -n {one.namespace} rollout status deployment {one.name}"
            yield Severity.WARNING, subject, f"a rollout is under way, {still}", remedy


def mend_rollout(workload: Workload) -> str:
    """What helps new pods that do not run, by what the first of them says; and the way back."""
    there, failure = f"kubectl -n {workload.namespace}", workload.failures[0]
    mend = f"{there} describe deployment {workload.name}"
    if lacks_image(failure.waits):
        mend = MEND_IMAGE
    elif failure.ends_at_once:
        mend = f"{there} logs {failure.pod} --previous"
    elif failure.pod:
        mend = f"{there} describe pod {failure.pod}"
    return f"{mend}; or, after an upgrade, go back: helm rollback {workload.release} -n {workload.namespace} --wait"


def install_command(facts: ClusterFacts) -> str:
    """The helm command that brings what is missing: into the release that is there, or a first one."""
    found = next((one for one in facts.workloads if one.release), None)
    if found is not None:
        return f"helm upgrade {found.release} charts/kvoffload -n {found.namespace}"
    command = "helm install kvoffload charts/kvoffload -n kvoffload-system --create-namespace"
    return f"{command}, with the images and the namespace's label as docs/install.md (Install the chart) has them"


def webhook_is_not_trusted(facts: ClusterFacts) -> Found:
    """The API server cannot call the webhook: no configuration, no authority, or one that did not sign."""
    mutating = [one for one in facts.webhooks if one.kind == "mutating"]
    if not mutating and facts.workloads and Part.WEBHOOKS not in facts.unread:
        yield (
            Severity.ERROR,
            "webhook",
            "no MutatingWebhookConfiguration of the release: no pod is injected",
            install_command(facts),
        )
    for webhook in facts.webhooks:
        subject = f"{webhook.kind}webhookconfiguration/{webhook.configuration}"
        namespace = webhook.service.partition("/")[0]
        remedy = f"kubectl -n {namespace} logs -l app.kubernetes.io/component=operator --tail=-1 | grep -i certificate"
        if not webhook.authorities:
            message = "caBundle is empty: the API server trusts no certificate and injects nothing"
            yield Severity.ERROR, subject, message, remedy
        elif webhook.trusts_serving is False:
            served = ", ".join(sorted({one.where for one in facts.serving_certificates}))
            message = f"no certificate in caBundle signed the serving one ({served}): every call fails"
            yield Severity.ERROR, subject, message, remedy


def webhook_is_not_asked(facts: ClusterFacts) -> Found:
    """A labelled pod goes past the webhook: the one thing that everything above is for, tried."""
    if facts.webhook_answers is False:
        yield (
            Severity.ERROR,
            "webhook",
            "a labelled pod, created in a dry run, came back without the webhook's annotation: no pod is injected",
            "mend what is named above; if that is nothing, the API server cannot reach the webhook: open TCP 9443 from "
            "the control plane to the nodes (docs/troubleshooting.md, No pod is injected)",
        )


def certificate_expires(facts: ClusterFacts) -> Found:
    """A certificate is past its time, or nearly, and was not renewed when a third of it was left."""
    decisive: dict[str, CertificateFacts] = {}
    for one in facts.serving_certificates:  # every replica has to be trusted, and one authority is enough
        decisive[one.where] = min(one, decisive.get(one.where, one), key=lambda each: each.not_after)
    for one in (each for webhook in facts.webhooks for each in webhook.authorities):
        decisive[one.where] = max(one, decisive.get(one.where, one), key=lambda each: each.not_after)
    for where, one in sorted(decisive.items()):
        left = one.not_after - facts.now
        if left > min(CERTIFICATE_WARNING, (one.not_after - one.not_before) / 4):
            continue
        expired = left <= timedelta()
        yield (
            Severity.ERROR if expired else Severity.WARNING,
            where,
            f"{'expired' if expired else 'expires'} {one.not_after:%Y-%m-%d %H:%M} UTC",
            "restart the operator, which renews its own; a given or cert-manager certificate is renewed by its issuer",
        )
