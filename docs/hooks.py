"""For MkDocs: the README as the first page, and the pages and pictures outside `docs/` that a page links to.

Links stay those of the repository, so that every page reads on GitHub too; here they are made those of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).resolve().parents[1]
HOME = ("README.md", "index.md")  # in the repository, on the site
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and every file of the repository that a page links to."""
    waiting = [HOME[0], *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            targets = {resolve(path, target) for target in LINK.findall((ROOT / path).read_text(encoding="utf-8"))}
            found = {target for target in targets if (ROOT / target).is_file()} - seen
            waiting += sorted(found)
            seen |= found
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make a page's links those of the site."""
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri) or "."

    def on_site(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(resolve(source, match[0])), folder)

    return LINK.sub(on_site, markdown)


def resolve(page: str, target: str) -> str:
    """A link's target, as a path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    return HOME[1] if path == HOME[0] else path.removeprefix("docs/")
