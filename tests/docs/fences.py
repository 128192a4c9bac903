"""Finds the blocks of code on a Markdown page."""

import re
import textwrap


def fences(text: str) -> list[tuple[str, str]]:
    """The language and the code of each block, in the page's order. The code of an indented block is not indented."""
    blocks = []
    # A block begins with a line such as "```python", and ends at a line "```" with the same indentation.
    for match in re.finditer(r"^( *)```(\w+)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
        _indentation, language, code = match.groups()
        blocks.append((language, textwrap.dedent(code)))
    return blocks
