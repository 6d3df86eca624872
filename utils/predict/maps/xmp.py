"""Reads DJI's fields from a photograph's XMP packet, which may be hostile."""

from __future__ import annotations

from typing import NoReturn
from xml.parsers import expat

NAMESPACE = "http://www.dji.com/drone-dji/1.0/"  # a name; nothing is fetched from there
MAX_PACKET_BYTES = 65_502  # what fits one JPEG segment: Adobe XMP specification, part 3 (2020), 1.1.3
MAX_DEPTH = 32  # DJI's packets have 3 levels
MAX_FIELDS = 500  # DJI's packets have some 60
MAX_VALUE_CHARACTERS = 200  # longer values are left out: DewarpData, SelfData


class XmpError(ValueError):
    """An XMP packet is not used. The message is a short reason."""


def read_dji_fields(packet: bytes) -> dict[str, str]:
    """Return the values of the namespace drone-dji by their names, such as GimbalYawDegree. The first of two equal names counts.

    The packet must be UTF-8, whatever encoding it declares. Raises XmpError for a packet that is too long, not
    well-formed or nested too deeply, and for each document type declaration: without one there are no entities, so
    nothing expands and nothing is read from elsewhere.
    """
    if len(packet) > MAX_PACKET_BYTES:
        raise XmpError(f"longer than {MAX_PACKET_BYTES} bytes")
    fields = _Fields()
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.StartDoctypeDeclHandler = _refuse_document_type
    parser.StartElementHandler = fields.start
    parser.EndElementHandler = fields.end
    parser.CharacterDataHandler = fields.text
    try:
        parser.Parse(packet.strip(b"\0 \r\n\t"), True)
    except expat.ExpatError as error:
        raise XmpError(f"not well-formed ({error})") from error
    return fields.found


def _refuse_document_type(*_: object) -> NoReturn:
    raise XmpError("it declares a document type (DOCTYPE)")


class _Fields:
    """Collects the fields, which are attributes or elements, while the parser runs."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._depth = 0
        self._open: str | None = None  # the field whose element has begun
        self._value = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise XmpError(f"nested deeper than {MAX_DEPTH} levels")
        for attribute, value in attributes.items():
            self._keep(attribute, value)
        self._open, self._value = name, ""

    def text(self, text: str) -> None:
        if len(self._value) <= MAX_VALUE_CHARACTERS:
            self._value += text

    def end(self, name: str) -> None:
        self._depth -= 1
        if self._open == name:
            self._keep(name, self._value)
        self._open = None

    def _keep(self, name: str, value: str) -> None:
        namespace, _, field = name.rpartition(" ")
        if namespace == NAMESPACE and len(value) <= MAX_VALUE_CHARACTERS:
            self.found.setdefault(field, value.strip())
            if len(self.found) > MAX_FIELDS:
                raise XmpError(f"more than {MAX_FIELDS} fields")
