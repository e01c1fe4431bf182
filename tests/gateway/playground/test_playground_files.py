"""What serves the playground: types, caching, and the policy that keeps everything else out."""

import re

import pytest
from support.gateway.rest_harness import RawClient, rest_side

from baton.gateway.playground.routes import FOLDER, read_files


async def test_every_file_of_the_page_is_served_with_its_type_and_the_policy():
    kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".html": "text/html"}
    async with rest_side() as rest:
        for path in sorted(FOLDER.iterdir()):
            answer = await rest.request("GET", "/" if path.name == "index.html" else f"/playground/{path.name}")
            assert answer.status == 200
            assert answer.body == path.read_bytes()
            assert answer.headers["content-type"].partition(";")[0] == kinds[path.suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert "http" not in policy


async def test_a_client_that_has_the_file_gets_no_second_copy():
    async with rest_side() as rest:
        first = await rest.request("GET", "/playground/main.js")
        assert first.headers["cache-control"] == "no-cache"
        for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
            async with RawClient.connect(rest.port) as client:
                await client.send(
                    f"GET /playground/main.js HTTP/1.1\r\nhost: localhost\r\nif-none-match: {known}\r\n\r\n".encode()
                )
                again = await client.answer(has_body=False)
                assert again.status == 304
                assert again.headers["etag"] == first.headers["etag"]
                assert again.headers["content-length"] == str(len(first.body))
                # The connection goes on: nothing of a body came.
                assert (await client.request("GET", "/health")).status == 200
        changed = await rest.request("GET", "/playground/main.js", headers={"if-none-match": '"another"'})
        assert changed.body == first.body


@pytest.mark.parametrize("name", ["nothing.js", "../config.py", "%2e%2e/config.py", "index.html/", "a/b.js"])
async def test_other_paths_below_it_are_not_found(name: str):
    async with rest_side() as rest:
        answer = await rest.request("GET", f"/playground/{name}")
    assert answer.status == 404
    assert "playground has no file" in answer.error["message"]


async def test_it_can_be_switched_off():
    async with rest_side(no_playground=True) as rest:
        for path in ("/", "/playground/main.js"):
            assert (await rest.request("GET", path)).status == 404
        assert (await rest.request("GET", "/docs")).status == 200


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "x.exe").touch()
    with pytest.raises(KeyError, match="exe"):
        read_files(tmp_path)


def test_the_page_names_only_files_that_are_there_and_nothing_elsewhere():
    names = {path.name for path in FOLDER.iterdir()}
    page = (FOLDER / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {name.removeprefix("playground/") for name in named} - names == {"docs"}
    assert not re.search(r"\son\w+=|<style|\sstyle=|<script>|https?://", page)
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
