"""The blocks of code on a Markdown page."""

import re
import textwrap


def fences(text: str) -> list[tuple[str, str]]:
    """Language and code of each block, in their order; a block in a list is brought to the margin."""
    found = re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [(fence[2], textwrap.dedent(fence[3])) for fence in found]
