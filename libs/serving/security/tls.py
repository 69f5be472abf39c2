"""TLS of a server: its certificate, and the authorities for client certificates. Changed files are
reloaded.

New connections use the current files; existing connections are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar, cast

import grpc

from libs.errors import InvalidInput
from libs.serving.watched import Watched

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's chain and key, and the authorities for callers' certificates (None:
    not required).
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a server's port. Raises InvalidInput with variable and
        file.
        """
        paths = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        watched = Watched(paths, self.read)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC before each handshake, in a separate thread. None: unchanged."""
            return watched.content if watched.refresh() else None

        return grpc.dynamic_ssl_server_credentials(
            watched.content,
            cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
            require_client_authentication=self.client_ca is not None,
        )

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read the configuration from the current files. Raises InvalidInput with variable and
        file.
        """
        chain = read_file(self.cert, "SHOAL_TLS_CERT")
        key = read_file(self.key, "SHOAL_TLS_KEY")
        authorities = (
            read_file(self.client_ca, "SHOAL_TLS_CLIENT_CA") if self.client_ca is not None else None
        )
        self._check(chain, key, authorities)
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=authorities
        )

    def _check(self, chain: bytes, key: bytes, authorities: bytes | None) -> None:
        # Imported only if needed: workers serve without TLS and may lack the library.
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificates

        certificate = _parsed(
            lambda: load_pem_x509_certificates(chain)[0],
            self.cert,
            "SHOAL_TLS_CERT",
            "certificates",
        )
        certified = _parsed(
            certificate.public_key,
            self.cert,
            "SHOAL_TLS_CERT",
            "certificates with a supported key type",
        )
        private = _parsed(
            lambda: load_pem_private_key(key, None),
            self.key,
            "SHOAL_TLS_KEY",
            "a private key without a passphrase",
        )
        if certified != private.public_key():
            raise InvalidInput(
                f"{self.key} (SHOAL_TLS_KEY) is not the key of {self.cert} (SHOAL_TLS_CERT)",
                field="SHOAL_TLS_KEY",
            )
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            end = certificate.not_valid_after_utc.isoformat()
            raise InvalidInput(
                f"{self.cert} (SHOAL_TLS_CERT) has expired at {end}: renew it",
                field="SHOAL_TLS_CERT",
            )
        if authorities is not None and self.client_ca is not None:
            _parsed(
                lambda: load_pem_x509_certificates(authorities),
                self.client_ca,
                "SHOAL_TLS_CLIENT_CA",
                "certificates",
            )


def read_file(path: Path, variable: str) -> bytes:
    """Return the file's bytes. Raises InvalidInput with the variable and the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{variable}: {path} cannot be read: {error.strerror}", field=variable
        ) from error


def _parsed(parse: Callable[[], Parsed], path: Path, variable: str, what: str) -> Parsed:
    from cryptography.exceptions import UnsupportedAlgorithm

    # A missing passphrase raises TypeError, text that is not PEM a kind of ValueError.
    try:
        return parse()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput(
            f"{variable}: {path} does not contain {what} in PEM format", field=variable
        ) from error
