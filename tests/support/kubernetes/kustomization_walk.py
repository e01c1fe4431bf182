"""Follows a kustomization and finds patches, replacements and images that match no object, which kustomize ignores.

Objects are read, named, labelled and deleted in kustomize's order. Other effects of patches are ignored. A field that
this module does not support is an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_FIELDS = {
    "apiVersion",
    "kind",
    "namespace",
    "nameSuffix",
    "labels",
    "resources",
    "components",
    "secretGenerator",
    "images",
    "patches",
    "replacements",
}


@dataclass(frozen=True)
class Unmatched:
    """A selection of a kustomization that matches no object."""

    kustomization: Path
    what: str  # patch, replacement, image
    selector: str

    def __str__(self) -> str:
        return f"{self.kustomization}: {self.what} of {self.selector} matches nothing"


class Walk:
    """The objects of a folder, and the selections in its kustomizations that match none."""

    def __init__(self, folder: Path) -> None:
        self.unmatched: list[Unmatched] = []
        self.objects = self._accumulate(folder.resolve(), [])

    def names(self) -> set[tuple[str, str]]:
        """Returns the kind and name of each object."""
        return {(one["kind"], one["metadata"]["name"]) for one in self.objects}

    def _accumulate(self, folder: Path, objects: list[Manifest]) -> list[Manifest]:
        """Returns the objects after a kustomization. A component changes the objects given."""
        file = folder / "kustomization.yaml"
        text = yaml.safe_load(file.read_text())
        unknown = set(text) - _FIELDS
        assert not unknown, f"{file}: {sorted(unknown)} is not supported here"
        for resource in text.get("resources", ()):
            path = folder / resource
            objects = [*objects, *(self._accumulate(path.resolve(), []) if path.is_dir() else _read(path))]
        objects = [*objects, *_generated(text.get("secretGenerator", ()))]
        for component in text.get("components", ()):
            objects = self._accumulate((folder / component).resolve(), objects)
        objects = self._patched(file, text.get("patches", ()), objects)
        for one in objects:
            _rename(one, text.get("nameSuffix", ""), text.get("labels", ()))
            if "namespace" in text:
                one["metadata"]["name" if one["kind"] == "Namespace" else "namespace"] = text["namespace"]
        self._look_at_images(file, text.get("images", ()), objects)
        self._look_at_replacements(file, text.get("replacements", ()), objects)
        return objects

    def _patched(self, file: Path, patches: Iterable[Manifest], objects: list[Manifest]) -> list[Manifest]:
        for patch in patches:
            assert "path" not in patch, f"{file}: patches in files is not supported here"
            content = yaml.safe_load(patch["patch"])
            target = patch.get("target")
            if target is None:
                target = {"kind": content["kind"], "name": re.escape(content["metadata"]["name"])}
            chosen = [one for one in objects if matches(target, one, anchored=True)]
            if not chosen:
                self.unmatched.append(Unmatched(file, "patch", str(target)))
            if isinstance(content, dict) and content.get("$patch") == "delete":
                objects = [one for one in objects if one not in chosen]
        return objects

    def _look_at_images(self, file: Path, images: Iterable[Manifest], objects: list[Manifest]) -> None:
        used = {re.split(r"[:@]", image)[0] for one in objects for image in _images(one)}
        self.unmatched += [Unmatched(file, "image", image["name"]) for image in images if image["name"] not in used]

    def _look_at_replacements(self, file: Path, replacements: Iterable[Manifest], objects: list[Manifest]) -> None:
        for replacement in replacements:
            for target in replacement["targets"]:
                select = target["select"]
                if not any(matches(select, one, anchored=False) for one in objects):
                    self.unmatched.append(Unmatched(file, "replacement", str(select)))


def matches(selector: Mapping[str, str], manifest: Manifest, *, anchored: bool) -> bool:
    """Returns whether a selector matches. With `anchored` values are regular expressions, as in patches."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    metadata = manifest["metadata"]
    own = {"group": group, "version": version, "kind": manifest["kind"], "name": metadata["name"]}
    for key, wanted in selector.items():
        if key in ("labelSelector", "annotationSelector"):
            held = metadata.get("labels" if key == "labelSelector" else "annotations", {})
            if not set(_pairs(wanted)) <= set(held.items()):
                return False
        elif not (re.fullmatch(wanted, own[key]) if anchored else wanted == own[key]):
            return False
    return True


def _pairs(selector: str) -> Iterator[tuple[str, str]]:
    for part in selector.split(","):
        name, equals, value = part.partition("=")
        assert equals, f"label selector {selector!r} is not supported here"
        yield name, value


def _read(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def _generated(generators: Iterable[Manifest]) -> list[Manifest]:
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": one["name"]}} for one in generators]


def _rename(manifest: Manifest, suffix: str, labels: Iterable[Manifest]) -> None:
    manifest["metadata"] = metadata = copy.deepcopy(manifest["metadata"])
    if manifest["kind"] != "Namespace":
        metadata["name"] += suffix
    for entry in labels:
        metadata["labels"] = {**metadata.get("labels", {}), **entry["pairs"]}


def _images(manifest: Manifest) -> list[str]:
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    return [one["image"] for one in pod.get("containers", ())]
