"""The XMP reader on what drones write and on what attackers write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.predict.maps.photographs import DJI, packet
from utils.predict.maps.xmp import MAX_DEPTH, MAX_PACKET_BYTES, XmpError, read_dji_fields

LONG = {"SelfData": "x" * 5000, "RtkFlag": "50"}


@pytest.mark.parametrize("as_elements", [False, True])
@pytest.mark.parametrize(
    ("fields", "namespace", "expected"), [(DJI, "dji", DJI), (DJI, "other", {}), (LONG, "dji", {"RtkFlag": "50"})]
)
def test_djis_short_fields_are_read_from_attributes_and_elements(
    fields: dict[str, str], namespace: str, expected: dict[str, str], as_elements: bool
) -> None:
    assert read_dji_fields(packet(fields, as_elements=as_elements, namespace=namespace) + b"\0\0 \n") == expected


def entities(secret: Path) -> dict[str, str]:
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    return {
        "expanding": f'<!DOCTYPE x [<!ENTITY l0 "ha">{laughs}]>',
        "external": f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{secret}">]>',
        "parameter": f'<!DOCTYPE x [<!ENTITY % e SYSTEM "file://{secret}"> %e;]>',
        "external subset": f'<!DOCTYPE x SYSTEM "file://{secret}">',
    }


@pytest.mark.parametrize("kind", ["expanding", "external", "parameter", "external subset"])
def test_a_document_type_is_refused_whatever_it_declares(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5")
    for value in ("&l9;", "&e;", "5"):
        with pytest.raises(XmpError, match="DOCTYPE"):
            read_dji_fields(packet({"RtkFlag": value}, before=entities(secret)[kind]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<x>" + b" " * MAX_PACKET_BYTES + b"</x>", "longer than"),
        (b"<x>" * (MAX_DEPTH + 1) + b"</x>" * (MAX_DEPTH + 1), "nested deeper"),
        (b"<x>" * 20_000, "nested deeper"),
        (packet({"RtkFlag": "&e;"}), "not well-formed"),
        (packet({"RtkFlag": "5"})[:-60], "not well-formed"),
        (packet({"RtkFlag": "5"}).replace(b'"5"', b'"\xff\xfe"'), "not well-formed"),
        (packet({"RtkFlag": "5"}).decode().encode("utf-16"), "not well-formed"),
        (b'<?xml version="1.0" encoding="utf-16"?><x>\xe9</x>', "not well-formed"),
        (b'<?xml version="1.0" encoding="ISO-8859-1"?><x>\xe9</x>', "not well-formed"),
        (b"no XML", "not well-formed"),
        (b"", "not well-formed"),
        (packet({f"F{number}": "1" for number in range(501)}), "more than 500 fields"),
    ],
)
def test_a_hostile_packet_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(XmpError, match=reason) as caught:
        read_dji_fields(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120
