"""The settings of TLS in every service's config: names and help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CERTIFICATE: Mapping[str, Any] = {
    "help": "What this service shows other services: a PEM file, read again when it changes. Empty: plain text.",
    "metavar": "PATH",
}
KEY: Mapping[str, Any] = {"help": "The private key of --tls-certificate.", "metavar": "PATH"}
CA: Mapping[str, Any] = {
    "help": "Whose certificates other services must show. Who may call what is said by the identity in them.",
    "metavar": "PATH",
}
METRICS_PLAIN: Mapping[str, Any] = {
    "help": "Serve --metrics-listen over plain HTTP also with --tls-certificate; else its readers show the certificate "
    "of an operator. For networks where only Prometheus reaches it.",
}
EDGE_CERTIFICATE: Mapping[str, Any] = {
    "help": "What this port shows clients: a PEM file, read again when it changes. Empty: plain text.",
    "metavar": "PATH",
}
EDGE_CLIENT_CA: Mapping[str, Any] = {
    "help": "Whose certificates clients of this port must present: a PEM file, read again when it changes. Empty: they "
    "present none.",
    "metavar": "PATH",
}
EDGE_KEY: Mapping[str, Any] = {"help": "The private key of the certificate before.", "metavar": "PATH"}
