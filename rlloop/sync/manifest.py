"""Signed manifests, each describing one version of the weights; and the head, which lists the versions in a store.

A version is `run_id/step`. Its tensors' encoded bytes form one stream, in the listing's order, cut into pieces of
`PIECE` bytes; each piece is a blob of the store under its own hash. So tensors of any size cost few requests, a broken
transfer resumes at a piece, and every piece is checked by itself.

A manifest is a blob as well: magic, Ed25519 signature, zstd of msgpack. Names, dtypes and shapes are a blob of their
own, the *listing*, which versions share; a manifest refers to it by hash. Tensors' digests are not sent: a receiver
computes them from the decoded tensors and compares the root, which is over all of them. `sequence` counts publications
and only grows, whereas `step` goes back when a trainer resumes from an older checkpoint.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rlloop.errors import UNREADABLE, ConfigError, SyncError
from rlloop.sync.bits import WIDTH, size_of

FORMAT = 3
READABLE = (2, 3)  # format 2 has fewer codecs
MAGIC = b"rlloop:3"
MAGICS = tuple(b"rlloop:%d" % each for each in READABLE)
PIECE = 8 << 20
MAX_MANIFEST = 64 << 20  # bytes of a manifest or a listing, before and after decompression: some 100,000 tensors
MAX_HEAD = 1 << 20
MAX_TENSOR = 1 << 40

# "joined": part of the encoding of the last entry before it that has one. A manifest holds indices into this list.
# `steps` and `plain` are written in format 2 only.
CodecName = Literal["unchanged", "steps", "adaptive", "planes", "plain", "joined", "changes", "full"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)

T = TypeVar("T")


class Refused(SyncError):
    """Something fetched is invalid: forged, damaged, oversize, of another chain, or too old."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a version, and where its encoding is in the stream."""

    name: str  # Hugging Face's: per expert, unfused
    dtype: str  # safetensors'
    shape: tuple[int, ...]
    codec: CodecName
    start: int  # byte offset in the stream
    size: int  # encoded bytes


class Listing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names, dtypes and shapes of a version's tensors: a blob that many manifests share."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape
    aliases: dict[str, str]  # tied weights: another name -> the name in `tensors`

    def encode(self) -> bytes:
        return _packed(self)

    @classmethod
    def decode(cls, content: bytes) -> Listing:
        """Raises `Refused` for content that is not a valid listing."""
        listing = _unpacked(content, cls, "a listing of tensors")
        for name, dtype, shape in listing.tensors:
            if dtype not in WIDTH or any(side < 0 for side in shape):
                raise Refused(f"{name} has dtype {dtype} and shape {shape}, which no tensor can have")
            if size_of(dtype, shape) > MAX_TENSOR:
                raise Refused(f"{name} of shape {shape} is larger than {MAX_TENSOR} bytes")
        names = {name for name, _, _ in listing.tensors}
        if len(names) < len(listing.tensors):
            raise Refused("a listing has a name twice")
        if any(alias in names or name not in names for alias, name in listing.aliases.items()):
            raise Refused("a listing has aliases that are themselves tensors, or that name none")
        return listing


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as it is sent."""

    run_id: str
    step: int
    sequence: int
    parent: bytes | None
    state_of: bytes | None
    listing: bytes
    root: bytes
    codecs: bytes  # an index into `CODECS` for each tensor of the listing
    sizes: tuple[int, ...]  # encoded bytes of each tensor that has an encoding
    pieces: bytes  # 32 bytes each


class Manifest(msgspec.Struct, frozen=True):
    """One encoding of a version: a delta from its parent's state, or an *anchor*, which needs no other version.

    The first manifest of a version is its identity. An anchor or a squashed delta made later for the same state names
    the identity in `state_of`, so that a replica that applied it can follow the chain from there.
    """

    run_id: str
    step: int
    sequence: int
    parent: bytes | None  # hash of the manifest whose state this one changes; None: an anchor
    state_of: bytes | None  # hash of the version's identity; None: this manifest is the identity
    listing: bytes  # hash of the `Listing` that `tensors` and `aliases` are from
    tensors: tuple[Entry, ...]
    aliases: dict[str, str]  # tied weights: another name -> the name in `tensors`
    pieces: tuple[bytes, ...]  # hashes of the stream's pieces, `PIECE` bytes each, the last one shorter
    root: bytes  # `root_hash` of the state

    @property
    def version(self) -> str:
        return f"{self.run_id}/{self.step}"

    @property
    def stream_bytes(self) -> int:
        return sum(entry.size for entry in self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the tensors, decoded."""
        return sum(size_of(entry.dtype, entry.shape) for entry in self.tensors)

    def piece_size(self, index: int) -> int:
        return min(PIECE, self.stream_bytes - index * PIECE)

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        """The manifest as it is stored. Its blake3 is the hash that heads and other manifests refer to it by."""
        codecs = bytes(CODECS.index(entry.codec) for entry in self.tensors)
        sizes = tuple(entry.size for entry in self.tensors if entry.codec not in ("unchanged", "joined"))
        body = _packed(
            _Body(
                self.run_id, self.step, self.sequence, self.parent, self.state_of, self.listing, self.root,
                codecs, sizes, b"".join(self.pieces),
            )
        )  # fmt: skip
        return MAGIC + key.sign(MAGIC + body) + body

    @classmethod
    def verify(cls, signed: bytes, public_key: Ed25519PublicKey, listing_of: Callable[[bytes], Listing]) -> Manifest:
        """The manifest in `signed`. `listing_of` fetches a listing by its hash.

        Raises `Refused`. Nothing is parsed before the signature has been verified.
        """
        signature, body = signed[len(MAGIC) : len(MAGIC) + 64], signed[len(MAGIC) + 64 :]
        if not signed.startswith(MAGICS):
            raise Refused(f"not a manifest of format {FORMAT}: it begins with {signed[:16]!r}, not with {MAGIC!r}")
        try:
            public_key.verify(signature, signed[: len(MAGIC)] + body)
        except InvalidSignature:
            raise Refused("a manifest's signature is invalid: it was damaged, or another key signed it") from None
        fields = _unpacked(body, _Body, "a manifest")
        hashes = [fields.listing, fields.root, *(each for each in (fields.parent, fields.state_of) if each is not None)]
        if any(len(each) != 32 for each in hashes) or len(fields.pieces) % 32:
            raise Refused(f"manifest {fields.run_id}/{fields.step} has hashes that are not 32 bytes long")
        listing = listing_of(fields.listing)
        return cls(
            run_id=fields.run_id,
            step=fields.step,
            sequence=fields.sequence,
            parent=fields.parent,
            state_of=fields.state_of,
            listing=fields.listing,
            tensors=_entries(fields, listing),
            aliases=listing.aliases,
            pieces=tuple(fields.pieces[at : at + 32] for at in range(0, len(fields.pieces), 32)),
            root=fields.root,
        )


def _entries(body: _Body, listing: Listing) -> tuple[Entry, ...]:
    """The listing's tensors, with codec, offset and size of each in this version. Raises `Refused`."""
    mismatch = Refused(f"manifest {body.run_id}/{body.step} does not fit its listing of {len(listing.tensors)} tensors")
    if len(body.codecs) != len(listing.tensors) or any(code >= len(CODECS) for code in body.codecs):
        raise mismatch
    entries, sizes, offset, joinable = list[Entry](), iter(body.sizes), 0, None
    for (name, dtype, shape), code in zip(listing.tensors, body.codecs, strict=True):
        codec, size = CODECS[code], 0
        if codec == "joined" and dtype != joinable:
            raise Refused(f"manifest {body.run_id}/{body.step} joins {name} to no tensor of its dtype")
        if codec not in ("unchanged", "joined"):
            size, joinable = next(sizes, -1), dtype
            if size < 0:
                raise mismatch
        entries.append(Entry(name, dtype, shape, codec, offset, size))
        offset += size
    if next(sizes, None) is not None or len(body.pieces) != 32 * math.ceil(offset / PIECE):
        raise mismatch
    return tuple(entries)


def _packed(content: msgspec.Struct) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(content))


def _unpacked(content: bytes, kind: type[T], what: str) -> T:
    """Raises `Refused`, also for more than `MAX_MANIFEST` bytes, which are not unpacked. `what` is for the message."""
    try:
        if zstandard.frame_content_size(content) > MAX_MANIFEST:
            raise Refused(f"{what} is larger than {MAX_MANIFEST} bytes")
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_MANIFEST)
        return msgspec.msgpack.decode(plain, type=kind)
    except (zstandard.ZstdError, *UNREADABLE) as error:
        raise Refused(f"{what} cannot be read: {error}") from None


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A head's entry for a manifest: enough to choose a route without fetching manifests."""

    manifest: bytes  # hash
    sequence: int  # of the version that it leads to
    step: int
    base: int | None  # sequence of the version that it starts from; None: an anchor
    root: bytes
    wire_bytes: int  # manifest and stream; and the listing, in the first version that has it


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version and the routes to it: the one object of a store that changes, by compare-and-swap.

    It is not signed. A forged head can only lead a replica to manifests that it refuses, or keep it where it is.
    """

    run_id: str
    chain: tuple[Link, ...]  # identities, ascending, without a gap; the last one is the newest version
    shortcuts: tuple[Link, ...] = ()  # anchors and squashed deltas to members of the chain
    format: int = FORMAT
    term: int = 0  # number of publishers that have claimed the store so far
    publisher: str = ""  # random name of the process that wrote this head

    @property
    def newest(self) -> Link:
        return self.chain[-1]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> Head:
        """Raises `Refused` for content that is not a valid head of this format."""
        if len(content) > MAX_HEAD:
            raise Refused(f"the head is larger than {MAX_HEAD} bytes")
        try:
            head = msgspec.msgpack.decode(content, type=cls)
        except UNREADABLE as error:
            raise Refused(f"the head cannot be read: {error}") from None
        if head.format not in READABLE or not head.chain:
            raise Refused(
                f"the head has format {head.format} and {len(head.chain)} versions; this rlloop reads formats "
                f"{READABLE[0]} to {FORMAT}: publish into a new store, or move the old one's folder away"
            )
        return head


def root_hash(tensors: Iterable[tuple[str, str, tuple[int, ...]]], digests: Mapping[str, bytes]) -> bytes:
    """blake3 of a whole state: name, dtype, shape and digest of every tensor. Independent of order and encoding.

    `tensors`: (name, dtype, shape) each; `digests`: by name.
    """
    states = sorted((*tensor, digests[tensor[0]]) for tensor in tensors)
    return blake3(msgspec.msgpack.encode(states)).digest()


def hash_of(blob: bytes | bytearray | memoryview) -> bytes:
    return blake3(blob, max_threads=1).digest()


# ---------------------------------------------------------------------------------------------------- keys


def new_key(path: Path) -> Ed25519PrivateKey:
    """Write a new private key to `path` (PEM, mode 0600), and its public key to `path`.pub (hexadecimal).
    Raises `FileExistsError`, and `ConfigError` if they cannot be written."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_secret(path, pem)
        try:
            path.with_name(path.name + ".pub").write_text(public_hex(key) + "\n")
        except OSError:
            path.unlink()
            raise
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"the signing key {path} cannot be written: {error.strerror}; choose another path") from None
    return key


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file (mode 0600), which others that start at this moment find whole or not at all. Raises
    `FileExistsError`."""
    if os.path.lexists(path):  # perhaps in a folder that cannot be written
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:
        file.write(content)
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            path.touch(mode=0o600, exist_ok=False)
            path.write_bytes(content)


def load_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a private key ({error}); it must be an Ed25519 key in PEM"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a {type(key).__name__}; it must be an Ed25519 private key")
    return key


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    with suppress(FileExistsError):  # another process that starts now is faster
        if not path.exists():
            return new_key(path)
    return load_key(path)


def public_key(text: str) -> Ed25519PublicKey:
    """A public key from the 64 hexadecimal digits of a .pub file."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text.strip()))
    except ValueError:
        what = "a private key (its .pub file holds the public one)" if "PRIVATE" in text else "not a public key"
        raise ConfigError(
            f"the key given ({len(text.strip())} characters) is {what}; give 64 hexadecimal digits"
        ) from None


def public_hex(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
