"""Splits the bytes of an event stream into frames and comments, however the network cuts them (AIP 11.7).

Only CR, LF and CRLF end a line: a frame's text may hold any other character that some libraries take for a line end.
Every bound is counted in bytes, so that the same stream gives the same items and the same fault for any cutting.
"""

from __future__ import annotations

import codecs
import re

import msgspec

from domain.provider import Comment, RawFrame

MIB = 1024 * 1024
_LINE_END = re.compile(rb"[\r\n]")


class SseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds in bytes: one line without its end, one frame, and everything that a stream brings."""

    line: int = MIB
    frame: int = MIB
    stream: int = 64 * MIB


class SseSplitter:
    """Incremental splitter of one stream.

    A frame exists only after its blank line; ``raw`` holds its bytes from the first line that is no comment to the
    blank line. A block without ``event``, ``id`` or ``data`` is dropped, unless it is not UTF-8: then it is kept with
    ``fault="not_utf8"``. A bound that was crossed is named in ``fault``, and nothing after it is taken.
    """

    def __init__(self, limits: SseLimits | None = None) -> None:
        self.fault = ""
        self._limits = limits or SseLimits()
        self._received = 0
        self._pending = bytearray()  # the unfinished line
        self._scanned = 0  # how much of it is known to hold no line end
        self._started = False
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._raw = bytearray()
        self._event = b""
        self._id = b""
        self._data: list[bytes] = []
        self._named = False

    def feed(self, chunk: bytes) -> list[RawFrame | Comment]:
        """The items that these bytes complete."""
        if self.fault:
            return []
        room = self._limits.stream - self._received
        self._received += len(chunk)
        self._pending += chunk[:room]
        items, fault = self._split(closed=False)
        self.fault = fault or ("stream_too_large" if len(chunk) > room else "")
        return items

    def close(self) -> tuple[list[RawFrame | Comment], bytes]:
        """The items that only the end completes (after a last CR), and the bytes of a frame that never ended."""
        if self.fault:
            return [], b""
        items, self.fault = self._split(closed=True)
        return items, bytes(self._raw + self._pending)

    def _split(self, *, closed: bool) -> tuple[list[RawFrame | Comment], str]:
        items: list[RawFrame | Comment] = []
        if not self._started:
            if len(self._pending) < 3 and not closed and codecs.BOM_UTF8.startswith(self._pending):
                return items, ""
            self._started = True
            if self._pending.startswith(codecs.BOM_UTF8):
                del self._pending[:3]
        start, scan = 0, self._scanned
        while found := _LINE_END.search(self._pending, scan):
            end = after = found.start()
            if self._pending[end] == 0x0D:
                if end + 1 == len(self._pending) and not closed:
                    break  # a CR waits for its neighbour, which may be the LF of the same line end
                after += self._pending[end + 1 : end + 2] == b"\n"
            after += 1
            if fault := self._crossed(end - start):
                return items, fault
            if item := self._take_line(bytes(self._pending[start:end]), bytes(self._pending[end:after])):
                items.append(item)
            start = scan = after
        del self._pending[:start]
        self._scanned = found.start() - start if found else len(self._pending)
        return items, self._crossed(self._scanned)

    def _crossed(self, length: int) -> str:
        """The bound that a line of this length crosses first."""
        frame_room = self._limits.frame - len(self._raw)
        if length <= min(self._limits.line, frame_room):
            return ""
        return "line_too_large" if self._limits.line <= frame_room else "frame_too_large"

    def _take_line(self, line: bytes, ending: bytes) -> RawFrame | Comment | None:
        if line.startswith(b":"):
            if self._raw:
                self._raw += line + ending
            return Comment(line[1:].removeprefix(b" ").decode(errors="replace"))
        if not line and not self._raw:
            return None
        self._raw += line + ending
        if not line:
            return self._end_frame()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"event":
                self._event, self._named = value, True
            case b"id":
                self._id, self._named = value, True
            case b"data":
                self._data.append(value)
                self._named = True
        return None

    def _end_frame(self) -> RawFrame | None:
        frame: RawFrame | None = None
        raw = bytes(self._raw)
        try:
            raw.decode()
        except UnicodeDecodeError:
            frame = RawFrame(raw=raw, fault="not_utf8")
        else:
            if self._named:
                data = b"\n".join(self._data).decode()
                frame = RawFrame(raw=raw, event=self._event.decode(), id=self._id.decode(), data=data)
        self._begin_frame()
        return frame
