"""A certificate authority of a test's own."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Authority:
    """Makes certificates below `folder`; `bundle` is what a client has to trust (PEM)."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self.folder, self.name = folder, _name(name)
        self.bundle = folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        limits = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True,
            content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        made = (
            self._builder(self._key.public_key(), self.name, DAY)
            .add_extension(limits, critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.bundle.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, key: ec.EllipticCurvePublicKey, subject: x509.Name, life: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + life)
        )

    def server(
        self, names: Sequence[str] = ("127.0.0.1", "localhost"), *, expired: bool = False
    ) -> tuple[Path, Path]:
        """Paths of a certificate for these names and addresses, and of its key (mode 0600)."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._issuer)
        made = (
            self._builder(key.public_key(), _name(names[0]), -DAY if expired else DAY)
            .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = f"{names[0]}{'-expired' if expired else ''}"
        cert, secret = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        secret.touch(0o600)
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert, secret
