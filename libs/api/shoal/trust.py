"""Whom a caller believes and what it shows: certificates and tokens, read again when their files have changed.

Python's gRPC does not reload a client's certificates: `shoal.channels` opens a new channel when `Tls.watched` gives other ones.
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

from shoal.addresses import is_local

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 1.0
"""Between two looks at the same files."""
SETTLE_SECONDS = 0.5
"""So long changed files must have been left alone: who writes one slowly would have its beginning read."""
_TOKEN = re.compile(r"[!-~]+")


class Watched(Generic[T]):
    """What `read` makes of `files`, made anew when they have changed; they are looked at once a second at most.

    Changed files count once they have been left alone for half a second. While they are gone, cannot be read, or do not fit
    together (a new certificate, and its key not yet), the last ones that did count. Threads may share one. Making one raises what
    `read` raises: OSError or ValueError. `clock`: seconds of any beginning; `wall`: Unix seconds, as files' times are.
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
        # The state: how the files were when they were read, what was read, and when to look again.
        self._seen = self._stamps()
        self._value = read()
        self._next = clock() + LOOK_SECONDS
        self._refused: object = None
        self._changed: object = None

    def get(self) -> T:
        now = self._clock()
        if not self._files or now < self._next:
            return self._value
        self._next = now + LOOK_SECONDS
        stamps = self._stamps()
        if stamps != self._seen and self._is_settled(stamps):
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                if self._refused != stamps:
                    log.warning("changed files cannot be used, so the last ones still are: %s", error)
                self._refused = stamps
            else:
                if self._stamps() == stamps:  # else changed while it was read
                    self._seen, self._value = stamps, value
        return self._value

    def _is_settled(self, stamps: Sequence[tuple[int, ...] | None]) -> bool:
        """By the files' own times, or, should their clock be ahead of ours, because the last look saw them so."""
        before, self._changed = self._changed, stamps
        touched = max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=0.0)
        return stamps == before or self._wall() - touched >= SETTLE_SECONDS

    def _stamps(self) -> Sequence[tuple[int, ...] | None]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Pem(NamedTuple):
    """Contents of PEM files, as gRPC takes them."""

    root_certificates: bytes | None
    private_key: bytes | None
    certificate_chain: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files or their contents. `root_certificates` None: the system's; the certificate chain and key are for mutual TLS.
    `server_name`: the name that the server's certificate must bear, where it is not the address'.

    Files are read again when they change: new calls then go over a new connection, those in flight end on the old one.
    """

    root_certificates: str | Path | bytes | None = field(default=None, repr=False)
    certificate_chain: str | Path | bytes | None = field(default=None, repr=False)
    private_key: str | Path | bytes | None = field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("mutual TLS needs both certificate_chain and private_key")

    def read(self) -> Pem:
        """Raises ValueError, naming the file, for one that cannot be read or used, and for another certificate's key."""
        pem = Pem(*(_contents(source) for source in (self.root_certificates, self.private_key, self.certificate_chain)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if pem.root_certificates is not None:
            try:
                context.load_verify_locations(cadata=pem.root_certificates.decode("ascii", "replace"))
            except (ssl.SSLError, ValueError):
                raise ValueError(f"{_called(self.root_certificates)} has no PEM certificates to trust") from None
        chain, key = self.certificate_chain, self.private_key
        if chain is not None and key is not None and not isinstance(chain, bytes) and not isinstance(key, bytes):
            try:
                context.load_cert_chain(chain, key, password=lambda: "")
            except (OSError, ValueError) as error:
                why = getattr(error, "reason", None) or "not PEM"
                raise ValueError(f"{chain} and {key} are not a certificate and its unencrypted key: {why}") from None
        return pem

    def watched(self) -> Watched[Pem]:
        """The contents, read again when they change. Raises ValueError as `read` does."""
        sources = (self.root_certificates, self.certificate_chain, self.private_key)
        return Watched([Path(source) for source in sources if isinstance(source, (str, Path))], self.read)


def _contents(source: str | Path | bytes | None) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from None


def _called(source: str | Path | bytes | None) -> str:
    return "root_certificates" if isinstance(source, bytes) else str(source)


class TokenFile:
    """Gives the bearer token that a file has now. Raises ValueError if there is none at first."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._token = Watched([self._path], self._read)

    def __call__(self) -> str:
        return self._token.get()

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def _read(self) -> str:
        try:
            token = self._path.read_text("utf-8").strip()
        except OSError as error:
            raise ValueError(f"the token file {self._path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"the token file {self._path} is not text") from None
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"the token file {self._path} must hold one token: visible ASCII characters without spaces")
        return token


@dataclass(frozen=True, slots=True)
class Trust:
    """TLS and the bearer token of a caller, either of which may be missing."""

    tls: Tls | None = None
    token: str | Callable[[], str] = field(default="", repr=False)
    """What it is, or what gives the current one."""
    token_without_tls: bool = False
    """The token may travel in plain text to other machines, because something else protects the way."""

    def check(self, addresses: Iterable[str]) -> None:
        """Raises ValueError if files cannot be used, or the token would travel unencrypted to another machine."""
        if self.tls is not None:
            self.tls.read()
        elif self.token and not self.token_without_tls and not all(is_local(address) for address in addresses):
            raise ValueError(
                f"a token would travel unencrypted to {', '.join(addresses)}: use tls (SHOAL_TLS_CA), or say token_without_tls=True"
                " (SHOAL_TOKEN_WITHOUT_TLS=1)"
            )
        if isinstance(self.token, str) and self.token:
            self.metadata()

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Trust:
        """What SHOAL_TLS…, SHOAL_TOKEN… say. Raises ValueError naming the variable or the file."""
        return Trust(tls_from(environ), token_from(environ), flag(environ, "SHOAL_TOKEN_WITHOUT_TLS"))

    def describe(self) -> str:
        """For logs: whether, not what."""
        tls = "no TLS" if self.tls is None else "mutual TLS" if self.tls.certificate_chain is not None else "TLS"
        return f"{tls}, {'a token' if self.token else 'no token'}"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries. Raises ValueError for a token that no header can hold; gRPC's own error would show it."""
        token = self.token if isinstance(self.token, str) else self.token()
        if not token:
            return ()
        if not _TOKEN.fullmatch(token):
            raise ValueError("a token must be visible ASCII characters without spaces")
        return (("authorization", f"Bearer {token}"),)


def tls_from(environ: Mapping[str, str] = os.environ) -> Tls | None:
    """What SHOAL_TLS, SHOAL_TLS_CA, SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_NAME ask for: None if they are empty. Raises
    ValueError."""
    ca, chain, key, name = (environ.get(f"SHOAL_TLS_{part}") or None for part in ("CA", "CERT", "KEY", "NAME"))
    wanted = flag(environ, "SHOAL_TLS")
    if (chain is None) != (key is None):
        raise ValueError("SHOAL_TLS_CERT and SHOAL_TLS_KEY go together: a certificate and its key")
    return Tls(ca, chain, key, name or "") if wanted or ca or chain or name else None


def token_from(environ: Mapping[str, str] = os.environ) -> str | TokenFile:
    """The token of SHOAL_TOKEN, else what gives that of SHOAL_TOKEN_FILE, else an empty one. Raises ValueError."""
    file = environ.get("SHOAL_TOKEN_FILE")
    return environ.get("SHOAL_TOKEN") or (TokenFile(file) if file else "")


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable says yes. Raises ValueError unless it is 1, true, 0, false or empty."""
    value = environ.get(name, "").strip().lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1 or 0, not {value!r}")
    return value in ("1", "true")
