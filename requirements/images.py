"""Pins the base images in deploy/ to the digests that a registry has for their tags. Leaves other images alone."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[1]
FILES = ("deploy/Dockerfile", "deploy/kubernetes/base/redis.yaml")
_REGISTRY = "https://registry-1.docker.io"
_SECONDS = 30.0
_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_REFERENCE = re.compile(
    r"^(?P<before>ARG PYTHON=|\s*image: )(?P<name>[\w./-]+):(?P<tag>[\w.-]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?$",
    re.MULTILINE,
)

PINNED, UNPINNED, UNREACHABLE = 0, 1, 2  # exit codes


class Unreachable(Exception):
    """The registry did not answer, or its answer cannot be used."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image by tag, and its digest where it is pinned."""

    name: str
    tag: str
    digest: str | None

    @property
    def path(self) -> str:
        """Its path at the registry: images without a folder are in `library`."""
        name = self.name.removeprefix("docker.io/")
        return name if "/" in name else f"library/{name}"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" + (f"@{self.digest}" if self.digest else "")


def images_in(text: str) -> list[Image]:
    """Returns the images of a Dockerfile or a manifest."""
    return [Image(found["name"], found["tag"], found["digest"]) for found in _REFERENCE.finditer(text)]


def pinned(text: str, digests: Mapping[str, str]) -> str:
    """Returns a text with a digest for each image. `digests` is by name and tag."""

    def written(found: re.Match[str]) -> str:
        name = f"{found['name']}:{found['tag']}"
        return f"{found['before']}{name}@{digests[name]}"

    return _REFERENCE.sub(written, text)


def digest_of(image: Image, registry: str) -> str:
    """Asks the registry. Raises Unreachable."""
    url = f"{registry}/v2/{image.path}/manifests/{image.tag}"
    try:
        body, headers = _get(url, {"Accept": ", ".join(_TYPES)})
    except (urllib.error.URLError, TimeoutError, OSError, ValueError) as error:
        raise Unreachable(f"{image}: {url}: {error}") from error
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if headers.get("content-type", "").partition(";")[0] not in _TYPES:
        raise Unreachable(f"{image}: {url} has {headers.get('content-type')}, which is no index of platforms")
    if headers.get("docker-content-digest", digest) != digest:
        raise Unreachable(f"{image}: {url} has the digest {digest} and says {headers['docker-content-digest']}")
    return digest


def _get(url: str, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Gets a URL, with an anonymous token where the registry asks for one."""
    try:
        return _read(url, headers)
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("www-authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urlencode({key: asked[key] for key in ("service", "scope") if key in asked})
    answer = json.loads(_read(f"{asked.get('realm', '')}?{query}", {})[0])
    return _read(url, {**headers, "Authorization": f"Bearer {answer['token']}"})


def _read(url: str, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=_SECONDS) as answer:
        return answer.read(), {name.lower(): value for name, value in answer.headers.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 where all images are pinned, 1 where --check finds one that is not, 2 where a registry fails."""
    parser = argparse.ArgumentParser(prog="images.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only list the images without a digest")
    parser.add_argument("--registry", default=_REGISTRY, metavar="URL", help=f"a registry or mirror ({_REGISTRY})")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="the checkout (this one)")
    config = parser.parse_args(words)
    texts = {config.root / name: (config.root / name).read_text() for name in FILES}
    images = {f"{one.name}:{one.tag}": one for text in texts.values() for one in images_in(text)}
    if config.check:
        unpinned = [str(one) for one in images.values() if one.digest is None]
        for one in unpinned:
            print(f"{one} has no digest; make pin-images writes it")
        return UNPINNED if unpinned else PINNED
    try:
        digests = {name: digest_of(one, config.registry.rstrip("/")) for name, one in images.items()}
    except Unreachable as error:
        print(f"images.py: {error}; nothing was written", file=sys.stderr)
        return UNREACHABLE
    for path, text in texts.items():
        path.write_text(pinned(text, digests))
    for name, digest in digests.items():
        print(f"{name}@{digest}")
    return PINNED


if __name__ == "__main__":
    sys.exit(main())
