"""Which MCP servers clients may name: only the operator's URLs and paths below them, however they are spelled."""

import builtins
import sys

import pytest

from baton.gateway.config import GatewayConfig
from baton.gateway.mcp.sessions import load_client
from baton.gateway.mcp.settings import McpSettings
from baton.gateway.mcp.tools import shortened
from baton.rpc.errors import InvalidRequest

ALLOWED = ("https://mcp.example.com/team", "http://10.0.0.5:9000")


@pytest.mark.parametrize(
    "url",
    [
        "https://mcp.example.com/team",
        "https://mcp.example.com/team/",
        "https://mcp.example.com/team/mcp?x=1",
        "https://MCP.example.com:443/team",
        "http://10.0.0.5:9000/any/mcp",
    ],
)
def test_named_servers_are_allowed(url):
    McpSettings(allowed_servers=ALLOWED).check_url(url, "url")


@pytest.mark.parametrize(
    "url",
    [
        "https://mcp.example.com",
        "https://mcp.example.com/teams",
        "https://mcp.example.com/team/../admin",
        "https://mcp.example.com/team/%2e%2e/admin",
        "https://mcp.example.com/team%2f..%2fadmin",
        "https://mcp.example.com/team\\..\\admin",
        "https://mcp.example.com:8443/team",
        "http://mcp.example.com/team",
        "https://user@mcp.example.com/team",
        "https://mcp.example.com@evil.example/team",
        "https://mcp.example.com.evil.example/team",
        "https://evil.example/team#https://mcp.example.com/team",
        "https://mcp.example.com/team#x",
        "https://mcp.example.com /team",
        "https://mcp.example.com/te\nam",
        "http://10.0.0.5/mcp",
        "http://10.0.0.5:09000x/mcp",
        "http://[10.0.0.5:9000/mcp",
        "http://0x0a000005:9000/mcp",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "//mcp.example.com/team",
        "mcp.example.com/team",
        "",
    ],
)
def test_all_others_are_refused(url):
    with pytest.raises(InvalidRequest) as refused:
        McpSettings(allowed_servers=ALLOWED).check_url(url, "tools.0.server_url")
    assert refused.value.field == "tools.0.server_url"
    with pytest.raises(InvalidRequest):
        McpSettings(tool_servers=("https://mcp.example.com/team",)).check_url(url or "x", "url")


def test_the_operators_servers_have_labels():
    servers = McpSettings(tool_servers=("notes=https://a.example/mcp", "https://b.example/x", "localhost:8888")).named
    assert {label: server.url for label, server in servers.items()} == {
        "notes": "https://a.example/mcp",
        "b_example": "https://b.example/x",
        "localhost": "http://localhost:8888/sse",
    }


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"tool_server": ("https://a/x", "https://a/y")}, "tool_server", "two servers"),
        ({"tool_server": ("demo",)}, "tool_server", "http or https"),
        ({"allowed_mcp_servers": ("a.example",)}, "allowed_mcp_servers", "http or https"),
        ({"allowed_mcp_servers": ("*",)}, "allowed_mcp_servers", "http or https"),
    ],
)
def test_wrong_settings_stop_the_start(settings, field, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        GatewayConfig(model="m", **settings).validate()
    assert refused.value.field == field


def test_a_missing_package_is_named_at_start(monkeypatch):
    real = builtins.__import__

    def without_mcp(name, *args, **kwargs):
        if name == "mcp" or name.startswith("mcp."):
            raise ModuleNotFoundError("No module named 'mcp'", name="mcp")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "baton.gateway.mcp.connection", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_mcp)
    load_client(McpSettings())
    with pytest.raises(InvalidRequest, match=r'needs the package mcp: pip install "baton-inference\[mcp\]"') as refused:
        load_client(McpSettings(allowed_servers=ALLOWED))
    assert refused.value.field == "allowed_mcp_servers"


def test_long_texts_are_cut_between_characters():
    assert shortened("é" * 10, 20) == "é" * 10
    assert shortened("é" * 10, 19) == "é" * 9 + "\n[cut: 20 bytes, of which 19 are shown]"
