"""MkDocs calls these functions when it builds the site.

They add the README as the first page, and the pages and pictures outside `docs/` that a page links to. Pages link to
files of the repository, so that their links work on GitHub. Here they are replaced by links of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).resolve().parents[1]
# The first page: its file in the repository, and its file on the site.
README = "README.md"
INDEX = "index.md"
# The target of a Markdown link, unless it is an address or an anchor of the same page.
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and every file of the repository that a page links to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting = [README, *pages]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            unseen = linked_files(path) - seen
            waiting += sorted(unseen)
            seen |= unseen
    return files


def linked_files(page: str) -> set[str]:
    """The files of the repository that a page links to."""
    links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    paths = {resolve(page, link) for link in links}
    return {path for path in paths if (ROOT / path).is_file()}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace a page's links to files of the repository by links of the site."""
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri) or "."

    def link_on_site(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(resolve(source, match[0])), folder)

    return LINK.sub(link_on_site, markdown)


def resolve(page: str, link: str) -> str:
    """The path in the repository of a link's target."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def site_path(path: str) -> str:
    """The path on the site of a file of the repository."""
    return INDEX if path == README else path.removeprefix("docs/")
