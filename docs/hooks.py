"""Adapts the repository's pages to the site. MkDocs calls `on_files` once, then `on_page_markdown` for each page.

The README becomes the first page. Files outside `docs/` that a page links to are added to the site. Links to files of
the repository, which GitHub needs, become links of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).resolve().parents[1]
# The first page: its path in the repository, and its path on the site.
README = "README.md"
INDEX = "index.md"
# The target of a Markdown link without the anchor, such as "../README.md" in "[start](../README.md#start)". It follows
# "](", and ends before ")", "#" or white space. Web addresses, and anchors of the same page, don't match.
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and every file outside `docs/` that a page links to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]

    # Added pages link to further files, so links are followed until no new path comes up.
    waiting = [README, *pages]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):  # MkDocs finds the files in docs/ by itself
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            new_paths = linked_files(path) - seen
            waiting += sorted(new_paths)
            seen |= new_paths
    return files


def linked_files(page: str) -> set[str]:
    """The paths of the repository's files that a page links to. `page` and the paths are relative to `ROOT`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = {resolve_link(page, link) for link in LINK.findall(text)}
    return {path for path in paths if (ROOT / path).is_file()}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace a page's links to files of the repository by links of the site."""
    page_path = Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix()
    folder_on_site = posixpath.dirname(page.file.src_uri) or "."  # "." for the site's main folder

    def link_on_site(match: re.Match[str]) -> str:
        target = resolve_link(page_path, link=match[0])
        return posixpath.relpath(site_path(target), folder_on_site)

    return LINK.sub(link_on_site, markdown)


def resolve_link(page: str, link: str) -> str:
    """The path in the repository that a link on a page leads to. `page` is the page's path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def site_path(path: str) -> str:
    """A file's path on the site. `path` is the file's path in the repository."""
    if path == README:
        return INDEX
    return path.removeprefix("docs/")
