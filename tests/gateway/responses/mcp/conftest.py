"""A real MCP server, and a gateway that may call it."""

import pytest
from support.gateway.mcp_rig import mcp_rig, mcp_server


@pytest.fixture(scope="package")
def url():
    with mcp_server() as url:
        yield url


@pytest.fixture
async def rig(tmp_path, url):
    async with mcp_rig(tmp_path, allowed_mcp_servers=(url,), tool_server=(f"own={url}",), mcp_timeout=5.0) as rig:
        yield rig
