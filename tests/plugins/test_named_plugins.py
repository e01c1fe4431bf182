"""Plugins are found by name among installed packages, and what cannot be loaded is refused by name."""

from __future__ import annotations

import json
import sys

import pytest
from support.plugins.packages import EXAMPLES, install, install_example

from baton.plugins.kinds import ENDPOINTS, KINDS, METRIC_SINKS, REASONING_PARSERS, TOOL_PARSERS
from baton.plugins.plugins import PluginError, Plugins, instance_of, names_for
from baton.services import cli

GROUP = TOOL_PARSERS.group
NUMBER = instance_of(int)


def test_a_named_plugin_is_loaded_by_its_kind(packages):
    install(packages, "one", "A = 1\nB = 2", {GROUP: {"a": "A", "b": "B"}, REASONING_PARSERS.group: {"a": "B"}})
    plugins = Plugins.named(("a",), "gateway")
    assert plugins.start(TOOL_PARSERS, NUMBER) == {"a": 1}
    assert plugins.start(REASONING_PARSERS, NUMBER) == {"a": 2}
    assert plugins.extend(TOOL_PARSERS, {"own": 7}, NUMBER) == {"own": 7, "a": 1}


def test_nothing_is_imported_that_is_not_named(packages):
    install(packages, "wanted", "A = 1", {GROUP: {"wanted": "A"}})
    install(packages, "unwanted", "raise SystemExit(1)", {GROUP: {"unwanted": "A"}})
    assert not Plugins.named(())
    assert Plugins.named(("wanted",), "gateway").start(TOOL_PARSERS, NUMBER) == {"wanted": 1}
    assert "unwanted" not in sys.modules


def test_an_unknown_name_is_refused_with_the_installed_ones(packages):
    with pytest.raises(PluginError, match=r"plugins: 'bing' is not installed, and neither is any other plugin"):
        Plugins.named(("bing",), "gateway")
    install(packages, "one", "A = 1", {GROUP: {"bang": "A", "boom": "A"}})
    with pytest.raises(PluginError, match=r"'bing' is not installed; did you mean bang\?; installed are bang, boom"):
        Plugins.named(("bing",), "gateway")


def test_two_plugins_with_one_name_are_an_error(packages):
    install(packages, "one", "A = 1", {GROUP: {"bang": "A"}})
    install(packages, "other", "A = 1", {REASONING_PARSERS.group: {"bang": "A"}})
    with pytest.raises(PluginError, match="'bang' is the name of plugins of one and of other; uninstall all but one"):
        Plugins.named(("bang",), "gateway")
    with pytest.raises(PluginError, match="'bang' is named twice"):
        Plugins.named(("bang", "bang"), "gateway")


def test_one_package_cannot_have_two_plugins_of_one_kind_and_name(packages):
    install(packages, "one", "A = 1", {GROUP: {"bang": "A", "bang ": "A"}})
    with pytest.raises(PluginError, match="one has two plugins 'bang' of the kind tool_parsers"):
        Plugins.named(("bang",), "gateway")


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ("baton.tool_parsers.v2", "written for version 2 of tool_parsers; this Baton has version 1"),
        ("baton.tool_parsers", "no version of the interface; it must be baton.tool_parsers.v1"),
        ("baton.tool_parser.v1", "there is no kind 'tool_parser'; the kinds are logits_processors, tool_parsers"),
    ],
)
def test_another_version_or_kind_is_refused_before_it_is_imported(packages, group, problem):
    install(packages, "one", "raise SystemExit(1)", {group: {"bang": "A"}})
    with pytest.raises(
        PluginError, match=r"'bang' cannot be loaded \(entry point .* of the package one 1.0\)"
    ) as error:
        Plugins.named(("bang",), "gateway")
    assert problem in error.value.message


def test_a_plugin_of_another_service_is_refused(packages):
    install(packages, "one", "A = 1", {ENDPOINTS.group: {"page": "A"}, METRIC_SINKS.group: {"sink": "A"}})
    with pytest.raises(PluginError, match="'page' is of the kind endpoints, which is loaded by gateway and not by"):
        Plugins.named(("page",), "worker")
    assert names_for("worker", ("page", "sink")) == ("sink",)
    assert names_for("gateway", ("page", "sink")) == ("page", "sink")


@pytest.mark.parametrize(
    ("source", "raised"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("B = 1", "AttributeError: module 'one' has no attribute 'A'"),
        ("A = 'text'", "TypeError: it is a str; it must be a int"),
        ("import no_such_package_of_mine", "ModuleNotFoundError: No module named 'no_such_package_of_mine'"),
    ],
)
def test_a_plugin_that_raises_at_start_is_named(packages, source, raised):
    install(packages, "one", source, {GROUP: {"bang": "A"}})
    plugins = Plugins.named(("bang",), "gateway")
    with pytest.raises(PluginError) as error:
        plugins.start(TOOL_PARSERS, NUMBER)
    start = f"plugins: 'bang' cannot be started (entry point {GROUP}: bang = one:A, of the package one 1.0): "
    assert error.value.message == start + raised
    assert error.value.field == "plugins"


def test_a_plugin_cannot_take_the_name_of_ours(packages):
    install(packages, "one", "A = 1", {GROUP: {"hermes": "A"}})
    with pytest.raises(PluginError, match="'hermes' is the name of one of Baton's own tool_parsers"):
        Plugins.named(("hermes",), "gateway").extend(TOOL_PARSERS, {"hermes": 7}, NUMBER)


def test_the_command_lists_plugins_and_kinds(packages, capsys):
    install(packages, "one", "raise SystemExit(1)", {GROUP: {"bang": "A"}, "baton.tool_parsers.v9": {"new": "A"}})
    assert cli.main(["plugins", "--json"], {}) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["version"], bool(each["problem"])) for each in listed["plugins"]] == [
        ("bang", 1, False),
        ("new", 9, True),
    ]
    assert {each["group"] for each in listed["kinds"]} == {kind.group for kind in KINDS.values()}
    assert cli.main(["plugins"], {}) == 0
    text = capsys.readouterr().out
    assert "one 1.0" in text
    assert "written for version 9 of tool_parsers; this Baton has version 1" in text


def test_every_kind_has_an_example(packages):
    for path in EXAMPLES.glob("*/pyproject.toml"):
        kind = KINDS[path.parent.name]
        name = install_example(packages, kind.name)
        assert Plugins.named((name,)).of(kind)
