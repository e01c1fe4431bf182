"""Project files other than code: README, commit hooks, templates."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from baton.services.cli import SERVICES

ROOT = Path(__file__).parents[2]


MOST_README_BYTES = 8 * 1024


def test_the_readme_stays_short():
    size = (ROOT / "README.md").stat().st_size
    assert size <= MOST_README_BYTES, f"README.md has {size} bytes: move details to a page of docs and link to it"


def test_the_readme_and_the_architecture_page_show_one_picture():
    pictures = [
        re.search(r"```(?:text)?\n( REST.*?)```", (ROOT / page).read_text(), re.DOTALL)[1]
        for page in ("README.md", "docs/concepts/architecture.md")
    ]
    assert pictures[0] == pictures[1]


def test_the_pages_start_every_service():
    page = (ROOT / "docs" / "guides" / "operating.md").read_text()
    assert set(re.findall(r"^baton (\w+) +--", page, re.MULTILINE)) == set(SERVICES)


def test_programs_of_the_commit_hooks_are_installed():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = {hook["entry"].split()[0] for hook in hooks}
    assert programs >= {".venv/bin/ruff", ".venv/bin/mypy"}
    for program in programs:
        name = program.removeprefix(".venv/bin/")
        assert name != program
        assert shutil.which(name, path=str(Path(sys.executable).parent)), f"{name} is not in the extra dev"


def test_commit_hooks_run_the_checks_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    check = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    for hook in hooks:
        words = hook["entry"].removeprefix(".venv/bin/").split()
        command = " ".join(word for word in words[:2] if not word.startswith("-"))
        assert f"$(BIN)/{command}" in check, command


def test_issue_templates_have_fields_that_must_be_filled_in():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(path.read_text()) for path in folder.glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_changelog_has_the_version_of_the_package():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"## {version} - " in (ROOT / "CHANGELOG.md").read_text()


def test_make_run_installs_what_every_command_needs(tmp_path):
    done = subprocess.run(
        ["make", "-n", f"VENV={tmp_path}", f"{tmp_path}/.installed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    installed = set(re.search(r"--editable '\.\[(.+)\]'", done.stdout)[1].split(","))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in list(installed):
        for requirement in extras[extra]:
            if named := re.fullmatch(r"baton-inference\[(.+)\]", requirement):
                installed.update(named[1].split(","))
    assert installed >= {"gateway", "router", "kvstore", "worker", "hub", "certs"}


def test_the_sample_model_is_small_and_has_a_long_context():
    folder = ROOT / "models" / "storyteller-7m"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 30_000_000
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] >= 32_768
