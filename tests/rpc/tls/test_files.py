"""Certificate, key and CA files: errors are reported by name before serving."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.network.tls_rig import EXPIRED, NOT_YET, files_of, make_certs, replace_files

from baton.rpc.errors import InvalidRequest
from baton.rpc.tls.credentials import EdgeTls, LiveFiles, Tls
from baton.rpc.tls.files import TlsFiles, edge_files, read_material, tls_files
from baton.services.certs.certificates import Validity, load_authority


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_certs(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Of another CA."""
    return make_certs(tmp_path_factory.mktemp("other"))


@pytest.fixture
def folder(good, tmp_path):
    """The good files, to be spoilt."""
    replace_files(tmp_path, good, "worker", "router", "edge")
    (tmp_path / "ca.crt").write_bytes((good / "ca.crt").read_bytes())
    return tmp_path


def problem_of(folder, service="worker"):
    with pytest.raises(InvalidRequest) as caught:
        Tls(files_of(folder, service), service)
    return caught.value


def test_no_files_are_plain_text():
    assert tls_files("", "", "") is None
    assert edge_files("", "", "rest_tls") is None


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("c", "", ""), "tls_certificate given without tls_key and tls_ca"),
        (("", "k", ""), "tls_key given without tls_certificate and tls_ca"),
        (("c", "k", ""), "tls_certificate, tls_key given without tls_ca"),
        (("", "k", "a"), "tls_key, tls_ca given without tls_certificate"),
    ],
)
def test_an_incomplete_set_names_the_missing_files(given, missing):
    with pytest.raises(InvalidRequest, match=missing):
        tls_files(*given)
    with pytest.raises(InvalidRequest, match="grpc_tls_certificate given without grpc_tls_key"):
        edge_files("c", "", "grpc_tls")


def test_good_files_have_an_identity_and_an_end(good):
    material = read_material(files_of(good, "worker"), "worker")
    assert material.identity.uri == "spiffe://baton/dev/worker/default"
    assert material.expires_at > 89 * 86400


@pytest.mark.parametrize("name", ["worker.crt", "worker.key", "ca.crt"])
def test_a_file_that_is_not_there_is_named(folder, name):
    (folder / name).unlink()
    problem = problem_of(folder).message
    assert str(folder / name) in problem
    assert "No such file" in problem


@pytest.mark.parametrize("name", ["worker.crt", "worker.key", "ca.crt"])
@pytest.mark.parametrize("content", [b"", b"no certificate", "half"], ids=["empty", "text", "torn"])
def test_a_file_with_something_else_in_it_is_named(folder, name, content):
    path = folder / name
    path.write_bytes(path.read_bytes()[:150] if content == "half" else content)
    assert str(path) in problem_of(folder).message


def test_a_key_of_another_certificate_is_reported(folder, good):
    (folder / "worker.key").write_bytes((good / "router.key").read_bytes())
    assert "key values mismatch" in problem_of(folder).message


def test_a_certificate_of_another_ca_is_reported(folder, other):
    replace_files(folder, other, "worker")
    problem = problem_of(folder)
    assert f"checked against tls_ca={folder / 'ca.crt'}" in problem.message
    assert problem.field == "tls_certificate"


@pytest.mark.parametrize(
    ("when", "told"), [(EXPIRED, "certificate has expired"), (NOT_YET, "certificate is not yet valid")]
)
def test_a_certificate_outside_its_validity_is_reported_with_the_clock(good, tmp_path, when, told):
    folder = make_certs(tmp_path / "made", good, **when)
    assert told in problem_of(folder).message
    assert " UTC: " in problem_of(folder).message
    edge = files_of(folder, "edge")
    with pytest.raises(InvalidRequest, match=told):
        EdgeTls(TlsFiles(edge.certificate, edge.key, prefix="rest_tls"))


def test_a_certificate_of_another_service_is_reported(folder, good):
    for name in ("crt", "key"):
        (folder / f"worker.{name}").write_bytes((good / f"router.{name}").read_bytes())
    problem = problem_of(folder).message
    assert "it is spiffe://baton/dev/router/default; here it must be that of a worker" in problem


def test_a_certificate_without_an_identity_is_reported(folder):
    files = files_of(folder, "edge")
    with pytest.raises(InvalidRequest) as caught:
        Tls(files, "worker")
    # One for servers alone may not be shown to a server either.
    assert "unsuitable certificate purpose" in caught.value.message or "URI" in caught.value.message


def test_a_certificate_without_the_services_dns_name_is_reported(folder, good):
    authority = load_authority((good / "ca.crt").read_bytes(), (good / "ca.key").read_bytes())
    names = [x509.UniformResourceIdentifier("spiffe://baton/dev/worker/0"), x509.DNSName("worker.example.com")]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate, key = authority._issue("worker", names, usages, Validity(time.time() - 60, time.time() + 3600))
    (folder / "worker.crt").write_bytes(certificate)
    (folder / "worker.key").write_bytes(key)
    assert "it lacks the DNS name worker.dev.baton.internal" in problem_of(folder).message


def test_a_key_with_a_passphrase_is_reported_without_a_prompt(folder):
    words = ["openssl", "pkcs8", "-topk8", "-passout", "pass:secret", "-in", str(folder / "worker.key")]
    try:
        encrypted = subprocess.run(words, capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    (folder / "worker.key").write_bytes(encrypted)
    assert "give one without a passphrase" in problem_of(folder).message


# Reloads.


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_replaced_files_are_used_and_counted(folder, good, tmp_path):
    live = LiveFiles(files_of(folder, "worker"), "worker")
    before = live.material
    assert live.material is before
    replace_files(folder, make_certs(tmp_path / "new", good), "worker")
    assert live.material != before
    assert live.material.identity == before.identity
    assert (live.num_reloads, live.num_failed_reloads) == (1, 0)


def test_half_of_a_replacement_is_passed_over_until_the_other_half_is_there(folder, good, tmp_path, caplog):
    live = LiveFiles(files_of(folder, "worker"), "worker")
    before, new = live.material, make_certs(tmp_path / "new", good)
    (folder / "worker.crt").write_bytes((new / "worker.crt").read_bytes())
    assert live.material is before
    assert live.material is before
    assert (live.num_reloads, live.num_failed_reloads) == (0, 1)
    assert caplog.text.count("cannot use the new TLS files, keeping the old ones") == 1
    (folder / "worker.key").write_bytes((new / "worker.key").read_bytes())
    assert live.material.certificate == (new / "worker.crt").read_bytes()
    assert (live.num_reloads, live.num_failed_reloads) == (1, 1)


@pytest.mark.parametrize("spoil", ["torn", "gone", "other CA", "other service", "other fleet", "expired"])
def test_files_that_are_wrong_leave_the_old_ones_in_use(folder, good, other, tmp_path, spoil):
    live = LiveFiles(files_of(folder, "worker"), "worker")
    before = live.material
    match spoil:
        case "torn":
            os.truncate(folder / "worker.crt", 100)
        case "gone":
            (folder / "ca.crt").unlink()
        case "other CA":
            replace_files(folder, other, "worker")
        case "other service":
            for name in ("crt", "key"):
                (folder / f"worker.{name}").write_bytes((good / f"router.{name}").read_bytes())
        case "other fleet":
            replace_files(folder, make_certs(tmp_path / "new", good, fleet="south"), "worker")
        case "expired":
            replace_files(folder, make_certs(tmp_path / "new", good, **EXPIRED), "worker")
    assert live.material is before
    assert live.num_failed_reloads == 1
    assert live.num_reloads == 0


@pytest.mark.parametrize("server_side", [True, False])
def test_files_that_are_torn_before_the_first_connection_leave_the_old_ones_in_use(folder, server_side):
    tls = Tls(files_of(folder, "worker"), "worker")
    path = folder / "worker.crt"
    path.write_bytes(path.read_bytes()[:100])
    assert tls.ssl_context(server_side).get_ca_certs()
    assert tls.live.num_failed_reloads == 1


def test_bad_files_are_retried_after_a_while_without_a_change(folder, tmp_path, good):
    clock = Clock()
    live = LiveFiles(files_of(folder, "worker"), "worker", clock)
    replace_files(folder, make_certs(tmp_path / "new", good, **NOT_YET), "worker")
    for passed, failures in ((0.0, 1), (4.9, 1), (0.2, 2)):
        clock.now += passed
        _ = live.material
        assert live.num_failed_reloads == failures


def test_a_touched_file_is_no_reload(folder):
    live = LiveFiles(files_of(folder, "worker"), "worker")
    before = live.material
    os.utime(folder / "worker.crt", (1, 1))
    assert live.material is before
    assert live.num_reloads == 0


def test_services_do_not_need_the_packages_for_certificates():
    program = "import baton.rpc.server.server, baton.services.up.tandem, sys; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
