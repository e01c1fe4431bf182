"""Secrets and ConfigMaps that objects read are those that deploy/README.md creates, entry by entry."""

from __future__ import annotations

import re

import pytest
from support.kubernetes.deploy_promises import PAGE
from support.kubernetes.fleet_variants import VARIANTS
from support.kubernetes.manifests import OVERLAYS, of_kind, rendered

_ALL = (*OVERLAYS, *VARIANTS)
# Fields that name a Secret and its entry.
_REFERENCES = ("secretKeyRef", "credentials", "keySecret", "secret")
_COMMANDS = re.findall(r"create (?:secret generic|configmap) (baton-[a-z$-]+)((?:\\\n|[^\n`])*)", PAGE)


@pytest.mark.parametrize("overlay", _ALL)
def test_the_page_creates_all_used_objects(overlay):
    created = _created()
    rendered_here = {one["metadata"]["name"] for one in of_kind(overlay, "Secret")}
    for name, entries in _read(rendered(overlay)):
        if name not in rendered_here:
            assert name in created, f"the page does not create {name}"
            assert entries <= created[name], f"{name} has {created[name]}, and {entries} are read"


def test_objects_created_by_the_page_are_used():
    assert set(_created()) <= {name for overlay in _ALL for name, _ in _read(rendered(overlay))}


def test_pods_read_a_generated_secret_only_where_it_is_rendered():
    """The generated name has a hash; the Secret that the page creates has none."""
    for overlay in _ALL:
        generated = {one["metadata"]["name"] for one in of_kind(overlay, "Secret")}
        read = {name for name, _ in _read(rendered(overlay)) if name.startswith("baton-redis")}
        assert read == (generated or {"baton-redis"})


def _created() -> dict[str, set[str]]:
    """Returns the entries by name. A command in a loop creates several."""
    found: dict[str, set[str]] = {}
    loops = {
        name: words.split() for words, name in re.findall(r"for one in ([a-z ]+); do\n.*?(baton-[a-z-]*)\$one", PAGE)
    }
    for name, flags in _COMMANDS:
        entries = {_entry(value) for value in re.findall(r"--from-(?:literal|file)=\"?(\S+)", flags)}
        before, loop, _ = name.partition("$")
        for one in loops[before] if loop else [""]:
            found[before + one] = entries
    return found


def _entry(value) -> str:
    """`entry=value`, or a file, whose name is the entry."""
    return value.partition("=")[0].rpartition("/")[2]


def _read(node):
    """Yields each Secret and ConfigMap that is read, with the entries that are named."""
    for value in node if isinstance(node, (list, tuple)) else ():
        yield from _read(value)
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in _REFERENCES and isinstance(value, dict) and {"name", "key"} <= set(value):
            yield value["name"], {value["key"]}
        elif key == "secret" and isinstance(value, dict) and "secretName" in value:
            yield value["secretName"], {item["key"] for item in value.get("items", ())}
        elif key == "caCertificateRefs":
            yield from ((one["name"], {"ca.crt"}) for one in value)
        else:
            yield from _read(value)
