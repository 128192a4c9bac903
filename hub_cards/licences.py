"""What the licence of a base model asks of a model that is made from it."""

import re
from dataclasses import dataclass


class UnknownLicenceError(ValueError):
    """A base model whose licence is not known here; the message says what to do."""


@dataclass(frozen=True)
class Licence:
    """What goes into the repository of a model that is made from a base under this licence.

    Attributes:
        identifier: What the Hub's metadata field `license` takes.
        title: What the card calls it.
        link: Where it is published.
        name_prefix: What the model's name has to begin with, or `None`.
        notice: Text of a file `NOTICE`, or `None`.
        attribution: Sentence that has to be shown, or `None`.
        files: Files that the repository must hold.
    """

    identifier: str
    title: str
    link: str
    name_prefix: str | None = None
    notice: str | None = None
    attribution: str | None = None
    files: tuple[str, ...] = ("LICENSE",)


APACHE = Licence("apache-2.0", "Apache License 2.0", "https://www.apache.org/licenses/LICENSE-2.0")
# Section 1.b of the agreement: a copy of it, "Built with Llama", the name, and the notice.
LLAMA_3_2 = Licence(
    "llama3.2",
    "Llama 3.2 Community License",
    "https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/LICENSE",
    name_prefix="Llama",
    notice=(
        "Llama 3.2 is licensed under the Llama 3.2 Community License, Copyright © Meta Platforms, Inc. "
        "All Rights Reserved.\n"
    ),
    attribution="Built with Llama",
    files=("LICENSE", "NOTICE"),
)
# Base models by Hub id. Qwen2.5 has other licences at 3B and 72B, so sizes are named.
KNOWN: list[tuple[str, Licence]] = [
    (r"meta-llama/Llama-3\.2-[13]B(-Instruct)?", LLAMA_3_2),
    (r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?", APACHE),
    (r"Qwen/Qwen3-[\d.]+B(-Base)?", APACHE),
    (r"google/siglip2?-[\w-]+", APACHE),
]
# A model whose parts are all one's own can have a licence by its identifier.
BY_IDENTIFIER = {licence.identifier: licence for licence in (APACHE, LLAMA_3_2)}


def licence_of(base_models: list[str], own_licence: str | None) -> Licence:
    """The licence of a model that is made from these base models; the strictest of theirs.

    Args:
        base_models: Hub ids; none for a model whose parts were trained from scratch.
        own_licence: Identifier of a licence for such a model.

    Raises:
        UnknownLicenceError: if a base model is not known, or there is none and no licence is given.
    """
    found = []
    for name in base_models:
        licence = next((licence for pattern, licence in KNOWN if re.fullmatch(pattern, name)), None)
        if licence is None:
            raise UnknownLicenceError(
                f"The licence of the base model {name} is not known. Read it, and add what it asks for to KNOWN in "
                "hub_cards/licences.py; nothing is published on a guess."
            )
        found.append(licence)
    if not found and own_licence not in BY_IDENTIFIER:
        raise UnknownLicenceError(
            "No base model is recorded, so no licence follows from it. If every part was trained from scratch, say "
            f"under which licence it is yours to give: --license {' or '.join(BY_IDENTIFIER)}; otherwise name the "
            "bases with --base_model."
        )
    if not found:
        return BY_IDENTIFIER[str(own_licence)]
    return LLAMA_3_2 if LLAMA_3_2 in found else APACHE
