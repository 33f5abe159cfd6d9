"""Where versions lie: immutable blobs under their hashes, and one head that changes by compare-and-swap.

    FolderStore(path)              a local folder, shared memory or a network file system
    FsspecStore("s3://bucket/p")   any fsspec file system that can create a file exclusively (S3, GCS, local, memory)
    HttpStore("https://relay/w")   reading only, through an `rlloop serve relay|trainer` or any file server

A blob's hash is its name, so whoever fetches can check it, and nobody who passes it on has to be trusted.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from rlloop.errors import ConfigError, SyncError
from rlloop.sync.manifest import MAX_HEAD, MAX_MANIFEST, Refused, hash_of
from rlloop.web.clients import client

BLOCK = 1 << 20  # bytes that are handed on at a time


class StoreError(SyncError):
    """The store did not do what was asked: unreachable, full, or a blob that is not there. May be tried again."""


class Missing(StoreError):
    """No such blob: never published, or collected since."""


class Conflict(SyncError):
    """Somebody else has moved the head since it was read."""


class Store(Protocol):
    """Reading is `latest`, `get` and `has`; a publisher needs the rest."""

    def latest(self) -> bytes | None:
        """The head as it stands; None where nothing was ever published."""
        ...

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from `start` on, some at a time. Raises `StoreError`, perhaps half-way; not checked."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def put(self, blob: bytes) -> bytes:
        """Durable when it returns, under the hash that it returns."""
        ...

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        """Put `new` in the place of the head `expected` (None: there is none). Raises `Conflict`."""
        ...

    def blobs(self) -> Iterator[bytes]:
        """Hashes of all that is stored."""
        ...

    def delete(self, digest: bytes) -> None: ...

    def squash(self, sequence: int) -> bool:
        """Ask who publishes for one delta from the version of `sequence` to the newest. Whether the head has it now."""
        ...


def fetch(store: Store, digest: bytes, size: int | None = None, *, limit: int, attempts: int = 3) -> bytes:
    """A blob, whole and checked. A transfer that breaks goes on where it broke; a damaged one begins again.

    `size`: what it must have, where that is known; `limit`: bytes above which it is refused unread.
    Raises `StoreError` or `Refused`, after `attempts`.
    """
    bound = limit if size is None else min(size, limit)
    content, failure = bytearray(), SyncError("")
    for _ in range(attempts):
        try:
            for part in store.get(digest, len(content)):
                content += part
                if len(content) > bound:
                    raise Refused(f"blob {digest.hex()[:16]} is larger than {bound} bytes")
        except Missing:
            raise
        except StoreError as error:
            failure = error
            continue
        except Refused as error:
            failure, content = error, bytearray()
            continue
        if hash_of(content) == digest and (size is None or len(content) == size):
            return bytes(content)
        failure, content = Refused(f"blob {digest.hex()[:16]} arrived damaged ({len(content)} bytes)"), bytearray()
    raise failure


class FolderStore:
    """`path`/blobs/ab/abcd... and `path`/latest. Complete or absent, whatever kills the process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def latest(self) -> bytes | None:
        try:
            return (self.path / "latest").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:  # a network file system that is away, say: to be asked again
            raise StoreError(f"{self.path}: {error}") from error

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        try:
            with self._place(digest).open("rb") as file:
                file.seek(start)
                while part := file.read(BLOCK):
                    yield part
        except FileNotFoundError:
            raise Missing(f"{self.path} has no blob {digest.hex()}") from None
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def has(self, digest: bytes) -> bool:
        return self._place(digest).is_file()

    def put(self, blob: bytes) -> bytes:
        digest = hash_of(blob)
        if not self.has(digest):
            self._write(self._place(digest), blob)
        return digest

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if self.latest() != expected:
                    raise Conflict(f"{self.path}/latest was moved by another publisher")
                self._write(self.path / "latest", new)
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def blobs(self) -> Iterator[bytes]:
        for file in sorted((self.path / "blobs").glob("??/" + "?" * 64)):
            yield bytes.fromhex(file.name)

    def delete(self, digest: bytes) -> None:
        self._place(digest).unlink(missing_ok=True)

    def squash(self, sequence: int) -> bool:
        return False  # nobody hears it

    def _place(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.path / "blobs" / name[:2] / name

    def _write(self, target: Path, content: bytes) -> None:
        """Through a temporary name, forced to the disk with the folder that names it."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix="partial_", dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                Path(partial).replace(target)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StoreError(f"{target} could not be written: {error}") from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.path / "latest.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class FsspecStore:
    """Any fsspec file system. The head is the highest of the files `heads/N`, each of which is created exclusively:
    that is the compare-and-swap, for stores that know no other."""

    def __init__(self, url: str, **options: Any) -> None:
        """`options` go to the file system: `key`, `secret`, `endpoint_url` and so on for S3."""
        try:
            import fsspec
        except ImportError:
            raise ConfigError(f"the store {url!r} needs fsspec: pip install 'rlloop[stores]'") from None
        try:
            self._files, self.path = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"the store {url!r} is of no kind that fsspec can open here: {error}") from None
        self.url = url

    def latest(self) -> bytes | None:
        numbers = self._heads()
        return self._read(self._head(numbers[-1])) if numbers else None

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        yield self._read(self._place(digest), start)

    def has(self, digest: bytes) -> bool:
        with _translated(self.url):
            return self._files.exists(self._place(digest))

    def put(self, blob: bytes) -> bytes:
        digest = hash_of(blob)
        with _translated(self.url):
            self._files.makedirs(f"{self.path}/blobs", exist_ok=True)
            self._files.pipe_file(self._place(digest), blob)
        return digest

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        numbers = self._heads()
        if (self._read(self._head(numbers[-1])) if numbers else None) != expected:
            raise Conflict(f"the head of {self.url} was moved by another publisher")
        following = numbers[-1] + 1 if numbers else 0
        with _translated(self.url):
            self._files.makedirs(f"{self.path}/heads", exist_ok=True)
            try:
                self._files.pipe_file(self._head(following), new, mode="create")
            except FileExistsError:
                raise Conflict(f"the head of {self.url} was moved by another publisher") from None
            for old in numbers[:-2]:  # a reader may be on its way to one of the last
                self._files.rm_file(self._head(old))

    def blobs(self) -> Iterator[bytes]:
        yield from map(bytes.fromhex, self._names("blobs"))

    def delete(self, digest: bytes) -> None:
        with _translated(self.url):
            self._files.rm_file(self._place(digest))

    def squash(self, sequence: int) -> bool:
        return False  # nobody hears it

    def _heads(self) -> list[int]:
        return sorted(int(name) for name in self._names("heads"))

    def _names(self, folder: str) -> list[str]:
        with _translated(self.url):
            self._files.invalidate_cache()
            try:
                return [path.rpartition("/")[2] for path in self._files.ls(f"{self.path}/{folder}", detail=False)]
            except FileNotFoundError:
                return []

    def _head(self, number: int) -> str:
        return f"{self.path}/heads/{number:012}"

    def _place(self, digest: bytes) -> str:
        return f"{self.path}/blobs/{digest.hex()}"

    def _read(self, path: str, start: int = 0) -> bytes:
        with _translated(self.url):
            try:
                return self._files.cat_file(path, start=start)
            except FileNotFoundError:
                raise Missing(f"{self.url} has no {path}") from None


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (SyncError, FileExistsError):
        raise
    except Exception as error:  # each backend has errors of its own: OSError here, botocore's or aiohttp's there
        raise StoreError(f"{url}: {error or type(error).__name__}") from error


class HttpStore:
    """Reads `url`/latest and `url`/blobs/HASH; asks for a range where a transfer goes on."""

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = client(token=token, ca_file=ca_file, most=MAX_MANIFEST)
        self._head: tuple[str, bytes] | None = None  # ETag, content

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> HttpStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def latest(self) -> bytes | None:
        headers = {"If-None-Match": self._head[0]} if self._head else {}
        with self._translated(), self._client.stream("GET", f"{self.url}/latest", headers=headers) as response:
            if response.status_code == 304 and self._head:
                return self._head[1]
            if response.status_code == 404:
                return None
            response.raise_for_status()
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_HEAD:
                    raise Refused(f"the head at {self.url} is larger than {MAX_HEAD} bytes")
            tag = response.headers.get("ETag", "")
            self._head = (tag, bytes(content)) if tag and tag.isascii() else None  # else it cannot be sent back
            return bytes(content)

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-"} if start else {}
        place = f"{self.url}/blobs/{digest.hex()}"
        with self._translated(), self._client.stream("GET", place, headers=headers) as response:
            if response.status_code == 404:
                raise Missing(f"{self.url} has no blob {digest.hex()}")
            if response.status_code == 416:  # all of it had arrived
                return
            response.raise_for_status()
            skip = 0 if response.status_code == 206 else start  # whole, although a part was asked for
            for part in response.iter_bytes():
                yield part[skip:]
                skip = max(0, skip - len(part))

    def has(self, digest: bytes) -> bool:
        with self._translated():
            return self._client.head(f"{self.url}/blobs/{digest.hex()}").status_code == 200

    def put(self, blob: bytes) -> bytes:
        raise ConfigError(f"{self.url} can only be read; publish to a folder or an object store")

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        raise ConfigError(f"{self.url} can only be read; publish to a folder or an object store")

    def blobs(self) -> Iterator[bytes]:
        raise ConfigError(f"{self.url} cannot be listed")

    def delete(self, digest: bytes) -> None:
        raise ConfigError(f"{self.url} can only be read")

    def squash(self, sequence: int) -> bool:
        with self._translated():
            return self._client.post(f"{self.url}/squash/{sequence}").status_code == 201

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise StoreError(f"{self.url}: {error or type(error).__name__}") from error


def open_store(url: str, **options: Any) -> Store:
    """A folder's path, an http(s) URL, or what fsspec knows (s3://, gs://, memory://, ...)."""
    if re.fullmatch(r"[\w.-]+:\d+", url):
        raise ConfigError(f"the store {url!r} is an address without its scheme; write http://{url}")
    if url.startswith(("http://", "https://")):
        return HttpStore(url, **options)
    local = re.match("(file|local)://", url)  # fsspec's own would let two publishers create one head
    if "://" in url and not local:
        return FsspecStore(url, **options)
    return FolderStore(url[local.end() :] if local else url)
