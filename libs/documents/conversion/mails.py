"""E-mail to Markdown: subject, addresses, the body, and the names of attachments."""

from __future__ import annotations

import email
import email.contentmanager
import email.policy
import re
from email.message import EmailMessage, MIMEPart
from itertools import islice
from typing import Final

from . import markup
from .limits import ConversionLimits, ConversionRefused
from .paging import DocumentPages

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


def convert(data: bytes, limits: ConversionLimits, pages: DocumentPages) -> None:
    """Add the message as one page, or more if it is long. Attachments are named and not read."""
    # Each level of parts costs the parser time for every line in it, so they are counted first.
    if len(_CONTAINER.findall(data)) > limits.depth:
        raise ConversionRefused(f"it has more than {limits.depth:,} parts that have parts")
    try:
        message = email.message_from_bytes(data, policy=email.policy.default)
        if not isinstance(message, EmailMessage):
            raise ConversionRefused("it has no headers")
        body = message.get_body(preferencelist=("html", "plain"))
        attachments = (
            [] if message.get_content_type().startswith("text/") else _attachments(message)
        )
    except RecursionError:
        raise ConversionRefused("it has too many parts inside one another") from None
    subject = _header(message, "Subject")
    lines = [f"{name}: {value}" for name in _HEADERS if (value := _header(message, name))]
    blocks = [f"# {subject}" if subject else "", "  \n".join(lines), _body(body, limits)]
    blocks += [_body(part, limits) for part in attachments if _is_inline_text(part)]
    names = [_described(part) for part in attachments if not _is_inline_text(part)]
    if names:
        blocks.append("Attachments:\n\n" + "\n".join(f"- {name}" for name in names))
    pages.add("\n\n".join(filter(None, blocks)))


def _header(message: EmailMessage, name: str) -> str:
    try:
        return " ".join(str(message[name] or "").split())[:_MAX_HEADER]
    except (ValueError, IndexError, AttributeError, TypeError, LookupError):  # a malformed header
        return ""


def _body(part: MIMEPart | None, limits: ConversionLimits) -> str:
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


def _attachments(message: EmailMessage) -> list[MIMEPart]:
    return list(islice(message.iter_attachments(), _MAX_ATTACHMENTS))


def _is_inline_text(part: MIMEPart) -> bool:
    """Return whether a part goes on with the body, such as the text after an attachment."""
    is_text = part.get_content_type() == "text/plain"
    return is_text and not part.is_attachment() and not part.get_filename()


def _described(part: MIMEPart) -> str:
    name = " ".join((part.get_filename() or "").split())[:200]
    return f"{name or 'unnamed'} ({part.get_content_type()})"
