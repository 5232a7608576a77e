"""Requests of plain clients: a JPEG or PNG file as the body, or several of them in a form."""

from collections.abc import Iterator, Mapping
from email.message import Message

from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.http.protocol import (
    ON_DEMAND,
    OUTPUTS,
    InferRequest,
    RequestedOutput,
    Signature,
    shown,
    with_files,
)

FORM = "multipart/form-data"
MAGIC = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png"}  # how files begin
FILES = tuple(MAGIC.values())
FIELDS = {  # of a form, or of the address
    "camera": "Name of the camera.",
    "adapt": "false: answer these images, learn nothing from them.",
    "timeout": "Longest wait in the queue, in microseconds.",
    "id": "Comes back with the answer.",
}
LONGEST_HEADER, LONGEST_FIELD = 4096, 4096  # bytes of a part
_ANSWERS = tuple(RequestedOutput(name, binary=False) for name in (*OUTPUTS, *ON_DEMAND))


def is_plain(content_type: str) -> bool:
    """Whether a request is of this kind, and not of the Open Inference Protocol.

    >>> is_plain("image/png"), is_plain("multipart/form-data; boundary=x"), is_plain("application/json")
    (True, True, False)
    """
    kind = _kind(content_type)
    return kind == FORM or kind.startswith("image/")


def recognised(body: bytes | bytearray, content_type: str) -> str:
    """The content type of a body, which for an image file need not be given: curl gives that of a form.

    >>> recognised(bytes.fromhex("ffd8ffe0"), "application/x-www-form-urlencoded"), recognised(b"{}", "")
    ('image/jpeg', '')
    """
    if is_plain(content_type):
        return content_type
    return next((kind for beginning, kind in MAGIC.items() if body.startswith(beginning)), content_type)


def read_plain(body: bytearray, content_type: str, query: Mapping[str, str], signature: Signature) -> InferRequest:
    """The request in a body that is an image file or a form; `query` holds the parameters of its address."""
    given = {name: value for name, value in query.items() if name in FIELDS}
    if unknown := sorted(query.keys() - FIELDS.keys()):
        raise bad_request(f"no parameter {shown(unknown[0])}; choose from: {', '.join(FIELDS)}")
    kind = _kind(content_type)
    files: list[memoryview] = []
    if kind == FORM:
        for name, is_file, content in _parts(body, content_type, signature.max_images + len(FIELDS)):
            if is_file:
                files.append(content)
            elif name in FIELDS:
                given[name] = _field(name, content)
            else:
                raise bad_request(f"no field {shown(name)}; choose from: {', '.join(FIELDS)}, and files")
    elif kind in FILES:
        files = [memoryview(body)]
    else:
        raise ServeError(415, f"expected {' or '.join(FILES)}, but got {shown(kind)}")
    if not 1 <= len(files) <= signature.max_images:
        raise bad_request(
            f"expected 1 to {signature.max_images} images a request (max_batch_size), but got {len(files)}"
        )
    return with_files(tuple(files), _typed(given), _ANSWERS)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _typed(given: Mapping[str, str]) -> dict[str, object]:
    """The values of texts, where they stand for something else; others are left for the protocol to refuse."""
    values: dict[str, object] = dict(given)
    if given.get("adapt") in ("true", "false"):
        values["adapt"] = given["adapt"] == "true"
    timeout = given.get("timeout", "")
    if timeout.isascii() and timeout.isdigit() and len(timeout) < 20:
        values["timeout"] = int(timeout)
    return values


def _field(name: str, content: memoryview) -> str:
    if len(content) > LONGEST_FIELD:
        raise bad_request(f"expected the field {name} to have at most {LONGEST_FIELD} bytes, but got {len(content)}")
    try:
        return bytes(content).decode("utf-8")
    except UnicodeDecodeError:
        raise bad_request(f"expected the field {name} to be a text in UTF-8") from None


def _parts(body: bytearray, content_type: str, most: int) -> Iterator[tuple[str, bool, memoryview]]:
    """Name, whether it is a file, and content of each part of a form (RFC 7578)."""
    boundary = _parameter(content_type, "content-type", "boundary")
    if not boundary or len(boundary) > 70:
        raise bad_request("expected Content-Type: multipart/form-data with a boundary of 1 to 70 characters")
    line = b"--" + boundary.encode("utf-8", "replace")
    start = 0 if body.startswith(line) else body.find(b"\r\n" + line) + 2
    if not body.startswith(line, start):
        raise bad_request("expected a form, but its boundary is nowhere in the body")
    view = memoryview(body)
    for _ in range(most + 1):
        start += len(line)
        if body.startswith(b"--", start):
            return
        end = body.find(b"\r\n" + line, start)
        head = body.find(b"\r\n\r\n", start, start + LONGEST_HEADER)
        if end < 0 or not 0 <= head <= end:
            raise bad_request("expected a whole form, but a part of it has no header or no end")
        yield *_described(bytes(view[start:head])), view[head + 4 : end]
        start = end + 2
    raise bad_request(f"expected a form of at most {most} parts, but got more")


def _described(header: bytes) -> tuple[str, bool]:
    """Name of a part, and whether it is a file."""
    lines = [line.partition(":") for line in header.decode("utf-8", "replace").split("\r\n")]
    headers = {name.strip().lower(): value.strip() for name, _, value in lines}
    disposition = headers.get("content-disposition", "")
    name = _parameter(disposition, "content-disposition", "name")
    is_file = bool(_parameter(disposition, "content-disposition", "filename"))
    return name, is_file or headers.get("content-type", "").lower().startswith("image/")


def _parameter(value: str, header: str, name: str) -> str:
    message = Message()
    message[header] = "".join(letter for letter in value if letter.isprintable())
    found = message.get_param(name, "", header)
    return found if isinstance(found, str) else ""
