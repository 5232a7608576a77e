"""Request bodies: limited in size, in time and in the memory of all together; compressed ones are unpacked."""

import asyncio
import contextlib
import zlib
from collections.abc import Callable

from starlette.requests import Request

from cafe_tta.serve.http.middleware import ServeError

_ENCODINGS = ("gzip", "x-gzip", "deflate")
_DISCARD_SECONDS = 2.0  # to let a client finish sending before it is refused: else it may not read the refusal


class PendingBytes:
    """The number of bytes that all requests together hold. Each of `models` models may hold an equal part of them."""

    def __init__(self, limit: int, models: int = 1) -> None:
        self.limit, self.models = limit, models
        self.held = 0

    @property
    def part(self) -> int:
        return self.limit // self.models


class ModelBytes:
    """The number of bytes that the requests to one model hold."""

    def __init__(self, pool: PendingBytes) -> None:
        self._pool = pool
        self.held = 0

    def take(self, count: int) -> None:
        pool = self._pool
        # Where models were added, others may still hold more than their part.
        if self.held + count > pool.part or pool.held + count > pool.limit:
            whose = "" if pool.models == 1 else f", the part of this model among {pool.models}"
            raise ServeError(
                429,
                f"the requests at hand take {pool.part} bytes already (max_pending_bytes{whose})",
                retry_after=1,
            )
        self.held += count
        pool.held += count

    def release(self, count: int) -> None:
        self.held -= count
        self._pool.held -= count


class Lease:
    """The bytes of one request, released at its end."""

    def __init__(self, pending: ModelBytes) -> None:
        self._pending = pending
        self._count = 0

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.release(self._count)

    def grow_to(self, count: int) -> None:
        if count > self._count:
            self._pending.take(count - self._count)
            self._count = count


async def read_body(
    request: Request, lease: Lease, limit: int, timeout: float, admit: Callable[[], None] = lambda: None
) -> bytearray:
    """The body, unpacked. `admit` may refuse the request before its body is read."""
    reader = _Reader(request)
    try:
        async with asyncio.timeout(timeout):
            try:
                admit()
                body = await _receive(reader, lease, limit)
            except ServeError as error:
                await reader.discard(4 * limit)
                error.close = not reader.finished
                raise
    except TimeoutError:
        raise ServeError(408, f"the body did not arrive within {timeout:g} s", close=True) from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _ENCODINGS:
        raise ServeError(415, f"expected Content-Encoding to be gzip, deflate or identity, but got {encoding[:40]!r}")
    return await asyncio.to_thread(unpack, bytes(body), limit, lease)


class _Reader:
    """The body of a request, piece by piece."""

    def __init__(self, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        self.announced = int(announced) if announced.isdigit() and len(announced) < 20 else 0
        self.finished = False
        self._receive = request.receive

    async def piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.finished = True
            raise ServeError(400, "the client went away")
        self.finished = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def discard(self, most: int) -> None:
        """Reads and discards the rest, for a limited time."""
        with contextlib.suppress(TimeoutError, ServeError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self.finished and most > 0:
                    most -= len(await self.piece())


async def _receive(reader: _Reader, lease: Lease, limit: int) -> bytearray:
    _check_size(reader.announced, limit)
    lease.grow_to(reader.announced)
    body = bytearray()
    while not reader.finished:
        piece = await reader.piece()
        _check_size(len(body) + len(piece), limit)
        lease.grow_to(len(body) + len(piece))
        body += piece
    return body


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ServeError(413, f"expected a body of at most {limit} bytes (max_body_bytes), but got {size} or more")


def unpack(packed: bytes, limit: int, lease: Lease) -> bytearray:
    """gzip or deflate, of one part or several. Stops at the limit: a bomb is never unpacked."""
    body = bytearray()
    while packed:
        part = zlib.decompressobj(wbits=47)  # either, by its first bytes
        try:
            while not part.eof:
                piece = part.decompress(packed, min(2**20, limit + 1 - len(body)))
                if not piece and not part.eof:
                    raise ServeError(400, "the compressed body ends too early")
                body += piece
                if len(body) > limit:
                    raise ServeError(413, f"expected at most {limit} bytes (max_body_bytes) after unpacking")
                lease.grow_to(len(body))
                packed = part.unconsumed_tail
        except zlib.error as error:
            raise ServeError(400, f"the body cannot be unpacked: {error}") from None
        packed = part.unused_data
    return body


def pack(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """The body, compressed if it is large and the client's Accept-Encoding allows it; and the encoding."""
    if len(body) < 1024:
        return body, None
    wanted = {part.split(";")[0].strip().lower() for part in accepted.split(",") if not _refused(part)}
    for encoding, bits in (("gzip", 31), ("deflate", 15)):
        if encoding in wanted:
            packer = zlib.compressobj(1, zlib.DEFLATED, bits)
            return packer.compress(body) + packer.flush(), encoding
    return body, None


def _refused(part: str) -> bool:
    quality = part.partition("q=")[2].strip()
    return quality != "" and quality.rstrip("0") in ("", ".", "0.")
