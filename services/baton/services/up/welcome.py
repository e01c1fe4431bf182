"""What users read once all services are ready."""

from __future__ import annotations

import json

from baton.rpc.address import split_address
from baton.services.certs.command import CA_CERTIFICATE
from baton.services.up.config import TandemConfig

_ANY_HOSTS = ("0.0.0.0", "[::]")


def welcome(config: TandemConfig, names: tuple[str, ...]) -> str:
    """Returns the addresses, the model's names, and a command that tries them."""
    model, *aliases = names
    also = f" (also as {', '.join(aliases)})" if aliases else ""
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me a story about a dog and a river."}],
    }
    url = rest_url(config)
    trust = f"--cacert {config.tls_dir}/{CA_CERTIFICATE} " if config.tls_edge else ""
    headers = "-H 'content-type: application/json'"
    if config.api_keys:
        headers += ' -H "authorization: Bearer $BATON_API_KEY"'
    chat = f"baton chat {url}{f' --ca {config.tls_dir}/{CA_CERTIFICATE}' if config.tls_edge else ''}"
    return (
        f"Baton is ready: {url} (REST), {config.grpc_listen} (gRPC), model {model}{also}\n\n  {chat}\n"
        f"  curl -N {trust}{url}/v1/chat/completions {headers} -d '{json.dumps(body)}'\n\n"
        "Ctrl-C stops it."
    )


def rest_url(config: TandemConfig) -> str:
    """Returns the URL of the REST API for clients on this machine."""
    host, port = split_address(config.rest_listen, "rest_listen")
    return f"{'https' if config.tls_edge else 'http'}://{'127.0.0.1' if host in _ANY_HOSTS else host}:{port}"
