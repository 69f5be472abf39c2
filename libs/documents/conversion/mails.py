"""E-mail to Markdown: subject, addresses, the body, and the names of attachments."""

from __future__ import annotations

import email
import email.contentmanager
import email.policy
import re
from email.message import EmailMessage, MIMEPart
from typing import Final

from . import markup
from .limits import Limits, Refused
from .paging import Pages

_HEADERS: Final = ("From", "To", "Cc", "Date")
_CONTAINER: Final = re.compile(rb"^content-type:\s*(?:multipart|message)/", re.I | re.M)
_MAX_ATTACHMENTS: Final = 100
_MAX_HEADER: Final = 10_000


def load() -> None:
    """Load all modules that a conversion needs."""
    made = email.message_from_bytes(
        b"From: =?utf-8?q?a?= <a@b.c>\nDate: Mon, 1 Jan 2024 00:00:00 +0000\n"
        b"Content-Type: multipart/mixed; boundary=x\n\n--x\n\nb\n--x--\n",
        policy=email.policy.default,
    )
    [str(made[name]) for name in _HEADERS]


def convert(data: bytes, limits: Limits, pages: Pages) -> None:
    """Add the message as one page, or more if it is long. Attachments are named and not read."""
    # Each level of parts costs the parser time for every line in it, so they are counted first.
    if len(_CONTAINER.findall(data)) > limits.depth:
        raise Refused(f"it has more than {limits.depth:,} parts that have parts")
    try:
        message = email.message_from_bytes(data, policy=email.policy.default)
        if not isinstance(message, EmailMessage):
            raise Refused("it has no headers")
        body = message.get_body(preferencelist=("html", "plain"))
        attachments = (
            [] if message.get_content_type().startswith("text/") else _attachments(message)
        )
    except RecursionError:
        raise Refused("it has too many parts inside one another") from None
    subject = _header(message, "Subject")
    lines = [f"{name}: {value}" for name in _HEADERS if (value := _header(message, name))]
    blocks = [f"# {subject}" if subject else "", "  \n".join(lines), _body(body, limits)]
    if attachments:
        blocks.append("Attachments:\n\n" + "\n".join(f"- {name}" for name in attachments))
    pages.add("\n\n".join(filter(None, blocks)))


def _header(message: EmailMessage, name: str) -> str:
    try:
        return " ".join(str(message[name] or "").split())[:_MAX_HEADER]
    except (ValueError, IndexError, AttributeError, TypeError, LookupError):  # a malformed header
        return ""


def _body(part: MIMEPart | None, limits: Limits) -> str:
    if part is None:
        return ""
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes):
        return ""
    charset = part.get_content_charset()
    text = markup.decoded_as(data, charset) if charset else markup.decoded(data)
    if part.get_content_subtype() == "html":
        return markup.from_html(text, "its body", limits).strip()
    return text.strip()


def _attachments(message: EmailMessage) -> list[str]:
    found: list[str] = []
    for part in message.iter_attachments():
        name = " ".join((part.get_filename() or "").split())[:200]
        found.append(f"{name or 'unnamed'} ({part.get_content_type()})")
        if len(found) == _MAX_ATTACHMENTS:
            break
    return found
