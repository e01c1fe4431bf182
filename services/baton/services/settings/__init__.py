"""Flags, environment variables, config files and --help, derived from frozen config dataclasses. Knows no service.

A field `kv_blocks` of the service `worker` is the flag `--kv-blocks`, the variable `BATON_WORKER_KV_BLOCKS`, and the
key `kv-blocks` of the file that `--config` names. A flag overrides the variable, the variable overrides the file, and
the file overrides the default.
"""

from baton.services.settings.load import Forward, load, load_forwarding, with_flags
from baton.services.settings.option import Option, SettingsError, config_option, options_of

__all__ = [
    "Forward",
    "Option",
    "SettingsError",
    "config_option",
    "load",
    "load_forwarding",
    "options_of",
    "with_flags",
]
