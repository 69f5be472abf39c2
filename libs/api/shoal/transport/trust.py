"""TLS and bearer tokens of a caller, read again when their files have changed.

Python's gRPC does not reload a client's certificates: `channels.py` opens a new channel when those
of `Tls.watched` have changed.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from shoal.transport.addresses import is_local

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 1.0
"""Time between two checks of the same files for changes."""
SETTLE_SECONDS = 0.5
"""Time for which a changed file must be unmodified before it is read, to avoid reading a partly
written file.
"""
_TOKEN = re.compile(r"[!-~]+")
VARIABLES = {
    "SHOAL_TOKEN": "The bearer token.",
    "SHOAL_TOKEN_FILE": "The file that holds the bearer token, read again when it changes.",
    "SHOAL_TOKEN_WITHOUT_TLS": (
        "1: send the token without TLS to other machines, because something else protects the "
        "network."
    ),
    "SHOAL_TLS": "1: use TLS with the system's authorities.",
    "SHOAL_TLS_CA": "The authorities that sign the router's certificate, a PEM file.",
    "SHOAL_TLS_CERT": "The client certificate, a PEM file.",
    "SHOAL_TLS_KEY": "The key of SHOAL_TLS_CERT, a PEM file.",
    "SHOAL_TLS_NAME": "The name in the router's certificate, if it is not that of the address.",
}
"""The variables that `Trust.from_env` reads, for the documentation of programs that use it."""


class WatchedCredential(Generic[T]):
    """The value that `read` returns for `files`, read again when they have changed; checked once a
    second at most.

    Changed files are read once they have been unmodified for half a second. While they are missing,
    cannot be read, or do not match (a new certificate without its key yet), the last value stays.
    Threads may share an object. The constructor raises the errors of `read`: OSError or ValueError.

    Args:
        clock: Monotonic seconds.
        wall: Unix seconds, as the times of files are.
    """

    def __init__(
        self,
        files: Iterable[Path],
        read: Callable[[], T],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._read, self._clock, self._wall = tuple(files), read, clock, wall
        # The stamps of the files that were read, their value, when to check again; stamps that
        # `read` refused, and those of the last check.
        self._read_stamps = self._stamps()
        self._value = read()
        self._next_check = clock() + LOOK_SECONDS
        self._refused_stamps: object = None
        self._last_stamps: object = None

    def get(self) -> T:
        now = self._clock()
        if not self._files or now < self._next_check:
            return self._value
        self._next_check = now + LOOK_SECONDS
        stamps = self._stamps()
        if stamps != self._read_stamps and self._is_settled(stamps):
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                if self._refused_stamps != stamps:
                    log.warning(
                        "changed files cannot be used, so the values read before stay in use: %s",
                        error,
                    )
                self._refused_stamps = stamps
            else:
                if self._stamps() == stamps:  # else a file changed while it was read
                    self._read_stamps, self._value = stamps, value
        return self._value

    def _is_settled(self, stamps: Sequence[tuple[int, ...] | None]) -> bool:
        """Return True if the files have not changed for a while: by their times, or, if their clock
        is ahead of this machine's, since the last check.
        """
        before, self._last_stamps = self._last_stamps, stamps
        modified = max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=0.0)
        return stamps == before or self._wall() - modified >= SETTLE_SECONDS

    def _stamps(self) -> Sequence[tuple[int, ...] | None]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Pem(NamedTuple):
    """Contents of PEM files, in the order of `grpc.ssl_channel_credentials`."""

    root_certificates: bytes | None
    private_key: bytes | None
    certificate_chain: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files or their contents. The certificate chain and key are for mutual TLS.

    Files are read again when they change: new calls then use a new connection, those in flight
    finish on the old one.

    Attributes:
        root_certificates: The authorities to trust; None: the system's.
        server_name: The name in the server's certificate, if it differs from the address.
    """

    root_certificates: str | Path | bytes | None = field(default=None, repr=False)
    certificate_chain: str | Path | bytes | None = field(default=None, repr=False)
    private_key: str | Path | bytes | None = field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("mutual TLS needs both certificate_chain and private_key")

    def read(self) -> Pem:
        """Raise ValueError, naming the file, if one cannot be read or parsed, or if the key is not
        that of the certificate.
        """
        pem = Pem(
            *(
                _contents(source)
                for source in (self.root_certificates, self.private_key, self.certificate_chain)
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if pem.root_certificates is not None:
            try:
                context.load_verify_locations(
                    cadata=pem.root_certificates.decode("ascii", "replace")
                )
            except (ssl.SSLError, ValueError):
                raise ValueError(
                    f"{_name(self.root_certificates)} holds no PEM certificates of an authority"
                ) from None
        chain, key = self.certificate_chain, self.private_key
        if (
            chain is not None
            and key is not None
            and not isinstance(chain, bytes)
            and not isinstance(key, bytes)
        ):
            try:
                context.load_cert_chain(chain, key, password=lambda: "")
            except (OSError, ValueError) as error:
                cause = getattr(error, "reason", None) or "not PEM"
                raise ValueError(
                    f"{chain} and {key} are not a certificate and its unencrypted key: {cause}"
                ) from None
        return pem

    def watched(self) -> WatchedCredential[Pem]:
        """Return the contents, read again when the files change. Raises ValueError as
        `read` does.
        """
        sources = (self.root_certificates, self.certificate_chain, self.private_key)
        return WatchedCredential(
            [Path(source) for source in sources if isinstance(source, (str, Path))], self.read
        )


def _contents(source: str | Path | bytes | None) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from None


def _name(source: str | Path | bytes | None) -> str:
    return "root_certificates" if isinstance(source, bytes) else str(source)


class TokenFile:
    """A function that returns the bearer token in a file, read again when the file changes. The
    constructor raises ValueError.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._token = WatchedCredential([self._path], self._read)

    def __call__(self) -> str:
        return self._token.get()

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def _read(self) -> str:
        try:
            token = self._path.read_text("utf-8").strip()
        except OSError as error:
            raise ValueError(
                f"the token file {self._path} cannot be read: {error.strerror}"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"the token file {self._path} is not text") from None
        if not _TOKEN.fullmatch(token):
            raise ValueError(
                f"the token file {self._path} must hold one token: visible ASCII characters "
                "without spaces"
            )
        return token


@dataclass(frozen=True, slots=True)
class Trust:
    """TLS and the bearer token of a caller, either of which may be missing."""

    tls: Tls | None = None
    token: str | Callable[[], str] = field(default="", repr=False)
    """The token, or a function that returns the current one."""
    token_without_tls: bool = False
    """Whether the token may be sent in plain text to other machines, because something else
    protects the network.
    """

    def check(self, addresses: Iterable[str]) -> None:
        """Raise ValueError if files cannot be used, or the token would be sent unencrypted to
        another machine.
        """
        if self.tls is not None:
            self.tls.read()
        elif (
            self.token
            and not self.token_without_tls
            and not all(is_local(address) for address in addresses)
        ):
            raise ValueError(
                f"the token would be sent unencrypted to {', '.join(addresses)}: use tls "
                "(SHOAL_TLS_CA), or set"
                " token_without_tls=True (SHOAL_TOKEN_WITHOUT_TLS=1)"
            )
        if isinstance(self.token, str) and self.token:
            self.metadata()

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Trust:
        """Read the variables SHOAL_TLS… and SHOAL_TOKEN…. Raises ValueError, naming the variable or
        the file.
        """
        return Trust(
            tls_from(environ), token_from(environ), flag(environ, "SHOAL_TOKEN_WITHOUT_TLS")
        )

    def describe(self) -> str:
        """Describe for logs if TLS and a token are used, without their contents."""
        tls = (
            "no TLS"
            if self.tls is None
            else "mutual TLS"
            if self.tls.certificate_chain is not None
            else "TLS"
        )
        return f"{tls}, {'a token' if self.token else 'no token'}"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the authorization header. Raises ValueError for a token that a header cannot hold;
        gRPC's own error would show the token.
        """
        token = self.token if isinstance(self.token, str) else self.token()
        if not token:
            return ()
        if not _TOKEN.fullmatch(token):
            raise ValueError("a token must be visible ASCII characters without spaces")
        return (("authorization", f"Bearer {token}"),)


def tls_from(environ: Mapping[str, str] = os.environ) -> Tls | None:
    """Read SHOAL_TLS, SHOAL_TLS_CA, SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_NAME; return None
    if all are empty. Raises ValueError.
    """
    ca, chain, key, name = (
        environ.get(name) or None
        for name in ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY", "SHOAL_TLS_NAME")
    )
    wanted = flag(environ, "SHOAL_TLS")
    if (chain is None) != (key is None):
        raise ValueError(
            "SHOAL_TLS_CERT and SHOAL_TLS_KEY must be set together: a certificate and its key"
        )
    return Tls(ca, chain, key, name or "") if wanted or ca or chain or name else None


def token_from(environ: Mapping[str, str] = os.environ) -> str | TokenFile:
    """Return the token of SHOAL_TOKEN, else that in the file SHOAL_TOKEN_FILE, else an empty one.
    Raises ValueError.
    """
    file = environ.get("SHOAL_TOKEN_FILE")
    return environ.get("SHOAL_TOKEN") or (TokenFile(file) if file else "")


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Return the value of a Boolean variable. Raises ValueError unless it is 1, true, 0, false or
    empty.
    """
    value = environ.get(name, "").strip().lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1 or 0, not {value!r}")
    return value in ("1", "true")
