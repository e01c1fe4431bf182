"""The contracts of releases: their messages as in a program of that release."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor

IMAGES = sorted((Path(__file__).resolve().parents[3] / "proto" / "released").glob("*.binpb"))
RELEASES = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)


@functools.cache
def pool_of(image: Path) -> descriptor_pool.DescriptorPool:
    """Returns the descriptors of a release, in a separate pool."""
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def old_messages(image: Path) -> list[Descriptor]:
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    pool = pool_of(image)
    return [
        pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        for file in files.file
        if file.package == "baton.v1"
        for message in file.message_type
    ]


def old(image: Path, name: str) -> Any:
    """Returns a message class of the release."""
    return message_factory.GetMessageClass(pool_of(image).FindMessageTypeByName(f"baton.v1.{name}"))
