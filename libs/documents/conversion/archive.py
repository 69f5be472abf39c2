"""Read ZIP archives and the XML in them within limits."""

from __future__ import annotations

import io
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Final
from xml.etree import ElementTree
from xml.parsers import expat

from .limits import ConversionLimits, ConversionRefused

_ENTRY: Final = b"PK\x01\x02"
"""The signature of an entry of the central directory."""
_RATIO_FROM_BYTES: Final = 1 << 20
"""Small files may have any ratio: a part of one repeated value compresses well."""
_READ_BYTES: Final = 1 << 20
_ENCRYPTED: Final = 1
_DAMAGE: Final = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, struct.error, NotImplementedError,
    KeyError, OSError, OverflowError,
)  # fmt: skip


class ZipArchive:
    """A ZIP archive. Its directory is checked when it is opened, its files when they are read.

    Raises ConversionRefused, as its methods do.
    """

    def __init__(self, data: bytes, limits: ConversionLimits) -> None:
        self._limits, self._read_bytes = limits, 0
        # The directory is counted before it is parsed: an entry takes much more memory than bytes.
        entries = data.count(_ENTRY)
        if entries > limits.entries:
            raise ConversionRefused(
                f"it has {entries:,} files; at most {limits.entries:,} are read"
            )
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except _DAMAGE as error:
            raise ConversionRefused(f"it is damaged: {str(error)[:100]}") from None
        self._check_directory()
        # Libraries read a backslash in a name as a slash.
        self._files = {
            name.replace("\\", "/"): entry for name, entry in self._zip.NameToInfo.items()
        }
        self.names = frozenset(self._files)

    def _check_directory(self) -> None:
        limits, entries = self._limits, self._zip.infolist()
        if len(entries) > limits.entries:
            raise ConversionRefused(
                f"it has {len(entries):,} files; at most {limits.entries:,} are read"
            )
        size = sum(entry.file_size for entry in entries)
        if size > limits.archive_bytes:
            raise ConversionRefused(
                f"it has {size:,} bytes uncompressed; at most {limits.archive_bytes:,} are read"
            )
        for entry in entries:
            if (
                entry.file_size > _RATIO_FROM_BYTES
                and entry.file_size > limits.ratio * entry.compress_size
            ):
                raise ConversionRefused(
                    f"{_name(entry.filename)} is compressed more than {limits.ratio:,} times, as "
                    "in a ZIP bomb"
                )

    def read(self, name: str) -> bytes:
        """Return a file of the archive. Its size in the directory is not trusted."""
        limits = self._limits
        entry = self._files.get(name)
        if entry is None:
            raise ConversionRefused(f"it has no {_name(name)}")
        if entry.flag_bits & _ENCRYPTED:
            raise ConversionRefused("it is encrypted with a password: send a copy without one")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ConversionRefused(f"{_name(name)} is compressed by another method than Deflate")
        found = bytearray()
        try:
            with self._zip.open(entry) as file:
                while part := file.read(_READ_BYTES):
                    found += part
                    self._read_bytes += len(part)
                    if len(found) > limits.part_bytes:
                        raise ConversionRefused(
                            f"{_name(name)} has more than {limits.part_bytes:,} bytes uncompressed"
                        )
                    if self._read_bytes > limits.archive_bytes:
                        raise ConversionRefused(
                            f"it has more than {limits.archive_bytes:,} bytes uncompressed"
                        )
        except _DAMAGE as error:
            raise ConversionRefused(f"{_name(name)} is damaged: {str(error)[:100]}") from None
        return bytes(found)

    def xml(self, name: str, *, has_doctype: bool = False) -> ElementTree.Element:
        """Return the checked tree of an XML file.

        Args:
            has_doctype: Accept a document type that defines no entities.
        """
        data = self.read(name)
        XmlCheck(name, self._limits, has_doctype=has_doctype).check(data)
        return ElementTree.fromstring(data)  # noqa: S314 # checked: it defines no entities

    def relations(self, part: str) -> dict[str, tuple[str, str]]:
        """Return the relations of an Office part by id: the last word of the type, and the file."""
        folder, base = posixpath.split(part)
        name = posixpath.join(folder, "_rels", f"{base}.rels")
        if name not in self.names:
            return {}
        return {
            one.get("Id", ""): (
                one.get("Type", "").rpartition("/")[2],
                resolved(folder, one.get("Target", "")),
            )
            for one in self.xml(name)
            if one.get("TargetMode") != "External"
        }

    def repacked(self, check: Callable[[str], XmlCheck | None]) -> bytes:
        """Return a ZIP archive for a library that opens archives itself.

        It has the XML files that the library reads, uncompressed and checked. All other files are
        empty and are not read.

        Args:
            check: Returns the check of a file by its name in lower case; None for a file that the
                library does not read.
        """
        # Libraries may ignore the case of names, so they must not find another file than `check`.
        if len({name.lower() for name in self.names}) < len(self._zip.NameToInfo):
            raise ConversionRefused(
                "it has two files with the same name but for upper case or slashes"
            )
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as packed:
            for name in sorted(self.names):
                data, checker = b"", check(name.lower())
                if checker is not None:
                    data = self.read(name)
                    checker.check(data)
                packed.writestr(zipfile.ZipInfo(name), data)
        return out.getvalue()


class XmlCheck:
    """Parses XML without building a tree. Raises ConversionRefused for depth, document types and
    entities.

    Expat fetches nothing. mammoth and ElementTree use it too; python-calamine has its own parser,
    which knows no entities.
    """

    def __init__(self, name: str, limits: ConversionLimits, *, has_doctype: bool = False) -> None:
        self.name, self.limits = name, limits
        self._depth, self._has_doctype = 0, has_doctype

    def check(self, data: bytes) -> None:
        """Check a file. Raises ConversionRefused."""
        parser = expat.ParserCreate()
        parser.StartElementHandler, parser.EndElementHandler = self.start, self.end
        parser.EntityDeclHandler = self._refuse_entity
        if not self._has_doctype:
            parser.StartDoctypeDeclHandler = self._refuse_doctype
        self.prepare(parser)
        try:
            parser.Parse(data, True)
        except expat.ExpatError as error:
            raise ConversionRefused(
                f"{_name(self.name)} is not valid XML: {str(error)[:100]}"
            ) from None

    def prepare(self, parser: expat.XMLParserType) -> None:
        """Set further handlers."""

    def start(self, element: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > self.limits.depth:
            raise ConversionRefused(
                f"{_name(self.name)} has more than {self.limits.depth:,} elements inside one "
                "another"
            )

    def end(self, element: str) -> None:
        self._depth -= 1

    def _refuse_doctype(self, *_: object) -> None:
        raise ConversionRefused(
            f"{_name(self.name)} has a document type, which Office files must not have"
        )

    def _refuse_entity(self, *_: object) -> None:
        raise ConversionRefused(f"{_name(self.name)} defines entities, which are not read")


def local(tag: str) -> str:
    """Return the name of an element or attribute without its namespace."""
    return tag.rpartition("}")[2]


def resolved(folder: str, target: str) -> str:
    """Return the name in the archive of a file that another one in `folder` refers to."""
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")


def _name(name: str) -> str:
    """Return a name for a message."""
    return name[:80] if name.isprintable() else ascii(name[:80])
