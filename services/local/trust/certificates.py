"""Certificates for development: a private certificate authority, and the X.509 certificates that
the parts of a mesh present to each other.

In clusters, cert-manager or a similar service issues certificates with the same names: the
certificate of a server has its DNS names and IP addresses, and that of a caller has the SPIFFE URI
`spiffe://<trust domain>/<role>/<tenant or name>`, from which servers read its role.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

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

from libs.errors import InvalidInput
from libs.serving.security.identity import CERTIFIED_NAME, is_certified_name

SERVERS: Final = ("router", "scheduler", "edge")
CALLERS: Final = ("worker", "client", "admin", "scaler")
ROLES: Final = (*SERVERS, *CALLERS, "redis")
_HAVE_HOSTS: Final = (*SERVERS, "redis")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
CA_DAYS: Final = 365
LEAF_DAYS: Final = 30
_PARTY: Final = re.compile(rf"({'|'.join(ROLES)})(?:/({CERTIFIED_NAME}))?")
_ALLOWED: Final = (
    f"`role` or `role/name`: a role is one of {', '.join(ROLES)}, a name 1..63 of A-Z a-z 0-9 . "
    "_ -, or *"
)
_CLOCK_SKEW: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Party:
    """The holder of a certificate.

    Attributes:
        name: The tenant of a client or admin; the name in logs of other parties.
    """

    role: str
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES or not is_certified_name(self.name):
            raise InvalidInput(f"{f'{self.role}/{self.name}'!r} is not {_ALLOWED}", field="name")

    @staticmethod
    def parse(text: str) -> Party:
        """Parse `role` or `role/name`. Raises InvalidInput."""
        match = _PARTY.fullmatch(text)
        if match is None:
            raise InvalidInput(f"{text!r} is not {_ALLOWED}", field="name")
        return Party(match[1], match[2] or "default")

    @property
    def stem(self) -> str:
        """The stem of its files' names: the role, and the name if it is not the default one."""
        if self.name == "default":
            return self.role
        return f"{self.role}-{'any' if self.name == '*' else self.name}"

    def uri(self, trust_domain: str) -> str:
        return f"spiffe://{trust_domain}/{self.role}/{self.name}"


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued certificate, the paths of its files, and the time at which it expires."""

    party: Party
    uri: str
    certificate: Path
    key: Path
    ends: datetime


@dataclass(frozen=True, slots=True)
class Authority:
    """The signing authority. Its key is only in the directory given to `shoal certs`."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def open_authority(
    directory: Path, *, now: datetime, force: bool = False
) -> tuple[Authority, bool]:
    """Return the authority in the directory, and whether it is new. One is created if the directory
    has none, or by `force`. Raises InvalidInput if the existing one cannot sign.
    """
    certificate, key = directory / "ca.pem", directory / "ca.key"
    if not force and (certificate.exists() or key.exists()):
        return _read_authority(certificate, key, now), False
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = _new_authority(now)
    _write(key, _key_pem(made.key), private=True)
    _write(certificate, made.certificate.public_bytes(Encoding.PEM))
    return made, True


def issue(
    directory: Path,
    authority: Authority,
    party: Party,
    *,
    now: datetime,
    hosts: Sequence[str] = (),
    days: float = LEAF_DAYS,
    trust_domain: str = "shoal",
) -> Issued:
    """Create a key and a certificate, and replace the party's previous ones.

    Args:
        now: The time from which it is valid.
        hosts: DNS names and IP addresses of a server, in addition to those of loopback.
        days: Duration of its validity, which also ends with that of the authority.
        trust_domain: The trust domain in its SPIFFE URI.
    """
    uri = party.uri(trust_domain)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
    usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if party.role in _HAVE_HOSTS:
        names += [_general_name(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
        usage.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    signing = authority.certificate.extensions.get_extension_for_class(
        x509.SubjectKeyIdentifier
    ).value
    made = (
        _builder(
            f"shoal {party.role} {party.name}",
            authority.certificate.subject,
            key.public_key(),
            now,
            ends,
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signing), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    files = directory / f"{party.stem}.pem", directory / f"{party.stem}.key"
    # For a moment, readers find the new key with the old certificate. They keep their previous pair
    # until key and certificate match.
    _write(files[1], _key_pem(key), private=True)
    _write(files[0], made.public_bytes(Encoding.PEM))
    return Issued(party, uri, *files, ends)


def issue_all(
    directory: Path,
    parties: Iterable[Party],
    *,
    now: datetime | None = None,
    hosts: Sequence[str] = (),
    days: float = LEAF_DAYS,
    trust_domain: str = "shoal",
    force: bool = False,
) -> tuple[bool, list[Issued]]:
    """Issue certificates for `parties`, for the default party of each server and caller role, and
    for all parties that have one already, which keep their hosts.

    Returns whether the authority is new, and the certificates. Raises InvalidInput. The arguments
    are as in `issue` and `open_authority`.
    """
    now = now or datetime.now(UTC)
    if not 0 < days <= CA_DAYS:
        raise InvalidInput(
            f"days must be above 0 and at most {CA_DAYS}, not {days:g}", field="days"
        )
    if not re.fullmatch(r"[a-z0-9._-]{1,255}", trust_domain):
        raise InvalidInput(
            (
                f"{trust_domain!r} is not a trust domain: it may contain only a-z, 0-9, '.', '_' "
                "and '-'"
            ),
            field="trust-domain",
        )
    for host in hosts:
        _general_name(host)
    authority, is_new = open_authority(directory, now=now, force=force)
    present = _present(directory)
    wanted = dict.fromkeys(
        [*(Party(role, "default") for role in (*SERVERS, *CALLERS)), *present, *parties]
    )
    return is_new, [
        issue(
            directory,
            authority,
            party,
            now=now,
            hosts=[*present.get(party, ()), *hosts],
            days=days,
            trust_domain=trust_domain,
        )
        for party in wanted
    ]


def server_variables(directory: Path, role: str) -> dict[str, str]:
    """Return the environment variables for a router, a scheduler or an edge."""
    return {
        "SHOAL_TLS_CERT": str(directory / f"{role}.pem"),
        "SHOAL_TLS_KEY": str(directory / f"{role}.key"),
        "SHOAL_TLS_CLIENT_CA": str(directory / "ca.pem"),
    }


def caller_variables(directory: Path, stem: str) -> dict[str, str]:
    """Return the environment variables for a worker or any other caller."""
    return {
        "SHOAL_TLS_CA": str(directory / "ca.pem"),
        "SHOAL_TLS_CERT": str(directory / f"{stem}.pem"),
        "SHOAL_TLS_KEY": str(directory / f"{stem}.key"),
    }


def edge_variables(directory: Path, stem: str) -> dict[str, str]:
    """Return the environment variables by which an edge trusts routers, and the certificate that it
    presents to them.
    """
    return {
        "SHOAL_ROUTERS_CA": str(directory / "ca.pem"),
        "SHOAL_ROUTERS_CERT": str(directory / f"{stem}.pem"),
        "SHOAL_ROUTERS_KEY": str(directory / f"{stem}.key"),
    }


def _read_authority(certificate: Path, key: Path, now: datetime) -> Authority:
    advice = "replace it with --force (every process that trusts it then needs the new ca.pem)"
    try:
        read = Authority(
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            _elliptic(load_pem_private_key(key.read_bytes(), None)),
        )
    except OSError as error:
        raise InvalidInput(
            f"the authority in {certificate.parent} cannot be used: {error}; {advice}"
        ) from None
    except (ValueError, TypeError):
        raise InvalidInput(
            f"{certificate} and {key} are not an authority of `shoal certs`; {advice}"
        ) from None
    if read.certificate.public_key() != read.key.public_key():
        raise InvalidInput(f"{key} is not the key of {certificate}; {advice}")
    if read.certificate.not_valid_after_utc <= now:
        raise InvalidInput(
            f"the authority {certificate} expired on "
            f"{read.certificate.not_valid_after_utc:%Y-%m-%d}; {advice}"
        )
    return read


def _present(directory: Path) -> dict[Party, list[str]]:
    """Return the parties with a certificate in the directory, and their hosts."""
    found: dict[Party, list[str]] = {}
    for path in sorted(directory.glob("*.pem")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            names = certificate.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            party = Party.parse("/".join(uri.removeprefix("spiffe://").split("/")[1:]))
        except (ValueError, x509.ExtensionNotFound, InvalidInput):
            continue  # the authority's, or a foreign one
        addresses = names.get_values_for_type(x509.IPAddress)
        found[party] = [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]
    return found


def _elliptic(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not an elliptic curve's key")
    return key


def _new_authority(now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # The name has a random number: clients find the authority of a certificate by name, and must
    # not take another authority for it.
    name = f"Shoal development CA {x509.random_serial_number():x}"[:40]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(name, subject, key.public_key(), now, now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", host):
        raise InvalidInput(
            f"{host!r} is neither a DNS name nor an IP address; a port must not follow it",
            field="host",
        )
    return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file atomically. A private key is at no time readable by other users."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb"
    ) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
