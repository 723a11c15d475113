"""A company that issues certificates, good ones and others.

Runs in: the process of pytest
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sparkdl.core.options import TlsFiles

NAME = "training.company.example"
_DAY = datetime.timedelta(days=1)


@dataclass
class Company:
    """A CA, and the folder that its certificates are written to."""

    folder: Path
    _key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        own = self._sign("CA", self._key, (), 1).public_bytes(serialization.Encoding.PEM)
        self.ca = self._write("ca.pem", own)

    def issue(
        self, host: str, *names: str, days: int = 1, passphrase: bytes = b"", folder: str = ""
    ) -> TlsFiles:
        """Return the files of a host whose certificate carries `names` and is valid for `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(host, key, names, days)
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption(),
        )
        return TlsFiles(
            self._write(f"{folder or host}.pem", cert.public_bytes(pem)),
            self._write(f"{folder or host}.key", secret),
            self.ca,
        )

    def _sign(
        self, subject: str, key: ec.EllipticCurvePrivateKey, names: tuple[str, ...], days: int
    ) -> x509.Certificate:
        is_ca = key is self._key
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(subject))
            .issuer_name(_named("CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, data: bytes) -> str:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / name
        path.write_bytes(data)
        path.chmod(0o600)
        return str(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
