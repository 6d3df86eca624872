"""What a photograph's EXIF and XMP say of where it was taken."""

import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.support.drone_photos import DJI, GPS, HOME, dji, exif_of, write_photo, xmp_of
from yolo_seg_ddp.data.images import EXIF_TIME_TAG, decode_image, read_image
from yolo_seg_ddp.extras.maps import metadata as module
from yolo_seg_ddp.extras.maps.findings import Site, locate, stored_pixels
from yolo_seg_ddp.extras.maps.metadata import (
    ALTITUDE_REF,
    DIGITAL_ZOOM,
    FOCAL_LENGTH_35_MM,
    FOCAL_LENGTH_MM,
    GIMBAL_FIELDS,
    HEIGHT,
    MAKER_NOTE,
    SOFTWARE,
    TIME_OFFSET,
    TIME_WRITTEN,
    WIDTH,
    PhotoMetadata,
    read_metadata,
)
from yolo_seg_ddp.extras.maps.survey import view_of
from yolo_seg_ddp.extras.maps.tests.photographs import FOCAL_TAGS, metadata
from yolo_seg_ddp.extras.maps.tests.test_camera import entry
from yolo_seg_ddp.extras.maps.xmp import MAX_DEPTH, MAX_PACKET_BYTES, XmpError, read_dji_fields

# --- Each trap of a drone's metadata --------------------------------------------------------------


CENTRE = np.array([300.0, 200.0])


def located(
    photo: PhotoMetadata, site: Site | None = None, point: np.ndarray = CENTRE
) -> dict[str, Any]:
    (found,) = locate(photo, entry(point), site or Site())
    return found


def test_djis_fields_and_exif_are_read_from_a_file(tmp_path: Path) -> None:
    photo = read_metadata(
        write_photo(tmp_path / "a.jpg", exif=exif_of(GPS, {**FOCAL_TAGS, TIME_OFFSET: "+02:00"}))
    )
    assert (photo.width, photo.height, photo.problem) == (600, 400, None)
    assert photo.position == HOME
    assert photo.gimbal_deg == (0, -90, 0)
    assert photo.focal_px == (500, 5)
    assert photo.time == "2026-05-04T10:11:12+02:00"
    assert photo.direction_problem is None


def test_without_xmp_the_position_is_that_of_exif_and_the_direction_is_unknown(
    tmp_path: Path,
) -> None:
    photo = read_metadata(write_photo(tmp_path / "a.jpg", exif=exif_of(GPS, FOCAL_TAGS), xmp=None))
    assert photo.position == pytest.approx((-33.857, -70.5))
    assert (photo.altitude_m, photo.altitude_reference) == (80.5, "unknown")
    assert photo.focal_px is not None
    assert photo.focal_px[0] == pytest.approx(500, rel=1e-3)  # 3:2: 30 mm of 36 mm
    found = located(photo)
    assert found["position_kind"] == "camera"
    assert found["bearing_deg"] is found["sigma_m"] is found["distance_m"] is None
    assert found["camera_sigma_m"] == 5.0
    assert found["reason"] == "no GimbalYawDegree, GimbalPitchDegree, GimbalRollDegree in XMP"


def test_the_header_is_read_and_not_the_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (400, 600, 3), np.uint8)
    file = write_photo(tmp_path / "a.jpg", noise)
    data = file.read_bytes()
    file.write_bytes(data[:3000])
    assert len(data) > 100_000
    assert read_metadata(file).position == HOME
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 1000)
    assert read_metadata(file).problem == "header not readable (OSError)"


def test_what_is_no_jpeg_is_missing_or_has_a_damaged_header_has_nulls_and_a_reason(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (60, 40)).save(picture)
    short = tmp_path / "short.jpg"
    short.write_bytes(b"\xff\xd8\xff\xe1\0")
    for file, reason in (
        (picture, "not a JPEG"),
        (short, "header not readable"),
        (tmp_path / "none", "not readable"),
    ):
        found = located(read_metadata(file))
        assert reason in found["reason"]
        assert (
            found["position_kind"]
            is found["latitude"]
            is found["camera_latitude"]
            is found["time"]
            is None
        )


def test_damaged_exif_gives_a_place_on_earth_or_none(tmp_path: Path) -> None:
    whole = exif_of(GPS, FOCAL_TAGS).tobytes()
    rng = np.random.default_rng(1)
    for number in range(30):
        damaged = bytearray(whole)
        damaged[10 + number :: 7] = rng.bytes(len(damaged[10 + number :: 7]))
        file = tmp_path / "a.jpg"
        Image.new("RGB", (60, 40)).save(file, exif=bytes(damaged))
        found = located(read_metadata(file))
        assert found["reason"]
        # the damage spared it, or changed it to another place on Earth
        if found["camera_latitude"] is not None:
            assert abs(found["camera_latitude"]) <= 90
            assert abs(found["camera_longitude"]) <= 180


@pytest.mark.parametrize(
    "gps",
    [
        {**GPS, 2: (0.0, 0.0, 0.0), 4: (0.0, 0.0, 0.0)},
        {**GPS, 2: (91.0, 0.0, 0.0)},
        {**GPS, 1: "X"},
        {},
    ],
)
def test_an_impossible_position_is_none(gps: dict[int, Any], tmp_path: Path) -> None:
    photo = read_metadata(write_photo(tmp_path / "a.jpg", exif=exif_of(gps), xmp=None))
    assert photo.position is None
    assert located(photo)["reason"] == "no position in EXIF or XMP"
    assert PhotoMetadata(gps={**GPS, 2: (0.0, 0.0, 0.0)}).position == (0.0, -70.5), "on the equator"


def test_a_receiver_without_a_fix_has_no_position_but_the_bearing_stays() -> None:
    found = located(metadata(GpsStatus="Invalid", GimbalPitchDegree="-40", GimbalYawDegree="-90"))
    assert found["position_kind"] is None
    assert found["bearing_deg"] == pytest.approx(270)


@pytest.mark.parametrize(
    ("flag", "sigma_m"),
    [
        *(("50", 0.05), ("32", 0.5), ("49", 0.5), ("31", 10.0), ("17", 10.0)),
        *(("16", 2.0), ("0", 5.0), (None, 5.0), ("x", 5.0)),
    ],
)
def test_the_rtk_flag_gives_the_positions_standard_deviation(
    flag: str | None, sigma_m: float
) -> None:
    photo = metadata(RtkFlag=flag)
    assert photo.position_sigma_m == sigma_m
    found = located(photo)
    assert found["camera_sigma_m"] == sigma_m
    assert found["sigma_m"] >= sigma_m


def test_relative_altitude_is_above_the_take_off_point_and_not_above_the_ground() -> None:
    edge = np.array([300.0, 0.0])  # 0.4 m ahead for each metre of height
    assert located(metadata(), point=edge)["distance_m"] == pytest.approx(20, abs=0.01)
    assert located(metadata(), Site(ground_height_m=20), edge)["distance_m"] == pytest.approx(
        12, abs=0.01
    )
    assert located(metadata(), Site(ground_height_m=-20), edge)["distance_m"] == pytest.approx(
        28, abs=0.01
    )
    below = located(metadata(), Site(ground_height_m=50), edge)
    assert (below["position_kind"], below["reason"]) == (
        "camera",
        "camera not above the ground height",
    )


def test_an_unknown_height_of_the_object_grows_sigma_by_the_cotangent_of_the_depression() -> None:
    photo = metadata(GimbalPitchDegree="-30")
    sigmas = [located(photo, Site(ground_sigma_m=sigma_m))["sigma_m"] for sigma_m in (0, 12)]
    added = np.sqrt(sigmas[1] ** 2 - sigmas[0] ** 2)
    assert added == pytest.approx(12 / np.tan(np.radians(30)), rel=0.01)


def test_the_altitudes_zero_is_the_ellipsoid_only_with_rtk_and_a_misspelt_longitude_is_read() -> (
    None
):
    assert metadata(GpsLongitude=None, GpsLongtitude="8.5417").position == HOME
    assert metadata().altitude_reference == "unknown"
    altitudes = [
        PhotoMetadata(gps={**GPS, ALTITUDE_REF: of}).altitude_m for of in (b"\0", 0, b"\1", 1)
    ]
    assert altitudes == [80.5, 80.5, -80.5, -80.5], "above and below the sea"
    assert metadata(AltitudeType="RtkAlt").altitude_reference == "ellipsoid"
    assert metadata(AbsoluteAltitude=None).altitude_reference is None


@pytest.mark.parametrize(("pitch", "kind"), [("-14.9", "camera"), ("-15.1", "ground")])
def test_a_gimbal_pitch_above_minus_15_degrees_gives_the_camera_and_a_bearing_only(
    pitch: str, kind: str
) -> None:
    found = located(
        metadata(GimbalPitchDegree=pitch, GimbalYawDegree="33"), point=np.array([300.0, 390.0])
    )
    assert (found["position_kind"], found["bearing_deg"]) == (kind, pytest.approx(33, abs=0.01))


def test_a_line_of_sight_near_the_horizon_gives_the_camera_although_the_gimbal_looks_down() -> None:
    found = located(metadata(GimbalPitchDegree="-30"), point=np.array([300.0, 20.0]))
    assert found["depression_deg"] == pytest.approx(10.2, abs=0.1)
    assert (found["position_kind"], found["bearing_deg"]) == ("camera", pytest.approx(0, abs=0.01))
    assert found["reason"] == "line of sight less than 15 degrees below the horizon"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"GimbalRollDegree": None}, "no GimbalRollDegree in XMP"),
        # the aircraft's never stands in for it
        ({"GimbalYawDegree": None}, "no GimbalYawDegree in XMP"),
        ({"GimbalPitchDegree": "nan"}, "no GimbalPitchDegree in XMP"),
        ({"GimbalPitchDegree": "1e1"}, "no GimbalPitchDegree in XMP"),
        ({"GimbalYawDegree": "9" * 9}, "no GimbalYawDegree in XMP"),
        ({"RelativeAltitude": None}, "no RelativeAltitude in XMP"),
        ({"CalibratedFocalLength": None}, "no CalibratedFocalLength in XMP and no 35 mm"),
        ({"CamReverse": "1"}, "upside down"),
        ({"GimbalReverse": "1"}, "upside down"),
        ({"GimbalPitchDegree": "-14.9"}, "gimbal pitch above -15 degrees"),
        ({"GimbalPitchDegree": "12"}, "gimbal pitch above -15 degrees"),
        ({"CalibratedOpticalCenterY": "300.0"}, "cropped or rotated"),
    ],
)
def test_a_missing_or_doubtful_field_leaves_the_cameras_position(
    changes: dict[str, Any], reason: str
) -> None:
    found = located(metadata(**changes))
    assert found["position_kind"] == "camera"
    assert (found["latitude"], found["longitude"]) == HOME
    assert found["sigma_m"] is found["ground_latitude"] is None
    assert reason in found["reason"]


def test_gimbal_angles_are_those_of_djis_maker_note_where_xmp_is_lost(tmp_path: Path) -> None:
    entries = [
        struct.pack("<HHIf", tag, 11, 1, value)
        for tag, value in ((6, 1.5), (9, -75.0), (10, 89.5), (11, 0.5))
    ]
    note = b"\5\0" + struct.pack("<HHI4s", 1, 2, 4, b"DJI") + b"".join(entries)
    for data, angles in (
        (note, (89.5, -75.0, 0.5)),
        (note[:-1], None),
        (note.replace(b"DJI", b"HAL"), None),
    ):
        file = write_photo(
            tmp_path / "a.jpg", exif=exif_of(GPS, {**FOCAL_TAGS, MAKER_NOTE: data}), xmp=None
        )
        assert read_metadata(file).gimbal_deg == angles
    both = PhotoMetadata(600, 400, exif={MAKER_NOTE: note}, dji=DJI)
    assert both.gimbal_deg == (0, -90, 0)


TAKEN = {EXIF_TIME_TAG: "2016:06:23 16:32:43"}


@pytest.mark.parametrize(
    ("exif", "fields", "program"),
    [
        (
            {SOFTWARE: "Microsoft Windows Photo Viewer 10.0.10240.16384"},
            {},
            "Microsoft Windows Photo Viewer",
        ),
        (
            {},
            {"CreatorTool": "Microsoft Windows Photo Viewer 10.0.10240.16384"},
            "Microsoft Windows Photo Viewer",
        ),
        (
            {**TAKEN, TIME_WRITTEN: "2016:06:23 19:24:38"},
            {},
            "an unknown program at 2016-06-23 19:24:38",
        ),
        # two time zones
        ({**TAKEN, TIME_WRITTEN: "2016:06:23 18:32:44", SOFTWARE: "v01.23.4920     \0"}, {}, None),
        (
            {**TAKEN, TIME_WRITTEN: "2016:06:23 16:32:43", SOFTWARE: "10.00.12.07"},
            {"CreatorTool": "DJI"},
            None,
        ),
    ],
)
def test_a_photograph_that_a_viewer_wrote_again_and_may_have_turned_has_no_direction(
    exif: dict[int, str], fields: dict[str, str], program: str | None, tmp_path: Path
) -> None:
    block = exif_of(GPS, exif)
    block.update({tag: exif[tag] for tag in (SOFTWARE, TIME_WRITTEN) if tag in exif})
    packet = xmp_of({**DJI, **fields})
    for _ in fields:
        packet = packet.replace(
            b"drone-dji:CreatorTool", b'xmlns:x="http://ns.adobe.com/xap/1.0/" x:CreatorTool'
        )
    photo = read_metadata(write_photo(tmp_path / "a.jpg", exif=block, xmp=packet))
    assert photo.position == HOME
    if program is None:
        assert photo.direction_problem is None
    else:
        assert f"written again by {program}" in str(located(photo)["reason"])


@pytest.mark.parametrize("flight", [None, "+179.90", "+0.00"])
@pytest.mark.parametrize("angles", [("+0.00", "+0.00", "+0.00"), ("0", "-0.00", "0.0")])
def test_gimbal_angles_that_are_all_zero_are_no_direction(
    angles: tuple[str, ...], flight: str | None
) -> None:
    photo = metadata(**dict(zip(GIMBAL_FIELDS, angles, strict=True)), FlightYawDegree=flight)  # type: ignore[arg-type]
    found = located(photo)
    assert (found["position_kind"], found["bearing_deg"], found["ground_latitude"]) == (
        "camera",
        None,
        None,
    )
    assert "are all 0" in found["reason"]
    assert view_of(photo, {"file": "a.jpg", "width": 600, "height": 400, "detections": []}) is None
    north = metadata(GimbalYawDegree="0", GimbalRollDegree="0", FlightYawDegree=flight)
    assert located(north)["position_kind"] == "ground"


def test_a_shrunk_photograph_that_kept_its_metadata_has_the_shrunk_focal_length() -> None:
    assert metadata(size=(300, 200)).focal_px == (250, 2.5)
    without_centre = {"CalibratedOpticalCenterX": None, "CalibratedOpticalCenterY": None}
    photo = PhotoMetadata(300, 200, exif={WIDTH: 600, HEIGHT: 400}, dji=dji(**without_centre))
    assert photo.focal_px == (250, 2.5)


@pytest.mark.parametrize(
    ("size", "focal_mm", "equivalent_mm", "focal_px"),
    [
        ((4000, 2250), 3.61, 20, 2311),  # Phantom 3 at 16:9, cropped from 4:3
        ((4000, 2250), None, 20, 2311),
        ((4000, 3000), 3.61, 20, 2311),
        ((5472, 3078), 8.8, 24, 3648),  # Phantom 4 Pro, one inch: cropped from 3:2
        ((4864, 3648), 8.8, 24, 3648),
        ((3648, 5472), 8.8, 24, 3648),
    ],
)
def test_a_photograph_cropped_to_another_shape_has_the_focal_length_of_its_whole_sensor(
    size: tuple[int, int], focal_mm: float | None, equivalent_mm: int, focal_px: float
) -> None:
    photo = PhotoMetadata(
        *size, exif={FOCAL_LENGTH_MM: focal_mm, FOCAL_LENGTH_35_MM: equivalent_mm}
    )
    assert photo.focal_px == pytest.approx((focal_px, 0.03 * focal_px), rel=1e-3)


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({DIGITAL_ZOOM: 2.0}, "digital zoom"),
        ({0xA405: 60}, "contradict each other"),
        ({0xA405: 31}, None),
    ],
)
def test_zoom_and_contradicting_focal_lengths_leave_the_direction_unknown(
    tags: dict[int, Any], reason: str
) -> None:
    problem = PhotoMetadata(600, 400, exif=tags, dji=DJI).direction_problem
    assert problem is None if reason is None else reason in str(problem)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_those_of_the_stored_frame_in_each_orientation_and_when_decoded_smaller(
    orientation: int, tmp_path: Path
) -> None:
    """The gimbal's angles hold for the frame as stored, detections are found in the upright, shrunk
    picture.
    """
    stored = np.zeros((400, 600, 3), np.uint8)
    stored[80:112, 440:488] = 255  # centre (464, 96)
    file = write_photo(tmp_path / "a.jpg", stored, exif=exif_of(orientation=orientation))
    photo = read_metadata(file)
    assert photo.orientation == orientation
    for upright in (decode_image(file.read_bytes()), read_image(file, min_long_side_px=100)):
        rows, columns = np.nonzero(upright[..., 0] > 127)
        centre = np.array([[columns.mean() + 0.5, rows.mean() + 0.5]])
        height, width = upright.shape[:2]
        assert (width < height) == (orientation >= 5)
        assert stored_pixels(centre, width, height, photo)[0] == pytest.approx((464, 96), abs=0.5)


LENS = "2018-09-04;500.0,505.0,6.0,-4.0,-0.42,0.2,0.001,-0.002,-0.05"


@pytest.mark.parametrize("size", [(600, 400), (300, 200)])
@pytest.mark.parametrize("flag", ["0", "1"])
def test_a_point_far_from_the_middle_is_where_djis_lens_data_say(
    size: tuple[int, int], flag: str
) -> None:
    """OpenCV projects points of the ground; DewarpFlag 1 says that the drone has corrected the
    photograph.
    """
    ground = np.array([[0.5, -0.3, 1.0], [-0.55, 0.35, 1.0], [0.01, 0.02, 1.0]])
    camera = np.array([[500.0, 0, 306], [0, 505.0, 196], [0, 0, 1]])
    bent = cv2.projectPoints(
        ground, np.zeros(3), np.zeros(3), camera, np.array([-0.42, 0.2, 0.001, -0.002, -0.05])
    )[0]
    photo = metadata(size=size, DewarpData=LENS, DewarpFlag=flag)
    found = stored_pixels(bent[:, 0] * size[0] / 600, *size, photo) * 600 / size[0]
    straight = 500 * ground[:, :2] + (300, 200)
    assert np.allclose(found, straight, atol=0.02) == (flag == "0")
    assert np.allclose(found, bent[:, 0], atol=0.02) == (flag == "1")


@pytest.mark.parametrize(
    "data",
    [
        "",
        "2018",
        LENS[:-6],
        LENS.replace("500.0", "0"),
        LENS.replace("0.42", "90"),
        "x;" + "9," * 9,
    ],
)
def test_damaged_lens_data_move_no_point_out_of_the_world(data: str) -> None:
    corners = np.array([[0.0, 0], [600, 400], [300, 200]])
    found = stored_pixels(corners, 600, 400, metadata(DewarpData=data))
    assert np.abs(found - corners).max() < 600


# --- The XMP reader on what drones write and on what attackers write ------------------------------


LONG = {"SelfData": "x" * 5000, "RtkFlag": "50"}


@pytest.mark.parametrize("as_elements", [False, True])
@pytest.mark.parametrize(
    ("fields", "namespace", "expected"),
    [(DJI, "dji", DJI), (DJI, "other", {}), (LONG, "dji", {"RtkFlag": "50"})],
)
def test_djis_short_fields_are_read_from_attributes_and_elements(
    fields: dict[str, str], namespace: str, expected: dict[str, str], as_elements: bool
) -> None:
    elements = "".join(
        f"<drone-dji:{name}>{value}</drone-dji:{name}>" for name, value in fields.items()
    )
    data = (
        xmp_of({}).replace(b"></rdf", f">{elements}</rdf".encode(), 1)
        if as_elements
        else xmp_of(fields)
    )
    data = data.replace(b"www.dji", f"www.{namespace}".encode())
    assert read_dji_fields(data + b"\0\0 \n") == expected


@pytest.mark.parametrize(
    "name", ["http://www.dji.com/drone-dji/1.0/", "http://www.dji.com/", "http://www.dji.com"]
)
def test_a_packet_with_djis_namespace_declared_twice_or_short_is_read(name: str) -> None:
    data = xmp_of(DJI).replace(b"drone-dji:", b"DJI:").replace(b":drone-dji=", b":DJI=")
    data = data.replace(b"http://www.dji.com/drone-dji/1.0/", name.encode())
    twice = f'<rdf:Description xmlns:DJI="{name}"'.encode()
    assert read_dji_fields(data.replace(b"<rdf:Description", twice)) == DJI
    assert (
        read_dji_fields(data.replace(b'="500.00"', b'="500.00" DJI:CalibratedFocalLength="7"'))
        == DJI
    )


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
            read_dji_fields(
                xmp_of({"RtkFlag": value}).replace(b"<x:", entities(secret)[kind].encode() + b"<x:")
            )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<x>" + b" " * MAX_PACKET_BYTES + b"</x>", "longer than"),
        (b"<x>" * (MAX_DEPTH + 1) + b"</x>" * (MAX_DEPTH + 1), "nested deeper"),
        (b"<x>" * 20_000, "nested deeper"),
        (xmp_of({"RtkFlag": "&e;"}), "not well-formed"),
        (xmp_of({"RtkFlag": "5"})[:-60], "not well-formed"),
        (xmp_of({"RtkFlag": "5"}).replace(b'"5"', b'"\xff\xfe"'), "not well-formed"),
        (xmp_of({"RtkFlag": "5"}).decode().encode("utf-16"), "not well-formed"),
        (b'<?xml version="1.0" encoding="utf-16"?><x>\xe9</x>', "not well-formed"),
        (b'<?xml version="1.0" encoding="ISO-8859-1"?><x>\xe9</x>', "not well-formed"),
        (b"no XML", "not well-formed"),
        (b"", "not well-formed"),
        (xmp_of({f"F{number}": "1" for number in range(501)}), "more than 500 fields"),
    ],
)
def test_a_hostile_packet_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(XmpError, match=reason) as caught:
        read_dji_fields(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120
