"""Requests for vectors over a worker's stream."""

from __future__ import annotations
