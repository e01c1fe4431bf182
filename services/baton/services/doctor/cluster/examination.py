"""All topics of one namespace. An unreadable kind is a finding, and checks that need it are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from baton.services.doctor.cluster.access import Access, settings_of
from baton.services.doctor.cluster.arguments import check_arguments
from baton.services.doctor.cluster.counts import check_counts
from baton.services.doctor.cluster.facts import ClusterFacts
from baton.services.doctor.cluster.look import observe_cluster
from baton.services.doctor.cluster.reader import reader
from baton.services.doctor.cluster.references import check_references
from baton.services.doctor.cluster.rights import check_router_role, check_unread
from baton.services.doctor.cluster.services import check_services
from baton.services.doctor.cluster.versions import check_versions
from baton.services.doctor.finding import Finding, unknown

_CHECKS: tuple[Callable[[ClusterFacts], Iterable[Finding]], ...] = (
    check_versions,
    check_router_role,
    check_counts,
    check_arguments,
    check_references,
    check_services,
)


async def examine_cluster(access: Access, facts: ClusterFacts, seconds: float) -> list[Finding]:
    """Returns every finding. `facts`: the operator's settings; `seconds`: the limit of one request. NoAccess."""
    async with reader(await settings_of(access), seconds) as one:
        read = await observe_cluster(one, facts.namespace)
    return findings(replace(read, overlay=facts.overlay, components=facts.components))


def findings(facts: ClusterFacts) -> list[Finding]:
    """Returns the findings of all checks. An object that a check cannot interpret is a finding too."""
    found = list(check_unread(facts))
    if not facts.version:
        return found
    for check in _CHECKS:
        try:
            found += check(facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            topic = check.__name__.removeprefix("check_")
            what = f"an object has a form that is not Kubernetes' own: {error!r}"
            found.append(unknown(topic, what, "kubectl apply -k of the overlay"))
    return found
