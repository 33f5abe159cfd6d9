"""Signs the certificate's head, or sends it to a witness, at each checkpoint.

The hash chain reveals changes, but not a chain that was written anew from its start. A signature reveals that to anyone
with the public key, as long as the forger does not have the private one. A witness also knows how far the run had come,
which reveals a run that was cut short and finished differently.

    signatures.jsonl, in the run's folder   {"run", "step", "head", "checkpoint", "signature": Ed25519, hexadecimal}
    the witness's                           {"run", "step", "head", "checkpoint"}, posted as JSON or appended as a line
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from rlloop.config.run import CertificateConfig
from rlloop.errors import ConfigError
from rlloop.parity.certificate import Statement
from rlloop.runs.folder import SIGNATURES, Journal
from rlloop.sync.manifest import load_key, public_key

TRIES = 3
TIMEOUT = 10.0  # seconds for each try
MOST_ANSWER = 1 << 16  # bytes of an answer, which is not read


def check_certificate(config: CertificateConfig) -> None:
    """Raises `ConfigError` for a key that cannot be read, a witness's file in a folder that does not exist, a login in
    its address, or a token that is not there or that nothing would send."""
    if config.key is not None:
        load_key(Path(config.key))
    posted, witness = _is_address(config.witness or ""), config.witness
    if witness is not None and (posted or not Path(witness).parent.is_dir()):
        from rlloop.web.clients import BASIC, authorization, refuse_login

        if ":" in witness:  # an address, of whatever scheme: a path's @ is no login
            refuse_login("certificate.witness", witness, f"set certificate.token_env=LOGIN, and {BASIC}")
        if not posted:
            raise ConfigError(
                f"certificate.witness is {witness!r}; it must be an http:// or https:// address, or a file in an "
                "existing folder"
            )
        authorization("certificate.token_env", config.token_env)
    elif config.token_env is not None:
        raise ConfigError(
            f"certificate.token_env is {config.token_env!r}, and certificate.witness is no address that it could be "
            "sent to; set certificate.witness=https://..., or leave token_env out"
        )


class Attestor:
    """Signs statements and sends them to the witness, as `certificate.key` and `certificate.witness` say."""

    def __init__(self, config: CertificateConfig, folder: Path, log: Callable[[str], None]) -> None:
        """Raises `ConfigError` for a key that cannot be read."""
        self._key = None if config.key is None else load_key(Path(config.key))
        self._signatures = Journal(folder / SIGNATURES)
        self._witness, self._token_env, self._log = config.witness, config.token_env, log

    def __call__(self, statement: Statement) -> None:
        """Sign and send. A witness that does not answer is only logged: the next statement covers these steps, too."""
        if self._key is not None:
            signature = self._key.sign(message(statement)).hex()
            self._signatures.append({**asdict(statement), "signature": signature})
        if self._witness is None:
            return
        try:
            if _is_address(self._witness):
                _post(self._witness, message(statement), self._token_env)
            else:
                with Path(self._witness).open("ab") as file:  # which several runs may share
                    file.write(message(statement) + b"\n")
        except (OSError, ConnectionError) as error:
            self._log(f"step {statement.step} could not be sent to the witness {self._witness}: {error}")


def message(statement: Statement) -> bytes:
    """The bytes of a statement that are signed and sent."""
    return msgspec.json.encode(asdict(statement), order="sorted")


def is_signed(statement: Statement, signature: str, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(bytes.fromhex(signature), message(statement))
    except (InvalidSignature, ValueError):
        return False
    return True


def read_public_key(path: Path) -> Ed25519PublicKey:
    """An Ed25519 key from PEM, or from the 64 hexadecimal digits of a .pub file. Raises `ConfigError`."""
    try:
        content = path.read_bytes()
        key = load_pem_public_key(content) if b"BEGIN PUBLIC" in content else public_key(content.decode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--public-key {path} cannot be read: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"--public-key {path} is not an Ed25519 key; openssl pkey -in KEY -pubout writes the public half"
        )
    return key


def _is_address(witness: str) -> bool:
    return witness.lower().startswith(("http://", "https://"))


def _post(address: str, content: bytes, token_env: str | None) -> None:
    """Raises `ConnectionError` after `TRIES` failures."""
    import httpx

    from rlloop.web.clients import authorization, client

    headers = {"Content-Type": "application/json", **authorization("certificate.token_env", token_env)}
    for attempt in range(TRIES):
        try:
            with client(most=MOST_ANSWER, timeout=TIMEOUT, trust_env=True) as http:
                http.post(address, content=content, headers=headers).raise_for_status()
            return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if attempt == TRIES - 1:
                raise ConnectionError(str(error)) from error
