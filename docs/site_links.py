"""A hook of mkdocs: links that leave docs/ become the names of files, blocks lose tests' words.

They lead into the repository, which a site of the documentation does not have.
"""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"(?m)^```(\w+) .*$")  # words for the tests after a block's language
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Returns the page's text with such links as code."""
    depth = page.file.src_uri.count("/")

    def named(match: re.Match[str]) -> str:
        text, link = match.groups()
        above = link.count("../")
        if above <= depth:
            return match[0]
        path = link.split("#")[0].replace("../", "")
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(named, FENCE.sub(r"```\1", markdown))
