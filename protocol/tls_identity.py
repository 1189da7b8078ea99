"""TLS 1.3 between workers, from the cluster's CURVE keys.

Every process that knows the workers' secret key derives the same Ed25519 key and the same certificate from it, and
trusts only that certificate. Both ends present it. So `tandem keys` makes nothing more, and a process without the
secret can neither connect nor be connected to.
"""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass

import zmq.utils.z85
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tandem.protocol.network_keys import NetworkKeys

_PURPOSE = b"tandem: TLS between workers, 1"
"""Separates the derived key from the CURVE key, and from keys that later versions may derive."""
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tandem worker")])
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""The certificate is valid as long as the keys are, whatever the hosts' clocks say."""


@dataclass(frozen=True)
class TlsContexts:
    """One context for each end. server: of the end that listens. client: of the end that connects."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_contexts(keys: NetworkKeys) -> TlsContexts:
    """Returns contexts that accept only processes with the same secret key. keys: of a worker."""
    pem, certificate = _identity(keys.secret)
    return TlsContexts(
        _context(ssl.PROTOCOL_TLS_SERVER, pem, certificate), _context(ssl.PROTOCOL_TLS_CLIENT, pem, certificate)
    )


def _identity(secret: bytes) -> tuple[bytes, str]:
    """Returns private key and certificate, and the certificate alone, in PEM. secret: in Z85."""
    seed = HKDF(hashes.SHA256(), 32, salt=None, info=_PURPOSE).derive(zmq.utils.z85.decode(secret))
    private = Ed25519PrivateKey.from_private_bytes(seed)
    builder = x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, _FROM, _UNTIL)
    certificate = builder.sign(private, None).public_bytes(Encoding.PEM)  # the same bytes in every process
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate, certificate.decode()


def _context(protocol: ssl._SSLMethod, pem: bytes, certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the same on all hosts
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = (
            0  # a peer that only sends would never read them, and its close would reset the connection
        )
    context.load_verify_locations(cadata=certificate)
    fd = os.memfd_create("tls-identity")  # the ssl module reads keys from files only
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
