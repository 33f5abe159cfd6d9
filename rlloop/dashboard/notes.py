"""A run's note and tags, which people write in the dashboard: `notes.json` in the run's folder.

It is the only file that the dashboard writes there. No record or certificate covers it, and a resume leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlloop.errors import UNREADABLE, ConfigError
from rlloop.runs.folder import as_json_file, write_whole

NOTES = "notes.json"
LONGEST_NOTE, LONGEST_TAG, MOST_TAGS = 20_000, 60, 40  # characters, characters, tags


def read_notes(run: Path) -> dict[str, Any]:
    """`note` and `tags` of a run; empty where there are none that can be read."""
    try:
        content = msgspec.json.decode((run / NOTES).read_bytes())
        note, tags = content.get("note", ""), content.get("tags", [])
    except (OSError, *UNREADABLE, AttributeError):
        note, tags = "", []
    return {
        "note": note if isinstance(note, str) else "",
        "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
    }


def write_notes(run: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a run's note and tags. Raises `ConfigError` for other content, and where the folder is read-only."""
    note, tags = content.get("note", ""), content.get("tags", [])
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise ConfigError(f"a note must be text of at most {LONGEST_NOTE:,} characters")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError("tags must be a list of texts")
    tags = list(dict.fromkeys(filter(None, (tag.strip() for tag in tags))))
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise ConfigError(f"a run has at most {MOST_TAGS} tags, of at most {LONGEST_TAG} characters each")
    try:
        write_whole(run / NOTES, as_json_file({"note": note.strip(), "tags": tags}), durable=False)
    except OSError as error:
        raise ConfigError(f"{run / NOTES} cannot be written: {error.strerror}") from None
    return read_notes(run)
