"""Values on disk: safetensors files with a kind, a version and a checksum, written atomically.

safetensors cannot execute code and notices a truncated file, but not a flipped bit: so every file also holds a
SHA-256 of its own content.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

HEADER = "cafe-tta"  # where a file says what it is


class StorageError(ValueError):
    """A file cannot be used: it is missing, damaged, of another kind or of another version."""


def write(path: str | os.PathLike[str], kind: str, version: int, tensors: Mapping[str, Tensor], meta: Any) -> int:
    """Writes tensors and JSON metadata to `path` all at once, and returns the size in bytes.

    A crash at any moment leaves either the old file or the new one, never a half of each.
    """
    content = pack(kind, version, tensors, meta)
    write_bytes(path, content)
    return len(content)


def pack(kind: str, version: int, tensors: Mapping[str, Tensor], meta: Any) -> bytes:
    """The content of a file of tensors and JSON metadata."""
    # safetensors refuses tensors that share memory or have gaps: every tensor gets memory of its own.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(meta, sort_keys=True)
    header = {"kind": kind, "version": version, "meta": text, "sha256": checksum(plain, kind, version, text)}
    # One value, because safetensors writes several in random order: the same content makes the same file.
    return bytes(safetensors.torch.save(plain, metadata={HEADER: json.dumps(header)}))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces the file at `path` by `content` atomically, and waits until it is on disk."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files; these are ordinary ones
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name must survive a power cut too
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Tensor], Any]:
    """Tensors and metadata of a file that `write` made, or an error that says why it cannot be used."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected {_article(kind)} file")
    with _opened(path) as file:
        header = _header(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return tensors, _checked(str(path), tensors, header, kind, version)


def unpack(content: bytes, kind: str, version: int, name: str) -> tuple[dict[str, Tensor], Any]:
    """Tensors and metadata of what `pack` made; `name` says in errors where it comes from.

    >>> content = pack("greeting", 1, {"hello": torch.ones(2)}, {"to": "the world"})
    >>> unpack(content, "greeting", 1, "the post")
    ({'hello': tensor([1., 1.])}, {'to': 'the world'})
    """
    try:
        tensors = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")  # of the JSON that describes the tensors, which was read above
        described = json.loads(content[8 : 8 + length])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{name} is not whole: no safetensors can be read from it ({error})") from error
    return tensors, _checked(name, tensors, _header(described.get("__metadata__")), kind, version)


def _checked(name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: str, version: int) -> Any:
    """The metadata in the header of a file, once its kind, version and checksum are as expected."""
    if header.get("kind") != kind:
        held = repr(header["kind"]) if "kind" in header else "no kind at all (a file of plain weights?)"
        raise StorageError(f"{name}: expected {_article(kind)} file, but it holds {held}")
    if header.get("version") != version:
        raise StorageError(
            f"{name}: {kind} format version {header.get('version')}, but this release reads version {version}; "
            "make the file again with this release"
        )
    if header.get("sha256") != checksum(tensors, kind, version, header.get("meta", "")):
        raise StorageError(f"{name} is damaged: its content does not match its checksum; restore or make it again")
    return json.loads(header["meta"])


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of a file that `write` made; empty for other safetensors files."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    with _opened(path) as file:
        return str(_header(file.metadata()).get("kind", ""))


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], words: Mapping[str, str] | None = None) -> str:
    """How two sets of settings differ, in words; empty where they do not. `words` replace the text for a name.

    >>> differences({"lr": 0.1, "model": {"size": 32}}, {"lr": 0.2, "model": {"size": 64}})
    'lr=0.1 there, 0.2 here; model.size=32 there, 64 here'
    """
    there, here = flat(theirs), flat(json.loads(json.dumps(ours)))  # as it looks when it comes from a file
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    texts = [f"{name}={there.get(name)!r} there, {here.get(name)!r} here" for name in names]
    return "; ".join((words or {}).get(name, text) for name, text in zip(names, texts, strict=True))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level.

    >>> flat({"lr": 0.1, "model": {"size": 32}})
    {'lr': 0.1, 'model.size': 32}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def tensor_digest(tensor: Tensor) -> str:
    """A short hash of a tensor's shape and values, the same for every device and floating-point width."""
    values = tensor.detach().cpu()
    if values.is_floating_point():
        values = values.float()  # a classifier moved by .double() is still the same classifier
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    digest.update(_bytes(values))
    return digest.hexdigest()[:16]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} is not a whole safetensors file ({error}); restore or make it again") from error


def _header(metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {}).get(HEADER, "{}"))
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def checksum(tensors: Mapping[str, Tensor], kind: str = "", version: int = 0, text: str = "") -> str:
    """A hash of names, shapes and bits of tensors, on the CPU, and of what they are."""
    digest = hashlib.sha256(f"{kind}\0{version}\0{text}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
