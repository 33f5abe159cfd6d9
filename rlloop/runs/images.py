"""Images of a run: each once, in its folder, by its digest.

images/DIGEST.npz    patches [height * width, numbers] float32, height, width: what the model read
images/DIGEST.png    the picture for people, where the image has one
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.errors import ConfigError, RunError
from rlloop.inputs import ContentSpan, Image, ModelInput

FOLDER = "images"


class ImageStore:
    """The images of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._kept: set[str] = set()  # digests known to be there

    def keep(self, images: Iterable[Image]) -> None:
        """Write those that are not there yet; each whole or not at all."""
        for image in images:
            if image.digest in self._kept:
                continue
            if not (self.folder / f"{image.digest}.npz").exists():
                self.folder.mkdir(exist_ok=True)
                if image.picture is not None:
                    from PIL import Image as pillow

                    drawn = io.BytesIO()
                    pillow.fromarray(image.picture).save(drawn, "PNG")
                    self._write(f"{image.digest}.png", drawn.getvalue())
                packed = io.BytesIO()
                np.savez_compressed(packed, patches=image.patches, height=image.height, width=image.width)
                self._write(f"{image.digest}.npz", packed.getvalue())
            self._kept.add(image.digest)

    def _write(self, name: str, content: bytes) -> None:
        partial = self.folder / f".{name}.{os.getpid()}"
        partial.write_bytes(content)
        partial.replace(self.folder / name)

    def read(self, digest: str) -> Image:
        """Raises `RunError` for an image that is not there, or is another one."""
        file = self.folder / f"{checked(digest)}.npz"
        try:
            with np.load(file, allow_pickle=False) as stored:
                image = Image(stored["patches"], int(stored["height"]), int(stored["width"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, ConfigError) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        if image.digest != digest:
            raise RunError(f"{file} holds another image ({image.digest:.12})")
        return image

    def read_by(self, prompt_ids: list[int], token_ids: list[int], spans: Sequence[Mapping[str, Any]]) -> ModelInput:
        """The input of a recorded completion: its prompt, or all up to the last picture that its environment replied.
        Each of `spans` has the tokens (start, end) and the digest of an image. Raises `RunError` as `read`."""
        ids = (prompt_ids + token_ids)[: max(len(prompt_ids), *(span["end"] for span in spans))]
        contents = (
            ContentSpan(span["start"], span["end"], span["digest"], self.read(span["digest"])) for span in spans
        )
        return ModelInput(ids, contents=tuple(contents), given=len(prompt_ids)).placed()

    def picture(self, digest: str) -> Path | None:
        """The file to show; None where there is none."""
        file = self.folder / f"{checked(digest)}.png"
        return file if file.is_file() else None


def checked(digest: str) -> str:
    """Raises `RunError` for a string that is not a digest, such as a path."""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise RunError(f"{digest!r:.80} is no digest of an image: 64 hexadecimal digits")
    return digest
