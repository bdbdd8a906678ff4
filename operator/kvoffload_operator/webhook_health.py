"""Looks after the webhook from the leader: certificates and caBundle, and whether injection works at present.

Runs in the operator's leader, a task of `operator.py`. The result is every pool's condition InjectionReady.
"""

import logging
from datetime import datetime, timedelta

from kvoffload.api.conditions import PoolReason
from kvoffload_operator import metrics
from kvoffload_operator.kube import DEPLOYMENTS, MUTATING_WEBHOOKS, KubeClient
from kvoffload_operator.settings import CertificateMode, Settings
from kvoffload_operator.status import InjectionHealth
from kvoffload_operator.webhook.certificates import ensure_certificates

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0


def service_names(settings: Settings) -> tuple[str, ...]:
    """DNS names by which the API server calls the webhook."""
    service, namespace = settings.webhook_service, settings.namespace
    return (f"{service}.{namespace}.svc", f"{service}.{namespace}", f"{service}.{namespace}.svc.cluster.local")


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
            configuration=settings.webhook_configuration,
            owner=owner,
            lifetime=timedelta(days=settings.certificate_days),
            now=now,
        )
        metrics.certificate_expiry_timestamp_seconds.set(plan.expires_at.timestamp())
        wait = min(wait, max(1.0, plan.recheck_after.total_seconds()))
    return await observe_injection(kube, settings), wait


async def observe_injection(kube: KubeClient, settings: Settings) -> InjectionHealth:
    """Whether a pod that is created now would be injected."""
    configuration = await kube.get(MUTATING_WEBHOOKS, settings.webhook_configuration)
    if configuration is None:
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            f"MutatingWebhookConfiguration {settings.webhook_configuration} is gone: new pods start without offload; "
            "`helm upgrade` makes it again",
        )
    if any(not webhook["clientConfig"].get("caBundle") for webhook in configuration["webhooks"]):
        return InjectionHealth(
            PoolReason.CERTIFICATE_MISSING,
            f"MutatingWebhookConfiguration {settings.webhook_configuration} has no caBundle: new pods start without "
            f"offload; certificates are {settings.certificate_mode}",
        )
    deployment = await kube.get(DEPLOYMENTS, settings.webhook_deployment, settings.namespace)
    status = (deployment or {}).get("status", {})
    available = status.get("availableReplicas", 0)
    if not available:
        return InjectionHealth(
            PoolReason.WEBHOOK_UNAVAILABLE,
            f"0 of {status.get('replicas', 0)} replicas of {settings.namespace}/{settings.webhook_deployment} are "
            "available: new pods start without offload",
        )
    return InjectionHealth(PoolReason.WEBHOOK_SERVING, f"{available} replicas answer")
