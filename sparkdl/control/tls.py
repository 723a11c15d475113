"""TLS between the processes of a cluster: the certificates presented and the certificates trusted.

`new_tls` makes a certificate for one cluster, in memory. It travels to the agents as the token
does, and is all that the cluster's processes believe: it is its own root.

It carries one name wherever it is shown. Names of hosts are not asked for: executors come up at
addresses that no certificate could know. Python lets a check be left out, but gRPC does not, so
both get the same name to look for (`override_hostname` in Flight).
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import create_connection
from typing import Any

from sparkdl.core.errors import ConfigError

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""How long a peer may take to shake hands."""
NAME = "cluster.internal"
_CLOCK_SKEW = datetime.timedelta(days=1)
"""How far behind the clocks of executors may be: the certificate is valid from earlier on."""
_LIFETIME = datetime.timedelta(days=3650)
"""Longer than any cluster lives: each has a certificate of its own."""
_MISSING = (
    "{why} is on, and TLS needs the package cryptography at the driver, to make the cluster's "
    "certificate: pip install cryptography. Or leave the connections unencrypted, tls=False"
)


@dataclass(frozen=True)
class Trust:
    """The certificate, in PEM, that a client asks a server for. It is no secret."""

    roots: bytes = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """Return what a client of Python's shakes hands by, with `NAME` as the server's name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.roots.decode())
        return context

    def connect(self, host: str, port: int, timeout_s: float) -> ssl.SSLSocket:
        sock = create_connection((host, port), timeout_s)
        try:
            return self.context().wrap_socket(sock, server_hostname=NAME)
        except BaseException:
            sock.close()
            raise

    def flight_options(self) -> dict[str, Any]:
        return {"tls_root_certs": self.roots, "override_hostname": NAME}


@dataclass(frozen=True)
class Tls:
    """The certificate and key of a cluster's servers, and the trust of their clients.

    Attributes:
        cert: the certificate, in PEM.
        key: its private key, in PEM.
    """

    trust: Trust
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """Return what a server of Python's shakes hands by."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with _private_path(self.key) as key, _private_path(self.cert) as cert:
            context.load_cert_chain(cert, key)
        return context

    def flight_options(self) -> dict[str, Any]:
        return {"tls_certificates": [(self.cert, self.key)]}


def choose_tls(asked: bool | None, setting: str) -> Tls | None:
    """Return what `Startup(tls=asked)` means; `None` for no TLS.

    Args:
        setting: of Spark's, by which Spark encrypts its own connections; empty if it does not.
    """
    if asked is None and setting:
        _log.info("TLS is on, because %s is; Startup(tls=False) leaves it off", setting)
        return new_tls(setting)
    return new_tls("tls=True") if asked else None


def new_tls(why: str = "TLS") -> Tls:
    """Return a new certificate for one cluster.

    Args:
        why: the setting that asked for it, for the error.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(_MISSING.format(why=why)) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "sparkdl")])
    now = datetime.datetime.now(datetime.timezone.utc)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)  # hosts' clocks differ
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        # The certificate is its own root, so it must be one that may sign.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = cert.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Tls(Trust(pem), pem, private)


@contextmanager
def _private_path(data: bytes) -> Iterator[str]:
    """Yield a path to `data` that others cannot read: Python loads certificates by path alone."""
    if sys.platform == "linux":
        fd = os.memfd_create("sparkdl-tls", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{fd}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # which only this user can read
            file.write(data)
            file.flush()
            yield file.name
