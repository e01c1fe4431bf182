"""How environments of clients are made, kept, shared, and done without where no registry answers."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
from clients import environments, processes
from clients.environments import Environment, NodeEnvironment, PythonEnvironment, RegistryAway
from support.processes import ports
from support.processes.stack import wait_until

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Counted(Environment):
    """An environment that counts how often it is made."""

    fails: bool = False

    def _runtime(self):
        return "none"

    def _make(self, made):
        marks = made.parent / f"{self.name}.marks"
        with marks.open("a") as file:
            file.write("made\n")
        (made / "half").touch()
        assert not self.fails, "the registry refuses it"


@pytest.fixture(scope="module")
def uv():
    """The installer, made in the cache that all tests share."""
    try:
        return environments._uv()
    except RegistryAway as away:
        pytest.skip(f"uv cannot be installed: {away}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return environments.cache_folder()


def test_concurrent_callers_create_an_environment_once(cache):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: Counted("one", ("a==1",)).made(), range(8)))
    assert len(folders) == 1
    assert (cache / "one.marks").read_text() == "made\n"


def test_other_packages_are_another_environment(cache):
    made = {Counted("one", packages).made() for packages in (("a==1",), ("a==2",), ("a==1", "b==1"))}
    assert len(made) == 3


def test_a_failed_environment_raises_and_is_created_again(cache):
    broken = Counted("one", ("a==1",), fails=True)
    for _ in range(2):
        with pytest.raises(AssertionError, match="refuses"):
            broken.folder()
    assert (cache / "one.marks").read_text() == "made\nmade\n"


@pytest.mark.parametrize("kind", [PythonEnvironment, NodeEnvironment])
def test_a_registry_that_cannot_be_reached_skips_with_a_reason(uv, cache, monkeypatch, kind):
    away = f"http://127.0.0.1:{ports.free_ports(1)[0]}"
    monkeypatch.setattr(environments, "_uv", lambda: uv)
    for name in ("UV_DEFAULT_INDEX", "npm_config_registry"):
        monkeypatch.setenv(name, away)
    for name in ("UV_HTTP_RETRIES", "npm_config_fetch_retries"):
        monkeypatch.setenv(name, "0")
    environment = kind("away", ("no-such-package==1.0",) if kind is PythonEnvironment else ("no-such-package@1.0.0",))
    with pytest.raises(RegistryAway, match="no-such-package"):
        environment.made()
    with pytest.raises(pytest.skip.Exception, match="the environment of away cannot be made"):
        environment.folder()


def test_an_installer_that_refuses_a_package_fails(cache, tmp_path):
    refusing = [sys.executable, "-c", "raise SystemExit('no version of a matches ==17')"]
    with pytest.raises(AssertionError, match="no version of a matches ==17"):
        environments._install(refusing, tmp_path, {})


def test_a_program_has_a_home_of_its_own_and_nothing_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    words = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    found = json.loads(processes.run(words, tmp_path, processes.client_environ(tmp_path, LANGUAGE="en"), 20))
    assert (found["HOME"], found["LANGUAGE"]) == (str(tmp_path), "en")
    assert "OPENAI_API_KEY" not in found


def test_a_program_past_its_deadline_ends_with_its_children_and_its_output_is_shown(tmp_path):
    child = "import time; time.sleep(60)"
    start = f"child = subprocess.Popen([sys.executable, '-c', {child!r}])"
    script = f"import subprocess, sys; {start}; print(child.pid, flush=True); child.wait()"
    with pytest.raises(AssertionError, match="no end within 2 s") as error:
        processes.run([sys.executable, "-c", script], tmp_path, processes.client_environ(tmp_path), 2)
    (pid,) = (int(line) for line in str(error.value).splitlines() if line.isdigit())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "it ended")
