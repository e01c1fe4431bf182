"""Applies overlays over each other with kubectl: the stored objects are those of the new overlay, and no count dips."""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess

import pytest
import yaml
from support.cluster.apply_server import apply_server
from support.kubernetes.deploy_promises import PAGE, promises
from support.kubernetes.deploy_tools import kubectl, kubectl_program
from support.kubernetes.manifests import OVERLAYS, rendered

_CLIENT, _SERVER = (), ("--server-side",)
_CRDS = {
    "keda.sh/v1alpha1": ("ScaledObject",),
    "gateway.networking.k8s.io/v1": ("HTTPRoute", "GRPCRoute", "BackendTLSPolicy"),
    "monitoring.coreos.com/v1": ("PodMonitor",),
}


def _every_pair_once(overlays) -> list[str]:
    """Returns a round trip that goes from each overlay to each other one exactly once."""
    trip, open_ends = [], [overlays[0]]
    left = {one: [other for other in overlays if other != one] for one in overlays}
    while open_ends:
        if left[open_ends[-1]]:
            open_ends.append(left[open_ends[-1]].pop())
        else:
            trip.append(open_ends.pop())
    return trip[::-1]


_TRIP = _every_pair_once(OVERLAYS)


def test_the_trip_has_every_pair():
    assert sorted(itertools.pairwise(_TRIP)) == sorted(itertools.permutations(OVERLAYS, 2))


class Fleet:
    """One namespace, and the overlay that was applied last."""

    def __init__(self, url, objects, ways) -> None:
        self.url = url
        self.objects = objects
        self.overlay = None
        self._ways = itertools.cycle(ways)

    def apply(self, overlay) -> None:
        done = _apply(self.url, rendered(overlay), *next(self._ways))
        assert done.returncode == 0, done.stderr
        self.overlay = overlay

    def grow(self) -> None:
        """Adds pods where the autoscaler may."""
        for one in rendered(self.overlay):
            if one["kind"] == "HorizontalPodAutoscaler" and one["spec"]["minReplicas"] < one["spec"]["maxReplicas"]:
                self.objects.scale(one["spec"]["scaleTargetRef"]["name"], one["spec"]["minReplicas"] + 3)


@pytest.fixture(scope="module", params=[(_CLIENT,), (_SERVER,), (_CLIENT, _SERVER)], ids=["client", "server", "both"])
def fleet(request):
    with apply_server() as (url, objects):
        yield Fleet(url, objects, request.param)


@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(_TRIP)))
def test_an_overlay_over_another(fleet, before, after):
    if fleet.overlay != before:
        fleet.apply(before)
    fleet.grow()
    counts = fleet.objects.counts()
    fleet.objects.watch()
    fleet.apply(after)
    now = fleet.objects.counts()
    dips = {key: (count, fleet.objects.lowest[key], now[key]) for key, count in counts.items()}
    assert not {key: dip for key, dip in dips.items() if dip[1] < min(dip[0], dip[2])}
    for manifest in rendered(after):
        namespace = "" if manifest["kind"] == "Namespace" else "baton"
        stored = fleet.objects.get((manifest["kind"], namespace, manifest["metadata"]["name"]))
        assert _as_applied(stored, manifest) == manifest


def test_applying_again_changes_no_count(fleet):
    if fleet.overlay != "production":
        fleet.apply("production")
    fleet.grow()
    counts = fleet.objects.counts()
    fleet.apply("production")
    assert fleet.objects.counts() == counts


def test_applying_again_patches_nothing():
    with apply_server() as (url, _):
        _apply(url, rendered("production"))
        done = _apply(url, rendered("production"))
    changed = [line for line in done.stdout.splitlines() if not line.endswith(" unchanged")]
    # kubectl always replaces the selectors of budgets.
    assert done.returncode == 0
    assert {line.partition("/")[0] for line in changed} == {"poddisruptionbudget.policy"}


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(
    ("first", "then"),
    [(_CLIENT, _CLIENT), (_CLIENT, (*_SERVER, "--force-conflicts")), (_SERVER, (*_SERVER, "--force-conflicts"))],
    ids=["client", "client, then server", "server"],
)
def test_manifests_with_replicas_release_their_counts_or_dip(tmp_path, first, then, released):
    """Runs the page's loop. Without it kubectl removes `replicas`, and the count falls to 1."""
    with apply_server() as (url, objects):
        old = [one for one in copy.deepcopy(rendered("gpu")) if one["kind"] != "HorizontalPodAutoscaler"]
        for one in old:
            if one["kind"] == "Deployment":
                one["spec"]["replicas"] = 4
        assert _apply(url, old, *first).returncode == 0
        if released:
            _run_loop(url, tmp_path)
        objects.watch()
        done = _apply(url, rendered("production"), *then)
        assert done.returncode == 0, done.stderr
        lowest = {name: count for (kind, _, name), count in objects.lowest.items() if kind == "Deployment"}
        assert set(lowest.values()) == ({4} if released else {1})
        # Both kinds of apply keep the counts from here on.
        objects.watch()
        for way in (_CLIENT, (*_SERVER, "--force-conflicts")):
            assert _apply(url, rendered("production"), *way).returncode == 0
        assert objects.lowest == objects.counts()


def test_a_missing_crd_is_named():
    (message,) = re.findall(r"a CRD: `(no matches for kind \"ScaledObject\")`", PAGE)
    with apply_server() as (url, _):
        done = _apply(url, rendered("production-keda"))
    assert done.returncode != 0
    assert message in done.stderr


def _by_place():
    """Returns the promises by the first overlay or variant that keeps them."""
    found: dict[str, list] = {}
    for one in promises():
        found.setdefault(one.places()[0], []).append(one)
    return found


@pytest.mark.parametrize(("place", "kept"), _by_place().items(), ids=_by_place())
def test_the_command_of_the_page_prints_the_promises(place, kept):
    (command,) = re.findall(r"`kubectl -n baton (get OBJECT -o jsonpath='\{FIELD\}')`", PAGE)
    with apply_server(_CRDS) as (url, _):
        assert _apply(url, rendered(place)).returncode == 0
        for one in kept:
            words = command.replace("'", "").replace("OBJECT", one.object).replace("FIELD", one.field)
            done = kubectl(url, *words.split(" ", 3))
            assert one.is_in(done.stdout), f"{one.what}: {done.stdout} {done.stderr}"


def _apply(url, manifests, *flags):
    return kubectl(url, "apply", "--validate=false", "--filename=-", *flags, stdin=yaml.safe_dump_all(manifests))


def _run_loop(url, folder) -> None:
    """Runs the loop of the page with a kubectl that has this server's address, and no schema to validate with."""
    (loop,) = re.findall(r"^  (for one in \$\(kubectl.*?\n  done)$", PAGE, re.MULTILINE | re.DOTALL)
    program = folder / "kubectl"
    words = f'exec {kubectl_program()} --server {url} "$@"'
    program.write_text(f'#!/bin/sh\ncase "$*" in *" apply "*) set -- "$@" --validate=false;; esac\n{words}\n')
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "KUBECONFIG": os.devnull}
    command = ["bash", "-e", "-o", "pipefail", "-c", loop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr


def _as_applied(stored, manifest):
    """Returns a stored object without the fields added by the server and kubectl."""
    document = copy.deepcopy(stored)
    for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        document["metadata"].pop(name, None)
    annotations = document["metadata"].get("annotations", {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    if not annotations:
        document["metadata"].pop("annotations", None)
    if "replicas" not in manifest.get("spec", {}):
        document.get("spec", {}).pop("replicas", None)
    return document
