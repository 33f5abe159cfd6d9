"""MkDocs hooks of `make docs`: pages from outside docs/, links that leave docs/, and no page that loads from elsewhere.

README.md is the first page, and other Markdown files of the repository's root are pages (`PAGES`). A link to any
other file (a recipe, a test, recorded results) leads to a copy of that file in the site, under `source/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md"}
PAGES |= {"CHANGELOG.md": "CHANGELOG.md"}
RAW = "https://raw.githubusercontent.com/rlloop/rlloop/main/"  # README's pictures, which a package index shows, too
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)([^)]*\))")
FENCE = re.compile(r"^(```.*?^```|~~~.*?^~~~)", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r'<(?:script|img|iframe)[^>]+src="?https?:|<link[^>]+rel="?(?:stylesheet|pre)[^>]+https?:')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    linked = {target for page in files.documentation_pages() for target in _outside(page)}
    for path in sorted(linked):
        copy = File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path))
        copy.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = _repository_path(page.file)

    def rewritten(match: re.Match[str]) -> str:
        target = _resolved(source, match[2])
        return match[0] if target is None else f"{match[1]}{_relative(page.file.src_uri, _site_path(target))}{match[3]}"

    parts = FENCE.split(markdown)
    return "".join(part if FENCE.match(part) else LINK.sub(rewritten, part) for part in parts)


def on_post_build(config: MkDocsConfig) -> None:
    for file in sorted(Path(config.site_dir).rglob("*.html")):
        if "source" not in file.relative_to(config.site_dir).parts and (found := LOADED.search(file.read_text())):
            raise PluginError(f"{file} loads something from elsewhere: {found[0]}")


def _repository_path(file: File) -> PurePosixPath:
    """Path of the page's source in the repository."""
    names = {uri: name for name, uri in PAGES.items()}
    return PurePosixPath(names.get(file.src_uri, f"docs/{file.src_uri}"))


def _resolved(source: PurePosixPath, link: str) -> str | None:
    """The file of the repository that a page's link names; None for an address elsewhere."""
    if link.startswith(RAW):
        return link.removeprefix(RAW)
    if re.match(r"[a-z]+:", link):
        return None
    return os.path.normpath(source.parent / link)


def _site_path(target: str) -> str:
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"


def _relative(page: str, target: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent)


def _outside(file: File) -> list[str]:
    source = _repository_path(file)
    text = FENCE.sub("", file.content_string)
    targets = [_resolved(source, match[2]) for match in LINK.finditer(text)]
    return [each for each in targets if each and _site_path(each).startswith("source/") and (ROOT / each).is_file()]
