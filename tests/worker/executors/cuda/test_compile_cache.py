"""Compiled kernels have one folder for each compiler and card, wherever the user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.rpc.errors import InvalidRequest
from baton.worker.executors.cuda.compilation.cache import default_folder, use_compile_cache


def test_the_default_is_the_users_cache_folder() -> None:
    assert default_folder({"HOME": "/home/a"}) == Path("/home/a/.cache/baton/triton")
    assert default_folder({"HOME": "/home/a", "XDG_CACHE_HOME": "/caches"}) == Path("/caches/baton/triton")


def test_triton_is_sent_to_a_folder_that_names_compiler_and_card(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    path = use_compile_cache(str(tmp_path), environ)
    assert environ["TRITON_CACHE_DIR"] == str(path)
    assert path.is_dir()
    assert path.parent == tmp_path


def test_an_operators_own_setting_stays(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "own")}
    assert use_compile_cache("", environ) == tmp_path / "own"
    assert use_compile_cache(str(tmp_path), environ).parent == tmp_path


def test_kernels_round_alike_under_every_triton(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    use_compile_cache(str(tmp_path), environ)
    assert environ["TRITON_DEFAULT_FP_FUSION"] == "1"
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "0"}
    use_compile_cache("", own)
    assert own["TRITON_DEFAULT_FP_FUSION"] == "0"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="compile_cache_dir="):
        use_compile_cache(str(tmp_path / "file" / "folder"), {})


def test_without_a_home_kernels_are_kept_for_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    path = use_compile_cache("", environ)
    assert environ["TRITON_CACHE_DIR"] == str(path)
    assert "kept in" in caplog.text
    path.rmdir()
