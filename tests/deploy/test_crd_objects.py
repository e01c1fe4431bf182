"""Objects of other projects' CRDs have the required fields and the types of their schemas."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from support.kubernetes.fleet_variants import VARIANTS
from support.kubernetes.manifests import rendered
from support.processes import node

_FOLDER = Path(__file__).parent / "crds"
_KINDS = ("BackendTLSPolicy", "GRPCRoute", "HTTPRoute", "PodMonitor", "ScaledObject")


@pytest.fixture(scope="module", autouse=True)
def schemas():
    node.install(_FOLDER)


def test_the_objects_are_valid(tmp_path):
    found = [one for variant in VARIANTS for one in rendered(variant) if one["kind"] in _KINDS]
    assert {one["kind"] for one in found} == set(_KINDS)
    assert _problems(tmp_path, found) == ""


def test_a_wrong_object_is_found(tmp_path):
    (policy,) = (one for one in rendered("production-gateway-api") if one["kind"] == "BackendTLSPolicy")
    (scaled, *_) = (one for one in rendered("production-keda") if one["kind"] == "ScaledObject")
    policy, scaled = copy.deepcopy(policy), copy.deepcopy(scaled)
    del policy["spec"]["targetRefs"]
    scaled["spec"]["minReplicaCount"] = "3"
    problems = _problems(tmp_path, [policy, scaled]).splitlines()
    assert [line.partition(":")[0] for line in problems] == [
        "BackendTLSPolicy baton-gateway",
        "ScaledObject baton-gateway",
    ]


def _problems(folder, objects) -> str:
    file = folder / "objects.json"
    file.write_text(json.dumps(objects))
    return node.run("validate.mjs", str(file), folder=_FOLDER)
