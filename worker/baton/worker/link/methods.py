"""The numbers of the front's calls to the engine."""

from __future__ import annotations

import enum


class Method(enum.IntEnum):
    """The method of a call to the engine."""

    DRAIN = 1
    GET_STATS = 2
    RESET_PREFIX_CACHE = 3
    AWAIT_IDLE = 4  # answered when no request is left
    START_PROFILE = 5
    STOP_PROFILE = 6
    PAUSE = 7
    RESUME = 8
    SLEEP = 9
    WAKE_UP = 10
    RELOAD_WEIGHTS = 11
    START_WEIGHT_UPDATE = 12
    ADD_WEIGHTS = 13  # the number of tensors in the inbox of this process
    FINISH_WEIGHT_UPDATE = 14
    SWITCH_ROLE = 15
    LOAD_ADAPTER = 16  # answered when it is read
    UNLOAD_ADAPTER = 17
