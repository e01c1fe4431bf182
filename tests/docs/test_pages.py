"""The pages refer only to existing commands, flags, variables, make targets, paths, links and metrics."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from baton_site import GENERATED
from commands_page import commands, help_text
from repository_pages import REPOSITORY_PAGES

from baton.services import cli, settings
from baton.services.process.run import ProcessConfig
from baton.services.tools.metrics_table import all_metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / one for one in REPOSITORY_PAGES.values()))
)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build"}

# Flags that pages name without their program: of kubectl, docker, and redis-server in a rendered manifest.
_OTHER_PROGRAMS = {"--server-side", "--force-conflicts", "--build-arg", "--port", "--tls-port"}
_FENCE = re.compile(r"^[ ]*```[a-z]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_OURS = re.compile(r"(?:\S+/)?(baton|make|python3?)(?= |$)")


@functools.cache
def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _code(page: str) -> list[str]:
    """Returns the lines of code blocks, with continued lines joined, and the code in sentences."""
    text = _text(page)
    blocks = "\n".join(_FENCE.findall(text)).replace("\\\n", " ")
    inline = [re.sub(r"\s+", " ", one) for one in _INLINE.findall(_FENCE.sub("", text))]
    return [*(line.strip() for line in blocks.splitlines()), *inline]


def _words(line: str) -> list[str]:
    """Returns the words of the first command of a line, variables before it left out."""
    line = re.split(r"\s+#|\s*(?:[;&|]{1,2}|>)\s", line)[0].rstrip(".")
    try:
        words = shlex.split(line)
    except ValueError:  # a sentence with an apostrophe
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def _commands(program: str) -> list[tuple[str, str]]:
    found = {(page, line) for page in PAGES for line in _code(page) if re.match(rf"(?:\S+/)?{program} ", line)}
    return sorted(found)


@functools.cache
def _config_flags(service: str) -> frozenset[str]:
    entry = cli.SERVICES[service]
    config = getattr(importlib.import_module(f"{entry.package}.config"), entry.config)
    flags = (one.flag for kind in (config, ProcessConfig) for one in settings.options_of(service, kind))
    return frozenset(flags) | {settings.config_option(service).flag}


@functools.cache
def _tool_flags(*words: str) -> frozenset[str]:
    return frozenset(_FLAG.findall(help_text(*words)))


@functools.cache
def _program_flags() -> frozenset[str]:
    """Returns the flags of the repository's programs other than `baton`."""
    files = [path for folder in ("tests", "requirements", "models") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    found = (re.findall(r'"(--[a-z][a-z0-9-]*)"', text) for text in texts if "add_argument(" in text)
    return frozenset(itertools.chain.from_iterable(found))


@functools.cache
def _all_flags() -> frozenset[str]:
    tools = (_tool_flags(*words) for words in commands())
    services = (_config_flags(name) for name in cli.SERVICES)
    return frozenset().union(*tools, *services, _program_flags(), _OTHER_PROGRAMS)


def _exists(flag: str, known: frozenset[str]) -> bool:
    return flag in known or flag.replace("--no-", "--", 1) in known


@pytest.mark.parametrize(("page", "line"), _commands("baton"))
def test_a_command_of_baton_exists_and_takes_its_flags(page, line):
    _, name, *rest = _words(line) or ("", "")
    names = set(re.findall(r"[a-z-]+", name)) if "|" in line.split()[1] else {name}
    if names == {"COMMAND"} or name.startswith("-") or not name:
        return
    assert names <= {*cli.SERVICES, *cli.TOOLS}, f"{page}: baton has no command {name}: {line}"
    known = _flags_of(name, rest)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    for flag in flags:
        assert _exists(flag, known), f"{page}: baton {name} has no flag {flag}: {line}"


def _flags_of(name: str, rest: list[str]) -> frozenset[str]:
    if name in cli.SERVICES:
        return _config_flags(name) | {"--help"}
    if name == "bench":
        bench = rest[0] if rest and not rest[0].startswith("-") else ""
        if bench in cli.NESTED["bench"]:
            # A sweep passes flags on to the others.
            return frozenset().union(*(_tool_flags("bench", one) for one in cli.NESTED["bench"]), {"--"})
        files = (ROOT / "tests" / "bench").rglob(f"bench_{bench}.py")
        assert not bench or bench.isupper() or any(files), f"there is no benchmark {bench}"
        return _program_flags() | {"--help"}
    nested = [rest[0]] if rest and name in ("keys", "doctor") and not rest[0].startswith("-") else []
    flags = _tool_flags(name, *nested)
    if name == "doctor" and nested and nested[0] in cli.SERVICES:
        flags |= _config_flags(nested[0])
    return flags


@pytest.mark.parametrize(("page", "line"), [one for one in _commands("baton") if "|" not in one[1]])
def test_the_values_of_a_service_s_flags_are_allowed(page, line):
    _, name, *flags = _words(line) or ("", "")
    if name not in cli.SERVICES or "..." in line or not flags:
        return
    entry = cli.SERVICES[name]
    config = getattr(importlib.import_module(f"{entry.package}.config"), entry.config)
    if flags != ["--help"]:
        settings.load(name, (config, ProcessConfig), flags, {})


@pytest.mark.parametrize(("page", "line"), _commands("make"))
def test_a_target_of_make_and_its_variables_exist(page, line):
    _, *words = _words(line)
    for word in words:
        variable, equals, _ = word.partition("=")
        pattern = rf"\b{variable}\b" if equals else rf"^{word}:.*## |^\$\(VENV\)/{word}:"
        assert re.search(pattern, MAKEFILE, re.MULTILINE), f"{page}: the Makefile has no {variable}: {line}"


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page):
    for line in _code(page):
        if line.startswith("--") or _OURS.match(line):
            for flag in _FLAG.findall(line):
                known = _begins(flag) if f"{flag}*" in line else _exists(flag, _all_flags())
                assert known, f"{page}: no program has the flag {flag}: {line}"


def _begins(start: str) -> bool:
    return any(flag.startswith(start) for flag in _all_flags())


@pytest.mark.parametrize("page", PAGES)
def test_variables_that_a_page_names_exist(page):
    for name, field in re.findall(r"\bBATON_([A-Z]+)_([A-Z_]+)\b", _text(page)):
        flag = f"--{field.lower().replace('_', '-')}"
        # Benchmarks have variables of their own.
        if name.lower() in {*cli.SERVICES, *cli.TOOLS} - {"bench"}:
            known = _config_flags(name.lower()) if name.lower() in cli.SERVICES else _tool_flags(name.lower())
            assert flag in known, f"{page}: BATON_{name}_{field} is no setting of {name.lower()}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page):
    folders = "|".join(sorted(FOLDERS))
    for line in _code(page):
        for path in re.findall(rf"(?<![\w/.:-])(?:{folders})/[\w./-]*\w(?![\w*])", line):
            assert _is_there(path), f"{page} names {path}, which is not in the repository: was it moved? ({line})"


def _is_there(path: str) -> bool:
    # make creates these.
    return (ROOT / path).exists() or path.startswith("build/") or path.endswith("node_modules")


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", _text(page))):
        path = target.partition("#")[0]
        if path and "://" not in target:
            found = ((ROOT / page).parent / path).resolve()
            generated = found.is_relative_to(ROOT / "docs") and found.relative_to(ROOT / "docs").as_posix() in GENERATED
            assert found.exists() or generated, f"{page} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES)
def test_metrics_that_a_page_names_exist(page):
    known = {series for row in all_metrics() for series in (row.name, *row.series)}
    for name in re.findall(r"`((?:baton|vllm:)_?\w*)`", _text(page)):
        if re.match(r"baton_(gateway|router|kvstore|worker|kv|rpc|tls|tracing)_\w|vllm:", name):
            assert name in known or any(one.startswith(name) for one in known if name.endswith("_")), f"{page}: {name}"


def test_every_page_is_in_git():
    tracked = subprocess.run(["git", "ls-files", *PAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(PAGES) == set(tracked.split())
