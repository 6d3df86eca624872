"""Zip files of strangers, read within bounds."""

import zipfile

MAX_MEMBERS = 100_000
# 100,000 members take 15 MB; parsed, each byte takes ten bytes of memory
MAX_DIRECTORY_BYTES = 16_000_000
MAX_MEMBER_BYTES = 200_000_000  # EPRI's largest photographs are about 20 MB
MAX_RATIO = 200  # a JPEG shrinks by a few per cent, a zip bomb by a factor of 1,000


class TooManyMembers(zipfile.BadZipFile):
    """The directory is too large to be read. The message says how large."""


class BoundedZip(zipfile.ZipFile):
    """A zip whose directory size is checked before it is read: a small file can claim millions of
    members.

    Raises TooManyMembers on opening.
    """

    def _RealGetContents(self) -> None:  # ZipFile calls this to read its directory
        # ZipFile finds the directory by the same call
        end = zipfile._EndRecData(self.fp)  # type: ignore[attr-defined]
        if end is not None:
            size_bytes, num_members = end[5], end[4]
            if size_bytes > MAX_DIRECTORY_BYTES or num_members > MAX_MEMBERS:
                raise TooManyMembers(
                    f"{num_members:,} members in a directory of {size_bytes:,} bytes are too many"
                )
        super()._RealGetContents()  # type: ignore[misc]


def is_bomb(member: zipfile.ZipInfo) -> bool:
    """Return whether a member is larger, or compressed more, than any photograph."""
    return member.file_size > MAX_MEMBER_BYTES or member.file_size > MAX_RATIO * max(
        member.compress_size, 1
    )
