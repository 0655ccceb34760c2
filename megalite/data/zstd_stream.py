"""A .zst file as a stream of its content; unlike zstandard's own reader it notices that a file was cut."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

READ_BYTES = 1 << 12  # compressed; one such piece unpacks to at most 128 MiB, 128 KiB for each 4 bytes
LARGEST_WINDOW = 1 << 31  # bytes of memory, if the file asks for them: `zstd --long=31` has no larger one


class ZstdStream(io.RawIOBase):
    """Reads frame after frame; raises EOFError when the file ends inside one."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._inside = False  # a frame has begun and not ended
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._content:
            if not self._compressed:
                self._compressed = self._file.read(READ_BYTES)
                if not self._compressed:
                    if self._inside:
                        raise EOFError("the file ends inside a compressed frame")
                    return 0
            self._content = memoryview(self._frame.decompress(self._compressed))
            self._inside = not self._frame.eof
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        count = min(len(target), len(self._content))
        target[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
