"""Shifts Python's wall clock by the number in a file, so that tests can change the clocks of real services.

The file of CHAOS_CLOCK holds one double, in seconds; whoever changes it moves the clock of every process at once.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("CHAOS_CLOCK")
if _path:
    with open(_path, "rb") as _file:
        _shift = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _time, _time_ns, _unpack = time.time, time.time_ns, struct.Struct("<d").unpack_from

    def _shifted() -> float:
        return _time() + _unpack(_shift)[0]

    def _shifted_ns() -> int:
        return _time_ns() + int(_unpack(_shift)[0] * 1e9)

    time.time, time.time_ns = _shifted, _shifted_ns
