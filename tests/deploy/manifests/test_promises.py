"""Compares deploy/README.md with the rendered objects: the table of promises, flags, settings, deletions, routes."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from support.kubernetes.deploy_promises import COMPONENTS, PAGE, promises
from support.kubernetes.deploy_tools import kustomize
from support.kubernetes.fleet_variants import VARIANTS, Variant, write
from support.kubernetes.manifests import OVERLAYS, arguments, of_kind, rendered, workloads

_ALL = (*OVERLAYS, *VARIANTS)
_SHORT = {"hpa": "horizontalpodautoscaler", "pdb": "poddisruptionbudget"}
_AGGREGATED = {"gpu": "aggregated", "production": "production-aggregated"}
_PROMISES = [pytest.param(one, place, id=f"{one.what}, {place}") for one in promises() for place in one.places()]


@pytest.mark.parametrize(("promise", "place"), _PROMISES)
def test_a_promise_is_kept(promise, place):
    printed = _jsonpath(_object(place, promise.object), promise.field)
    assert promise.is_in(printed), f"{promise.what}: {promise.object} has {printed!r}"


def test_every_overlay_and_component_has_a_promise():
    named = {name for one in promises() for name in one.names}
    # The rows of overlays cover these two.
    assert {*OVERLAYS, *COMPONENTS} - named <= {"tls", "api-keys"}


def test_flags_that_the_page_ascribes_to_overlays_are_rendered():
    said = re.findall(r"`(--[a-z-]+)`[^.|]{0,60}?`(cpu-demo|gpu|aggregated|production)` (?:sets|gives)", PAGE)
    assert {flag for flag, _ in said} >= {"--shed", "--kv-plain"}
    for flag, overlay in said:
        words = [word for one in workloads(overlay) for word in arguments(one)]
        assert any(word.partition("=")[0] == flag for word in words), f"{overlay} does not give {flag}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"maxGateways": None}, r"``[^`]*(`data\.)NAME(` is missing) ``"),
        ({"gateways": "three"}, r"a count that is no number: `(cannot decode !!str)()`"),
    ],
)
def test_a_wrong_setting_fails_with_the_message_of_the_page(settings, message):
    ((before, after),) = re.findall(message, PAGE)
    with pytest.raises(AssertionError) as error:
        kustomize(write("production-wrong", Variant("production", settings=settings)))
    assert re.search(re.escape(before) + ".*" + re.escape(after), str(error.value))


def test_an_external_redis_replaces_the_built_in_one():
    for overlay in ("production-external-redis", "gpu-external-redis"):
        assert not [one for one in rendered(overlay) if one["metadata"]["name"].startswith("baton-redis")]


def test_no_two_routes_claim_one_host():
    """A listener accepts only one of an HTTPRoute and a GRPCRoute whose host names intersect."""
    for overlay in _ALL:
        for first, other in itertools.product(of_kind(overlay, "HTTPRoute"), of_kind(overlay, "GRPCRoute")):
            hosts = [set(one["spec"].get("hostnames", ["*"])) for one in (first, other)]
            parents = [{str(ref) for ref in one["spec"]["parentRefs"]} for one in (first, other)]
            assert not (parents[0] & parents[1] and any(_intersect(a, b) for a in hosts[0] for b in hosts[1])), overlay


@pytest.mark.parametrize(
    ("host", "other", "intersect"),
    [
        ("*", "a.example.com", True),
        ("a.example.com", "a.example.com", True),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "example.com", False),
        ("chat.example.com", "grpc.chat.example.com", False),
    ],
)
def test_host_names_intersect_as_in_the_gateway_api(host, other, intersect):
    assert _intersect(host, other) == _intersect(other, host) == intersect


@pytest.mark.parametrize("overlay", ["gpu", "production"])
def test_the_page_deletes_objects_that_the_new_overlay_lacks(overlay):
    fleets = {"disaggregated": overlay, "aggregated": _AGGREGATED[overlay]}
    rows = re.findall(r"\| `(\w+)` \| `(\w+)` \| `kubectl -n baton delete (\S+) -l '?(.*?)'?` \|", PAGE)
    assert [row[:2] for row in rows] == [("disaggregated", "aggregated"), ("aggregated", "disaggregated")]
    for before, after, kinds, selector in rows:
        full = {_SHORT.get(kind, kind) for kind in kinds.split(",")}
        deleted = [
            one
            for one in rendered(fleets[before])
            if one["kind"].lower() in full and _selected(selector, one["metadata"]["labels"])
        ]
        assert _ids(deleted) == _ids(rendered(fleets[before])) - _ids(rendered(fleets[after]))


def test_the_page_deletes_objects_that_an_external_redis_replaces():
    kinds = re.findall(r"`external-redis` \| `kubectl -n baton delete (\S+) baton-redis`", PAGE)[0].split(",")
    before, after = rendered("production"), rendered("production-external-redis")
    assert {(kind, "baton-redis") for kind in kinds} == {
        (kind.lower(), name) for kind, name in _ids(before) - _ids(after)
    }


def _ids(manifests) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in manifests}


def _selected(selector, labels) -> bool:
    """`key=value` or `key in (value, value)`."""
    key, values = re.fullmatch(r"([\w/]+)(?:=| in \()([\w, ]+)\)?", selector).groups()
    return labels.get(key) in values.split(", ")


def _object(overlay, target):
    kind, _, name = target.partition("/")
    full = _SHORT.get(kind, kind)
    found = [one for one in rendered(overlay) if one["kind"].lower() == full and one["metadata"]["name"] == name]
    assert found, f"{overlay} has no {target}"
    return found[0]


def _jsonpath(document, path) -> str:
    """Returns what `kubectl get -o jsonpath` prints: strings as they are, other values as JSON."""
    values = [document]
    for name, index in re.findall(r"\.(\w+)|\[([^\]]+)\]", path):
        if name:
            values = [one[name] for one in values if name in one]
        elif index == "*":
            values = [item for one in values for item in one]
        elif index.startswith("?"):
            key, wanted = re.fullmatch(r'\?\(@\.(\w+)=="(.*)"\)', index).groups()
            values = [item for one in values for item in one if item.get(key) == wanted]
        else:
            values = [one[int(index)] for one in values]
    return " ".join(one if isinstance(one, str) else json.dumps(one, separators=(",", ":")) for one in values)


def _intersect(host, other) -> bool:
    if host == other or "*" in (host, other):
        return True
    return any(a.startswith("*.") and b.endswith(a[1:]) for a, b in ((host, other), (other, host)))
