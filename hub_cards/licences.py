"""What the licence of a base model requires of a model made from it."""

import re
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Licence:
    """What the repository of a model needs if its base is under this licence.

    `identifier` is the Hub's, `title` and `link` are shown. If required, there are a start of the model's name, the
    text of a file `NOTICE`, and a sentence on the card.
    """

    identifier: str
    title: str
    link: str
    name_prefix: str = ""
    notice: str | None = None
    attribution: str | None = None


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
)
# Base models by Hub id. Qwen2.5 has other licences at 3B and 72B, so sizes are named.
KNOWN: dict[str, Licence] = {
    r"meta-llama/Llama-3\.2-[13]B(-Instruct)?": LLAMA_3_2,
    r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?": APACHE,
    r"Qwen/Qwen3-[\d.]+B(-Base)?": APACHE,
    r"HuggingFaceTB/SmolLM2-(135M|360M|1\.7B)(-Instruct)?": APACHE,
    r"google/siglip2?-[\w-]+": APACHE,
}
# Licences that can be chosen for a part that was trained from scratch.
BY_IDENTIFIER = {licence.identifier: licence for licence in (APACHE, LLAMA_3_2)}


def known_licence(base_model: str) -> Licence:
    """The licence of a base model by its Hub id. Raises `UserError` if it is not known here."""
    for pattern, licence in KNOWN.items():
        if re.fullmatch(pattern, base_model):
            return licence
    raise UserError(
        f"The licence of the base model {base_model} is not known. Read it, and add what it requires to KNOWN in "
        "hub_cards/licences.py; licences are not guessed. If it is a folder on this machine, remove its _name_or_path "
        "from config.json."
    )


def licence_of(parts: dict[str, str | None], own_licence: str | None) -> Licence:
    """The licence of a model that is made from these parts, Hub ids by option: the one that asks more than Apache.
    `own_licence` is the identifier of the one that the owner chose for parts without a Hub id. Raises `UserError` if
    it is missing or no part needs it, a part's licence is not known, or two ask more than Apache."""
    found = [known_licence(name) for name in parts.values() if name is not None]
    unknown = [part for part, name in parts.items() if name is None]
    if unknown and own_licence not in BY_IDENTIFIER:
        raise UserError(
            f"No Hub id of the {' and the '.join(unknown)} is recorded, so its licence is not known. If it was "
            f"loaded from a folder, name it: {' '.join(f'--{part} owner/name' for part in unknown)}; if you trained "
            f"it from scratch, choose its licence: --license {' or '.join(BY_IDENTIFIER)}."
        )
    if own_licence and not unknown:
        raise UserError(f"--license {own_licence} is for parts without a Hub id, and all have one: leave it out.")
    found += [BY_IDENTIFIER[str(own_licence)] for _ in unknown]
    first, *others = dict.fromkeys(licence for licence in found if licence is not APACHE) or [APACHE]
    if others:
        raise UserError(f"The parts are under the {first.title} and the {others[0].title}: build writes only one.")
    return first
