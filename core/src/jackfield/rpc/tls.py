"""Certificates of servers that listen beyond this machine."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from jackfield.errors import RpcError

_DAYS = 3650


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def server_tls() -> tuple[ssl.SSLContext, str]:
    """Make a fresh key and certificate. Returns the server's context and the certificate, as PEM.

    Raises:
        RpcError: ``rpc.address``: the package cryptography is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        fix = "pip install 'jackfield[distributed]'"
        raise RpcError("to listen beyond this machine needs cryptography", code="rpc.address", fix=fix) from error
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jackfield")])
    begin, end = now - timedelta(days=1), now + timedelta(days=_DAYS)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # readable by this user only
        file.write(secret + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.decode()
