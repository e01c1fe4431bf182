import os
import signal
import subprocess
import sys

import pytest

from baton.services import cli, extras
from baton.services.bench import command as bench


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"], {}) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*cli.SERVICES, *cli.TOOLS))


def test_an_unknown_command_is_an_error_that_names_the_likely_one(capsys):
    assert cli.main(["gatewya"], {}) == 2
    assert capsys.readouterr().err == "baton: unknown command 'gatewya'; did you mean gateway?\n"


def test_a_command_like_no_other_is_an_error_that_names_those_there_are(capsys):
    assert cli.main(["xyzzy"], {}) == 2
    assert "unknown command 'xyzzy'; the commands are gateway, router" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    words = f"{sys.executable} -m baton.services.cli collect-env --look-timeout 0.1 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n"
    assert done.stderr == ""
    assert done.returncode in (0, cli.EXIT_OUTPUT_CLOSED)  # 0: all was written before the reader left


@pytest.mark.parametrize("service", ["gateway", "worker"])
def test_ctrl_c_while_a_service_imports_its_code_prints_no_traceback(service, tmp_path):
    slow = "import time; print('importing', flush=True); time.sleep(60)"
    for name in ("orjson", "numpy"):
        (tmp_path / f"{name}.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.services.cli", service, "--model", "m"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert "Traceback" not in errors


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "baton.services.certs.certificates", raising=False)
    assert cli.main(["certs", "--dir", "nowhere"], {}) == cli.EXIT_NOT_INSTALLED
    expected = 'baton certs: the package cryptography is not installed; pip install "baton-inference[certs]"\n'
    assert capsys.readouterr().err == expected


def test_a_package_of_a_feature_is_installed_by_the_features_extra():
    assert extras.advice("router", "kubernetes").endswith('; pip install "baton-inference[kubernetes]"')
    assert extras.advice("router", "numpy").endswith('; pip install "baton-inference[router]"')


def test_a_module_of_our_own_that_is_missing_is_a_defect(monkeypatch):
    monkeypatch.setitem(sys.modules, "baton.services.certs.command", None)
    with pytest.raises(ModuleNotFoundError, match=r"baton\.services\.certs"):
        cli.main(["certs"], {})


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_the_cli_itself_imports_neither_torch_nor_grpc(words):
    program = (
        "import sys; from baton.services import cli; assert cli.main(sys.argv[1:]) == 0;"
        "heavy = {'torch', 'grpc', 'numpy', 'asyncio', 'argparse'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


@pytest.mark.parametrize("service", list(cli.SERVICES))
def test_a_service_explains_its_flags_without_importing_torch(service):
    program = (
        "import sys; from baton.services import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, service, "--help"], check=True, capture_output=True, text=True
    )
    assert "--log-format {text,json}" in shown.stdout
    assert f"BATON_{service.upper()}_" in shown.stdout


@pytest.mark.parametrize("service", list(cli.SERVICES))
def test_a_wrong_flag_ends_a_service_with_2_and_one_line(service):
    ended = subprocess.run(
        [sys.executable, "-m", "baton.services.cli", service, "--log-level", "loud"], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        f"baton {service}: --log-level: 'loud' is not allowed; give one of debug, info, warning, error\n"
    )


def test_bench_lists_and_runs_the_programs_of_a_folder(tmp_path, capfd):
    (tmp_path / "track").mkdir()
    (tmp_path / "track" / "bench_laps.py").write_text(
        '"""Laps a second.\n\nMore."""\nimport sys\nprint("ran", sys.argv[1:])\nsys.exit(3)'
    )
    assert bench.main([], tmp_path) == 0
    assert "laps             Laps a second." in capfd.readouterr().out
    assert bench.main(["laps", "--fast"], tmp_path) == 3
    assert "ran ['--fast']" in capfd.readouterr().out
    assert bench.main(["lps"], tmp_path) == 2
    assert "there are serve, embed, latency, throughput, startup, sweep, laps" in capfd.readouterr().err


def test_bench_without_a_checkout_has_what_users_run(tmp_path, capsys):
    assert bench.main([], tmp_path) == 0
    shown = capsys.readouterr().out
    assert "  throughput       Measures requests and tokens a second" in shown
    assert "checkout" not in shown
    assert bench.main(["wire"], tmp_path) == 2
    assert "the others are part of the source checkout" in capsys.readouterr().err


def test_bench_without_a_package_prints_the_extra_that_has_it(monkeypatch, capsys):
    def fail(name):
        raise ModuleNotFoundError(name="orjson")

    monkeypatch.setattr(bench.importlib, "import_module", fail)
    assert bench.main(["serve"]) == 1
    assert 'orjson is not installed; pip install "baton-inference[bench]"' in capsys.readouterr().err
    assert bench.main(["latency"]) == 1
    assert 'pip install "baton-inference[serve]"' in capsys.readouterr().err
