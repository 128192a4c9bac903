"""The blocks of code on a Markdown page."""

import re
import textwrap


def fences(text: str) -> list[tuple[str, str]]:
    """Language and code of each block, in their order; a block in a list is brought to the margin."""
    blocks = []
    for match in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        _, language, code = match.groups()
        blocks.append((language, textwrap.dedent(code)))
    return blocks
