"""The layout of workers on one machine: which executor, how many workers of each role, and on which device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.services.machine.devices import Devices
from baton.services.settings import SettingsError

EXECUTORS = ("auto", "cpu", "cuda", "sim")


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of workers by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def total(self) -> int:
        """The number of all workers."""
        return self.prefill + self.decode + self.both

    def roles(self) -> Iterator[tuple[str, int]]:
        """Yields each worker's role, and its number among those of that role."""
        for role, count in (("prefill", self.prefill), ("decode", self.decode), ("both", self.both)):
            yield from ((role, number) for number in range(count))

    def __str__(self) -> str:
        parts = [f"{count} {role}" for role, count in (("prefill", self.prefill), ("decode", self.decode)) if count]
        return ", ".join([*parts, f"{self.both} both"] if self.both else parts)


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker and its device."""

    role: str
    number: int
    variables: Mapping[str, str] = field(default_factory=dict)  # choose its device

    @property
    def worker_id(self) -> str:
        """The worker's name in the fleet."""
        return f"{self.role}-{self.number}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The workers of one machine, and the reasons for the choices."""

    executor: str
    workers: tuple[PlannedWorker, ...]
    reasons: tuple[str, ...] = ()


def choose_layout(executor: str, counts: Counts | None, devices: Devices, may_share: bool = False) -> Layout:
    """Returns the layout for `executor` (auto: by the devices) and these counts (None: one worker a device).

    `may_share`: each worker's memory is set, so that several fit on one device. Raises SettingsError where the
    machine cannot hold the layout.
    """
    chosen, why = _executor(executor, devices)
    reasons = [f"executor {chosen}: {why}"]
    if counts is None:
        counts = Counts(both=max(1, len(devices.ids)) if chosen == "cuda" else 1)
        why = "one for each GPU" if chosen == "cuda" else "one uses all cores"
        reasons.append(f"workers: {counts} ({why}; --prefill N --decode M separates the phases)")
    else:
        reasons.append(f"workers: {counts} (as set)")
    if chosen != "cuda":
        return Layout(chosen, tuple(PlannedWorker(*one) for one in counts.roles()), tuple(reasons))
    num_devices = len(devices.ids)
    if counts.total > num_devices and not may_share:
        raise SettingsError(
            f"{counts.total} workers ({counts}) do not fit on {num_devices} GPUs ({devices.summary}): each takes most "
            "of its GPU's memory; start fewer, or give each --kv-cache-memory BYTES or --num-blocks N"
        )
    placed = (
        PlannedWorker(role, number, devices.variables(index % num_devices))
        for index, (role, number) in enumerate(counts.roles())
    )
    return Layout(chosen, tuple(placed), tuple(reasons))


def _executor(wanted: str, devices: Devices) -> tuple[str, str]:
    if wanted == "auto":
        return ("cuda", devices.summary) if devices.ids else ("cpu", devices.problem)
    if wanted == "cuda" and not devices.ids:
        raise SettingsError(f"--executor cuda: {devices.problem}; --executor cpu needs no GPU")
    return wanted, f"as set, on {devices.summary}" if wanted == "cuda" else "as set"
