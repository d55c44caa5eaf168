"""The ranks' output, tagged line by line on the agent's own stdout and stderr.

`[rank 3] epoch 1` for jobs of several ranks; a job of one rank writes through untagged, so that `kubectl logs` shows
exactly what the script printed. A rank never waits for whoever reads the log: what does not fit is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections import deque

MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 20
TAIL_COLUMNS = 300
_CHUNK = MAX_LINE_BYTES  # at most one read beyond a partial line: only the first line of a chunk can be too long
_READS_PER_WAKE = 8  # then the loop's other work (heartbeats) has its turn
_BUFFER = 8 * 1024 * 1024
_PIPE = 1024 * 1024
_TAIL_BYTES = 32 * 1024
_QUIET = 2.0  # seconds after which an unfinished line (a progress bar) is shown as it stands
_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ exists since Python 3.10 only
# ECMA-48: control sequences (colours), operating system commands (titles, links), and what else moves a cursor or rings
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\x00-\x08\x0e-\x1f\x7f\x80-\x9f]"
)


class LogSink:
    """A writer to one output descriptor of the agent. A thread does the blocking writes: setting O_NONBLOCK instead
    would change the open file for every other process that shares it (a terminal, in laptop mode)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._written = 0  # bytes in all
        self._closed = False
        self._ready = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"log-{fd}", daemon=True)
        self._thread.start()

    def write(self, data: bytes, last: bool = False) -> bool:
        """Buffer data, without blocking. Return False when the buffer is full and the data was not taken; a `last` word
        always is."""
        with self._ready:
            if self._size + len(data) > _BUFFER and not last:
                return False
            self._pieces.append(data)
            self._size += len(data)
            if len(self._pieces) == 1:
                self._ready.notify()
            return True

    def close(self, timeout: float, deadline: float) -> None:
        """Wait for what is buffered, which ends with why a rank failed, but not for ever: nobody may be reading.

        Args:
            timeout: Seconds in which somebody must have read something.
            deadline: When (monotonic) a slow reader gets no more.
        """
        with self._ready:
            self._closed = True
            self._ready.notify()
        written = -1
        while self._thread.is_alive() and written != self._written:
            written = self._written
            self._thread.join(max(0.0, min(timeout, deadline - time.monotonic())))

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._pieces:
                    if self._closed:
                        return
                    self._ready.wait()
                batch = b"".join(self._pieces)
                self._pieces.clear()
            # Its size stays counted until written, else a blocked reader would cost two buffers.
            self._write(batch)
            with self._ready:
                self._size -= len(batch)

    def _write(self, data: bytes) -> None:
        view, start = memoryview(data), 0
        while start < len(data):
            # Whole lines: stdout and stderr may be one file, and the other thread writes in between.
            end = data.rfind(b"\n", start, start + 2 * _CHUNK) + 1 or start + _CHUNK
            try:
                count = os.write(self._fd, view[start:end])  # returns no sooner than all of it is read
                start += count
                self._written += count
            except BlockingIOError:  # somebody made our stdout non-blocking
                with contextlib.suppress(OSError):
                    _wait_writable(self._fd)
            except OSError:  # nobody will ever read this
                return


class LogStream:
    """A reader of one pipe of one process, which tags, forwards, and keeps the last lines."""

    def __init__(self, sink: LogSink, tag: str) -> None:
        self._sink = sink
        self._tag = tag.encode()
        self._loop = asyncio.get_running_loop()
        self._partial = b""
        self._tail = b""
        self._dropped = 0
        self.heard = 0.0  # the loop's time when something was last read
        self._flush_timer: asyncio.TimerHandle | None = None
        self._fd, self.inner = os.pipe()  # `inner` is for the child; call `opened` once it has it
        with contextlib.suppress(OSError):  # more than a user's share of pipe memory: the default will do
            fcntl.fcntl(self._fd, _F_SETPIPE_SZ, _PIPE)
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._wake)

    def opened(self) -> None:
        """Close our copy of the child's end, or end-of-file would never come."""
        if self.inner >= 0:
            os.close(self.inner)
            self.inner = -1

    def drain(self) -> None:
        """Take what a process that just ended left in the pipe. Descendants may keep it open: there is no wait for the
        end."""
        for _ in range(4 * _PIPE // _CHUNK):
            if not self._read():
                break
        self._flush_partial()

    def tail(self) -> list[str]:
        lines = drop_control_codes((self._tail + self._partial).decode(errors="replace")).splitlines()
        return [line[:TAIL_COLUMNS] for line in lines if line.strip()][-TAIL_LINES:]

    def close(self) -> None:
        if self._fd >= 0:
            self.drain()
            self._notice(last=True)
            self._close()

    def _close(self) -> None:
        self.opened()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _wake(self) -> None:
        for _ in range(_READS_PER_WAKE):
            if not self._read():
                break
        if self._partial and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(_QUIET, self._quiet)

    def _quiet(self) -> None:
        """Forward an unfinished line once its pipe was silent all the while: a busy one ends in the middle of a line at
        almost any time. (One timer that looks again costs less than a new one at every read.)"""
        self._flush_timer = None
        wait = self.heard + _QUIET - self._loop.time()
        if wait <= 0:
            self._flush_partial()
        elif self._partial:
            self._flush_timer = self._loop.call_later(wait, self._quiet)

    def _read(self) -> bool:
        """Return whether there may be more at once."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _CHUNK)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR):
                self._end()
            return False
        if not data:
            self._end()
            return False
        self._feed(data)
        return len(data) == _CHUNK

    def _end(self) -> None:
        self._flush_partial()
        self._notice(last=True)
        self._close()

    def _feed(self, data: bytes) -> None:
        self.heard = self._loop.time()
        data = self._partial + data
        first = data.find(b"\n")
        if first > MAX_LINE_BYTES or (first < 0 and len(data) > MAX_LINE_BYTES):
            data = data[:MAX_LINE_BYTES] + b"\n" + data[MAX_LINE_BYTES:]
        end = data.rfind(b"\n") + 1
        self._partial = data[end:]
        if end:
            self._forward(data[:end])

    def _flush_partial(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._partial:
            partial, self._partial = self._partial, b""
            # Of a progress bar that rewrites its line, only the last state.
            self._forward(partial.rstrip(b"\r").rpartition(b"\r")[2] + b"\n")

    def _forward(self, lines: bytes) -> None:
        """Forward `lines`, which end with a newline."""
        self._tail = (self._tail + lines)[-_TAIL_BYTES:] if len(lines) < _TAIL_BYTES else lines[-_TAIL_BYTES:]
        if self._dropped and not self._notice():
            self._dropped += lines.count(b"\n")
            return
        tagged = lines
        if self._tag:
            tagged = self._tag + lines[:-1].replace(b"\n", b"\n" + self._tag) + b"\n"
        if not self._sink.write(tagged):
            self._dropped += lines.count(b"\n")

    def _notice(self, last: bool = False) -> bool:
        """Say how much is missing, where it is missing. Return False while there is no room even for that."""
        if self._dropped:
            text = f"… dropped {self._dropped} lines\n".encode()
            if not self._sink.write(self._tag + text, last):
                return False
            self._dropped = 0
        return True


class ProcessOutput:
    """stdout and stderr of one process."""

    def __init__(self, stdout: LogSink, stderr: LogSink, tag: str) -> None:
        self.stdout = LogStream(stdout, tag)
        self.stderr = LogStream(stderr, tag)

    def opened(self) -> None:
        self.stdout.opened()
        self.stderr.opened()

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of stderr; of stdout, when the process wrote no errors."""
        self.stdout.drain()
        self.stderr.drain()
        return tuple(self.stderr.tail() or self.stdout.tail())

    @property
    def pause(self) -> float:
        """Return the seconds since it last wrote what `tail` returns."""
        stream = self.stderr if self.stderr.tail() else self.stdout
        return asyncio.get_running_loop().time() - stream.heard

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


def make_rank_tag(rank: int, world_size: int) -> str:
    """Return what stands before each line of a rank."""
    return f"[rank {rank}] " if world_size > 1 else ""


def drop_control_codes(text: str) -> str:
    """Return `text` without colours and other words to a terminal: it goes into the job's status, and from there onto
    anybody's screen."""
    return _CONTROL.sub("", text)


def _wait_writable(fd: int) -> None:
    import select  # only here: this hardly ever happens

    poll = select.poll()  # select() knows no descriptor above 1,023
    poll.register(fd, select.POLLOUT)
    poll.poll(1000)
