"""Resolvers: a name becomes a folder, and never one outside the resolver's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plugins.packages import install, install_example

from baton.plugins.kinds import ADAPTER_RESOLVERS
from baton.plugins.plugins import PluginError, Plugins
from baton.rpc.errors import InvalidRequest, NotFound, PermissionDenied
from baton.worker.adapters.resolvers.interface import ResolverContext
from baton.worker.adapters.resolvers.resolvers import Resolvers, make_resolvers
from baton.worker.config import WorkerConfig


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def resolvers(
    folder: Path, *names: str, patterns: tuple[str, ...] = ("*",), plugins: Plugins | None = None
) -> Resolvers:
    context = ResolverContext("base", (str(folder / "own"),), str(folder / "hub"))
    made = make_resolvers(names, patterns, context, plugins or Plugins())
    assert made is not None
    return made


def test_a_sub_folder_has_the_adapters_name(tmp_path: Path) -> None:
    poet, deep = adapter(tmp_path / "own" / "poet"), adapter(tmp_path / "own" / "team" / "poet")
    (tmp_path / "own" / "empty").mkdir()
    found = resolvers(tmp_path, "folder")
    assert found.find("poet") == str(poet)
    assert found.find("team/poet") == str(deep)
    for name in ("empty", "nowhere", "."):
        with pytest.raises(NotFound, match="no adapter is called") as raised:
            found.find(name)
        assert raised.value.field == "lora_name"


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    outside = adapter(tmp_path / "secret")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to(outside)
    found = resolvers(tmp_path, "folder")
    for name in ("../secret", "link", str(outside)):
        with pytest.raises(NotFound):
            found.find(name)


def test_the_hub_cache_has_the_latest_download_of_a_repository(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--poet"
    for commit in ("a" * 40, "b" * 40):
        adapter(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    found = resolvers(tmp_path, "folder", "hub")
    assert found.find("org/poet") == str(repository / "snapshots" / ("b" * 40))
    for name in ("org/other", "poet", "../models--org--poet", "org/../poet"):
        with pytest.raises(NotFound, match="says folder and hub"):
            found.find(name)
    assert found.roots == [str(tmp_path / "own"), str(tmp_path / "hub")]


def test_only_allowed_names_are_looked_for(tmp_path: Path) -> None:
    found = resolvers(tmp_path, "folder", patterns=("team-a/*", "poet"))
    for name in ("poet", "team-a/x"):
        found.check_name(name)
    for name in ("poets", "team-b/x", "Poet", "team-a/../x", "team-a//x", "team-a/"):
        with pytest.raises(PermissionDenied, match=r"lora_resolver_names \(team-a/\*, poet\)") as raised:
            found.check_name(name)
        assert raised.value.field == "lora_name"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for module in ("baton_adapter_list", "wanderer", "failing"):
        sys.modules.pop(module, None)


def test_the_example_plugin_reads_its_list_again(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "adapters" / "list.json"
    poet = adapter(tmp_path / "adapters" / "poet" / "v3")
    listed.write_text("{}")
    monkeypatch.setenv("BATON_ADAPTER_LIST", str(listed))
    name = install_example(packages, "adapter_resolvers")
    found = resolvers(tmp_path, name, plugins=Plugins.named([name], "worker"))
    with pytest.raises(NotFound):
        found.find("team-a")
    listed.write_text(json.dumps({"team-a": "poet/v3"}))
    assert found.find("team-a") == str(poet)


_SOURCE = """
from baton.worker.adapters.resolvers.interface import AdapterResolver


class Wanderer(AdapterResolver):
    roots = ("/adapters",)

    def find(self, name):
        return "/adapters/../etc"


class Failing(Wanderer):
    def __init__(self, context):
        raise RuntimeError("no licence")
"""


def test_a_plugin_can_name_no_folder_outside_its_roots(tmp_path: Path, packages: Path) -> None:
    install(packages, "wanderer", _SOURCE, {ADAPTER_RESOLVERS.group: {"wanderer": "Wanderer"}})
    found = resolvers(tmp_path, "wanderer", plugins=Plugins.named(["wanderer"], "worker"))
    with pytest.raises(PermissionDenied, match=r"wanderer found 'x' at /adapters/../etc, which is outside"):
        found.find("x")


def test_a_plugin_that_cannot_start_is_named(tmp_path: Path, packages: Path) -> None:
    install(packages, "failing", _SOURCE, {ADAPTER_RESOLVERS.group: {"failing": "Failing"}})
    with pytest.raises(PluginError, match=r"'failing' cannot be started.*no licence"):
        resolvers(tmp_path, "failing", plugins=Plugins.named(["failing"], "worker"))


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"lora_resolvers": ("folder",)}, "lora_resolver_names", "needs lora_resolver_names"),
        ({"lora_resolver_names": ("*",)}, "lora_resolvers", "needs lora_resolvers"),
        ({"lora_pinned": ("a",)}, "lora_pinned", "'a', which is not one of lora_modules"),
        ({"lora_modules": ("a=/a", "b=/b"), "max_loras": 2, "lora_pinned": ("a", "b")}, "lora_pinned", "at most 1"),
        ({"lora_resolvers": ("hub", "hub"), "lora_resolver_names": ("*",)}, "lora_resolvers", "twice"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, tuple[str, ...]], field: str, words: str) -> None:
    config = WorkerConfig(enable_lora=True, lora_folders=("/adapters",), **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=words) as raised:
        config.check_adapters()
    assert raised.value.field == field


def test_unknown_resolvers_and_missing_folders_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'hubb' is unknown; it must be some of folder, hub"):
        make_resolvers(["hubb"], ["*"], ResolverContext("base"))
    with pytest.raises(InvalidRequest, match="needs lora_folders"):
        make_resolvers(["folder"], ["*"], ResolverContext("base"))
    assert make_resolvers([], [], ResolverContext("base")) is None
