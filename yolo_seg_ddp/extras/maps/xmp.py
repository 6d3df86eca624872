"""Reads DJI's fields from a photograph's XMP packet, which may be hostile."""

import re
from typing import Any, NoReturn
from xml.etree import ElementTree

# Names; nothing is fetched from there. Most drones write the longer of DJI's two.
_FIELD = re.compile(
    r"\{http://www\.dji\.com/?(?:drone-dji/1\.0/)?\}(\w+)|\{http://ns\.adobe\.com/xap/1\.0/"
    r"\}(CreatorTool)"
)
_TAG = re.compile(rb"<[^<>?!]+>")
_ATTRIBUTE = re.compile(rb"""\s([\w:.-]+)\s*=\s*("[^"]*"|'[^']*')""")
# what fits one JPEG segment: Adobe XMP specification, part 3 (2020), 1.1.3
MAX_PACKET_BYTES = 65_502
MAX_DEPTH = 32  # DJI's packets have 3 levels
MAX_FIELDS = 500  # DJI's packets have some 60
MAX_VALUE_CHARACTERS = 300  # longer values are left out: SelfData; DewarpData has some 160


class XmpError(ValueError):
    """An XMP packet is not used. The message is a short reason."""


def read_dji_fields(packet: bytes) -> dict[str, str]:
    """Return DJI's values by their names, such as GimbalYawDegree, and CreatorTool. The first of
    two equal names counts.

    Some drones write an attribute of one element twice, which XML forbids: the second one is taken
    out. The packet must be UTF-8, whatever encoding it declares. Raises XmpError for a packet that
    is too long, not well-formed or nested too deeply. A document type declaration is refused too:
    it could define entities, which expand or read files.
    """
    if len(packet) > MAX_PACKET_BYTES:
        raise XmpError(f"longer than {MAX_PACKET_BYTES} bytes")
    parser = ElementTree.XMLParser(target=_BoundedTree(), encoding="utf-8")
    try:
        parser.feed(_TAG.sub(_without_repeats, packet.strip(b"\0 \r\n\t")))
        root = parser.close()
    except ElementTree.ParseError as error:
        raise XmpError(f"not well-formed ({error})") from error
    fields: dict[str, str] = {}
    for element in root.iter():  # a field is an attribute, or an element that holds only text
        texts = [] if len(element) else [(element.tag, element.text or "")]
        for name, value in [*element.items(), *texts]:
            if (field := _FIELD.fullmatch(name)) and len(value) <= MAX_VALUE_CHARACTERS:
                fields.setdefault(field[1] or field[2], value.strip())
    if len(fields) > MAX_FIELDS:
        raise XmpError(f"more than {MAX_FIELDS} fields")
    return fields


def _without_repeats(tag: re.Match[bytes]) -> bytes:
    first: dict[bytes, int] = {}
    return _ATTRIBUTE.sub(
        lambda at: at[0] if first.setdefault(at[1], at.start()) == at.start() else b"", tag[0]
    )


class _BoundedTree(ElementTree.TreeBuilder):
    """Refuses, while the parser runs, what no drone writes."""

    depth = 0

    def doctype(self, *_: object) -> NoReturn:
        raise XmpError("it declares a document type (DOCTYPE)")

    def start(self, tag: Any, attributes: Any, /) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise XmpError(f"nested deeper than {MAX_DEPTH} levels")
        return super().start(tag, attributes)

    def end(self, tag: Any, /) -> Any:
        self.depth -= 1
        return super().end(tag)
