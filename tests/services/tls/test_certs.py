"""`baton certs`: the files that it writes, and its refusals."""

from __future__ import annotations

import re
import shlex
import ssl
import stat

import pytest
from support.network.tls_rig import make_certs, tls_of

from baton.rpc.identity.identity import SERVICES
from baton.services.certs import command as certs
from baton.services.cli import main


def test_every_service_gets_files_that_its_tls_takes(tmp_path):
    folder = make_certs(tmp_path, fleet="north", name="a-1")
    identities = [tls_of(folder, service).identity.uri for service in SERVICES]
    assert identities == [f"spiffe://baton/north/{service}/a-1" for service in SERVICES]


def test_only_its_owner_can_read_a_key(tmp_path):
    make_certs(tmp_path)
    keys = sorted(tmp_path.glob("*.key"))
    assert len(keys) == len(SERVICES) + 2
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    flags = ["certs", "--dir", str(tmp_path)]
    assert main(flags, {}) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(flags, {}) == 1
    assert re.search(r"gateway\.crt exists and is not overwritten", capsys.readouterr().err)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_ca_that_is_there_signs_later_certificates(tmp_path):
    make_certs(tmp_path, services=("router",))
    ca = (tmp_path / "ca.crt").read_bytes()
    make_certs(tmp_path, services=("worker",))
    assert (tmp_path / "ca.crt").read_bytes() == ca
    assert tls_of(tmp_path, "worker").identity.service == "worker"


@pytest.mark.parametrize("lost", ["ca.crt", "ca.key"])
def test_half_a_ca_is_an_error(tmp_path, lost):
    make_certs(tmp_path, services=("router",))
    (tmp_path / lost).unlink()
    with pytest.raises(certs.CertsFailed, match=r"only one of ca\.crt and ca\.key"):
        make_certs(tmp_path, services=("worker",))


def test_a_key_of_another_ca_is_an_error(tmp_path):
    make_certs(tmp_path / "a", services=("router",))
    make_certs(tmp_path / "b", services=("router",))
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(certs.CertsFailed, match="not that of its certificate"):
        make_certs(tmp_path / "a", services=("worker",))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--services", "router,postman"], "'postman' is none; give some of gateway, router"),
        (["--fleet", "North Wing"], "fleet='North Wing' must be"),
        (["--name", "a/b"], "name='a/b' must be"),
        (["--days", "-1"], "--days: '-1' is not allowed"),
        (["--hosts", ""], "--hosts is empty"),
        (["--dais", "1"], "unknown argument '--dais'; did you mean --days?"),
    ],
)
def test_wrong_flags_are_reported_and_nothing_is_written(tmp_path, capsys, flags, told):
    assert main(["certs", "--dir", str(tmp_path / "new"), *flags], {}) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["certs", "--dir", str(tmp_path / "file" / "sub")], {}) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_printed_flags_are_accepted_by_services(tmp_path, capsys):
    assert main(["certs", "--dir", str(tmp_path)], {}) == 0
    printed = capsys.readouterr().out
    lines = [shlex.split(line) for line in printed.splitlines() if line.startswith("  baton ")]
    assert {words[1] for words in lines} == {"gateway", "router", "worker", "kvstore"}
    for words in lines:
        assert all((tmp_path / word.rpartition("/")[2]).exists() for word in words[3::2])
    assert f"baton up --tls-dir {tmp_path}" in printed


def test_the_edges_certificate_is_of_the_hosts_and_of_no_service(tmp_path):
    make_certs(tmp_path, hosts=("chat.example.com", "10.1.2.3", "::1"))
    names = ssl._ssl._test_decode_cert(str(tmp_path / "edge.crt"))["subjectAltName"]
    assert names == (("DNS", "chat.example.com"), ("IP Address", "10.1.2.3"), ("IP Address", "0:0:0:0:0:0:0:1"))
