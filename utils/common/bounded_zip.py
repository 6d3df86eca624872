"""Zip archives that nobody vouches for: bounds on their directory, and on what a member may unpack to."""

from __future__ import annotations

import zipfile

MAX_MEMBERS = 100_000
MAX_DIRECTORY_BYTES = 16_000_000  # 100,000 members have 15 MB; read, each byte of it takes ten
MAX_MEMBER_BYTES = 200_000_000  # EPRI's largest photographs are about 20 MB
MAX_RATIO = 200  # a JPEG shrinks by a few per cent; a bomb by a factor of 1,000


class TooManyMembers(zipfile.BadZipFile):
    """A directory that is not read. The message says how large it is."""


class BoundedZip(zipfile.ZipFile):
    """A zip whose directory is measured before it is read: a few bytes can claim millions of members.

    Raises TooManyMembers on opening.
    """

    def _RealGetContents(self) -> None:  # what ZipFile calls to read its directory
        end = zipfile._EndRecData(self.fp)  # type: ignore[attr-defined] # finds the same record as ZipFile will
        if end is not None:
            size_bytes, num_members = end[5], end[4]
            if size_bytes > MAX_DIRECTORY_BYTES or num_members > MAX_MEMBERS:
                raise TooManyMembers(f"{num_members:,} members in a directory of {size_bytes:,} bytes are too many")
        super()._RealGetContents()  # type: ignore[misc]


def is_bomb(member: zipfile.ZipInfo) -> bool:
    """Tell whether a member is too large, or shrinks too well, for a photograph."""
    return member.file_size > MAX_MEMBER_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1)
