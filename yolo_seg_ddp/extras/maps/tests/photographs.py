"""What photographs with the metadata of a drone tell."""

from tests.support.drone_photos import SIZE, dji
from yolo_seg_ddp.extras.maps.metadata import FOCAL_LENGTH_35_MM, PhotoMetadata

FOCAL_TAGS = {FOCAL_LENGTH_35_MM: 30}


def metadata(
    *, size: tuple[int, int] = SIZE, orientation: int = 1, **changes: str | None
) -> PhotoMetadata:
    """Return what a photograph with DJI's fields tells."""
    return PhotoMetadata(*size, orientation=orientation, dji=dji(**changes))
