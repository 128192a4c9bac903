"""What the licence of a base model requires of a model made from it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Licence:
    """What the repository of a model needs if its base is under this licence.

    Attributes:
        identifier: Value of the Hub's metadata field `license`.
        title: Its name on the card.
        link: Where it is published.
        name_prefix: Required prefix of the model's name, or `None`.
        notice: Text of a file `NOTICE`, or `None`.
        attribution: Sentence that must be shown, or `None`.
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
    # The vision encoder and the class files are Apache-2.0, whose section 4a requires a copy too.
    files=("LICENSE", "NOTICE", "LICENSE-APACHE"),
)
# Base models by Hub id. Qwen2.5 has other licences at 3B and 72B, so sizes are named.
KNOWN: list[tuple[str, Licence]] = [
    (r"meta-llama/Llama-3\.2-[13]B(-Instruct)?", LLAMA_3_2),
    (r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?", APACHE),
    (r"Qwen/Qwen3-[\d.]+B(-Base)?", APACHE),
    (r"google/siglip2?-[\w-]+", APACHE),
]
# Licences that can be chosen for a part that was trained from scratch.
BY_IDENTIFIER = {licence.identifier: licence for licence in (APACHE, LLAMA_3_2)}


def known_licence(base_model: str) -> Licence:
    """The licence of a base model by its Hub id.

    Raises:
        ValueError: if it is not known here.
    """
    for pattern, licence in KNOWN:
        if re.fullmatch(pattern, base_model):
            return licence
    raise ValueError(
        f"The licence of the base model {base_model} is not known. Read it, and add what it requires to KNOWN in "
        "hub_cards/licences.py; licences are not guessed."
    )


def strictest(licences: Iterable[Licence]) -> Licence:
    """The licence that a model made from parts under all of these must follow."""
    return LLAMA_3_2 if LLAMA_3_2 in licences else APACHE


def licence_of(text_model: str | None, vision_model: str | None, own_licence: str | None) -> Licence:
    """The licence of a model that is made from these parts: the strictest of all.

    Args:
        text_model, vision_model: Hub ids; `None` if unknown.
        own_licence: Identifier of the licence that the owner chose for a part without a Hub id.

    Raises:
        ValueError: if a part's licence is not known, a part has no Hub id and no licence is given, or one is given
            although both have a Hub id. The message says what to do.
    """
    parts = {"text_model": text_model, "vision_model": vision_model}
    found = [known_licence(name) for name in parts.values() if name is not None]
    unknown = [part for part, name in parts.items() if name is None]
    if unknown and own_licence not in BY_IDENTIFIER:
        raise ValueError(
            f"No Hub id of the {' and the '.join(unknown)} is recorded, so its licence is not known. If it was "
            f"loaded from a folder, name it: {' '.join(f'--{part} owner/name' for part in unknown)}; if you trained "
            f"it from scratch, choose its licence: --license {' or '.join(BY_IDENTIFIER)}."
        )
    if not unknown and own_licence is not None:
        raise ValueError(
            f"--license is for parts without a Hub id; the licence of this model follows from {text_model} and "
            f"{vision_model}."
        )
    return strictest([*found, *(BY_IDENTIFIER[str(own_licence)] for _ in unknown)])
