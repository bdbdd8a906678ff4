"""Looks after the webhook from the leader: certificates and caBundle, and whether injection works at present.

Runs in the operator's leader, a task of `operator.py`. The result is every pool's condition InjectionReady.
"""

import logging
from datetime import datetime, timedelta

from kvoffload.api.conditions import PoolReason
from kvoffload_operator.kube import DEPLOYMENTS, MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS, KubeClient
from kvoffload_operator.settings import CertificateMode, Settings
from kvoffload_operator.status import MAX_ERROR_MESSAGE, InjectionHealth
from kvoffload_operator.webhook.certificates import ensure_certificates

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0


def replica_names(settings: Settings) -> tuple[str, ...]:
    """Of each replica: its Deployment, Service and MutatingWebhookConfiguration."""
    return tuple(f"{settings.webhook_name}-{replica}" for replica in range(settings.webhook_replicas))


def service_names(settings: Settings) -> tuple[str, ...]:
    """DNS names by which the API server calls the webhook: any replica about pools, each one about pods."""
    return tuple(
        f"{service}.{settings.namespace}{suffix}"
        for service in (settings.webhook_name, *replica_names(settings))
        for suffix in (".svc", "", ".svc.cluster.local")
    )


async def look_after_webhook(
    kube: KubeClient, settings: Settings, owner: dict[str, str], now: datetime
) -> tuple[InjectionHealth, float]:
    """One pass: certificates where they are ours, then health; and seconds until the next pass."""
    wait = CHECK_SECONDS
    if settings.certificate_mode is CertificateMode.SELF:
        plan = await ensure_certificates(
            kube,
            namespace=settings.namespace,
            secret=settings.certificate_secret,
            dns_names=service_names(settings),
            configurations=(
                (VALIDATING_WEBHOOKS, settings.webhook_name),
                *((MUTATING_WEBHOOKS, name) for name in replica_names(settings)),
            ),
            owner=owner,
            lifetime=timedelta(days=settings.certificate_days),
            now=now,
        )
        wait = min(wait, max(1.0, plan.recheck_after.total_seconds()))
    return await observe_injection(kube, settings), wait


def unknown_injection(error: Exception) -> InjectionHealth:
    """What is known where the operator failed to look: nothing, and its certificates are not renewed."""
    return InjectionHealth(
        PoolReason.WEBHOOK_UNKNOWN,
        f"the operator failed to look after the webhook ({type(error).__name__}: {str(error)[:MAX_ERROR_MESSAGE]}) and "
        "tries again: whether pods are injected is not known, and certificates are not renewed meanwhile; its log has "
        "the traceback",
    )


async def observe_injection(kube: KubeClient, settings: Settings) -> InjectionHealth:
    """Whether a pod that is created now would be injected: one replica that can be called is enough."""
    names = replica_names(settings)
    ailments = [ailment for name in names if (ailment := await _replica_ailment(kube, settings, name)) is not None]
    if len(ailments) < len(names):
        return InjectionHealth(
            PoolReason.WEBHOOK_SERVING, f"{len(names) - len(ailments)} of {len(names)} replicas answer"
        )
    if not ailments:
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            "the chart's webhook.replicas is 0: new pods start without offload; set it to 2",
        )
    return ailments[0]


async def _replica_ailment(kube: KubeClient, settings: Settings, name: str) -> InjectionHealth | None:
    """Why the API server cannot have a pod injected by that replica."""
    configuration = await kube.get(MUTATING_WEBHOOKS, name)
    if configuration is None:
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            f"MutatingWebhookConfiguration {name} is gone: new pods start without offload; `helm upgrade` makes it "
            "again",
        )
    webhooks = configuration.get("webhooks") or []
    if not webhooks:
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            f"MutatingWebhookConfiguration {name} has no webhooks any more: new pods start without offload; `helm "
            "upgrade` puts them back",
        )
    if any(not webhook["clientConfig"].get("caBundle") for webhook in webhooks):
        return InjectionHealth(
            PoolReason.CERTIFICATE_MISSING,
            f"MutatingWebhookConfiguration {name} has no caBundle: new pods start without offload; certificates are "
            f"{settings.certificate_mode}",
        )
    deployment = await kube.get(DEPLOYMENTS, name, settings.namespace)
    status = (deployment or {}).get("status", {})
    if not status.get("availableReplicas", 0):
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            f"none of the webhook's Deployments is available ({settings.namespace}/{name}: 0 of "
            f"{status.get('replicas', 0)} pods): new pods start without offload; `kubectl get pods -n "
            f"{settings.namespace} -l app.kubernetes.io/component=webhook` and their logs say why",
        )
    return None
