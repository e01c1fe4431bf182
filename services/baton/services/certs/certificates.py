"""Makes X.509 certificates: a CA, and what it signs. Needs the package `cryptography`; writes no files."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.rpc.identity.identity import Identity

_NO_USAGE = dict.fromkeys(
    (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    ),
    False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Validity:
    """A certificate's validity, in Unix seconds."""

    begin: float
    end: float

    def of(self, builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
        """Returns the builder with these dates. Raises ValueError if the end is not after the beginning."""
        begin, end = (datetime.fromtimestamp(seconds, UTC) for seconds in (self.begin, self.end))
        return builder.not_valid_before(begin).not_valid_after(end)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate for --tls-ca."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key. With it, any identity of the fleet can be issued."""
        return _key_pem(self.key)

    def issue(self, identity: Identity, validity: Validity) -> tuple[bytes, bytes]:
        """Returns certificate and key, PEM, for this identity as server and client."""
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.host_name)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(f"{identity.service}.{identity.fleet}", names, usages, validity)

    def issue_edge(self, hosts: Sequence[str], validity: Validity) -> tuple[bytes, bytes]:
        """Returns certificate and key, PEM, of a server with these names and addresses."""
        return self._issue(hosts[0], [_host_name(host) for host in hosts], [ExtendedKeyUsageOID.SERVER_AUTH], validity)

    def _issue(
        self,
        common_name: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        validity: Validity,
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer_key = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(common_name, self.certificate.subject, key, validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**_NO_USAGE, "digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM), _key_pem(key)


def new_authority(fleet: str, validity: Validity) -> Authority:
    """Creates a self-signed CA for a fleet."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"Baton development CA of {fleet}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(name, subject, key, validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**_NO_USAGE, "key_cert_sign": True, "crl_sign": True}), critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def load_authority(certificate_pem: bytes, key_pem: bytes) -> Authority:
    """Loads a CA. Raises ValueError if the two are invalid or do not match."""
    certificate, key = x509.load_pem_x509_certificate(certificate_pem), load_pem_private_key(key_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the CA's key is not that of its certificate")
    return Authority(certificate, key)


def _builder(
    common_name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, validity: Validity
) -> x509.CertificateBuilder:
    return validity.of(
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
