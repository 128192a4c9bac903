"""Choose the licence of a release from the licences of its parts.

A licence is known for some Hub ids of language models and vision encoders. For any other part, the user has to give
the licence.
"""

import re
from dataclasses import dataclass

from normllava.errors import UserError


@dataclass(frozen=True)
class Licence:
    """A licence, and what it asks of a model with a part under this licence.

    Attributes:
        identifier: The Hub's name for the licence.
        title: The licence's name on the card.
        link: Where the card's reader finds the licence.
        name_prefix: What the model's name has to begin with; empty if the licence allows any name.
        notice: Text of the file `NOTICE`; `None` if the licence asks for no such file.
        attribution: A sentence that the card has to show; `None` if the licence asks for none.
    """

    identifier: str
    title: str
    link: str
    name_prefix: str = ""
    notice: str | None = None
    attribution: str | None = None


APACHE = Licence(
    identifier="apache-2.0",
    title="Apache License 2.0",
    link="https://www.apache.org/licenses/LICENSE-2.0",
)

# Section 1.b of the Llama 3.2 agreement asks for a copy of the agreement, the sentence "Built with Llama", a name that
# begins with "Llama", and the notice.
LLAMA_3_2 = Licence(
    identifier="llama3.2",
    title="Llama 3.2 Community License",
    link="https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/LICENSE",
    name_prefix="Llama",
    notice=(
        "Llama 3.2 is licensed under the Llama 3.2 Community License, Copyright © Meta Platforms, Inc. "
        "All Rights Reserved.\n"
    ),
    attribution="Built with Llama",
)

# The licence of each known model, by a pattern of the model's Hub id. The pattern of Qwen2.5 names the sizes, because
# Qwen2.5 has other licences at 3B and 72B.
KNOWN_LICENCES: dict[str, Licence] = {
    r"meta-llama/Llama-3\.2-[13]B(-Instruct)?": LLAMA_3_2,
    r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?": APACHE,
    r"Qwen/Qwen3-[\d.]+B(-Base)?": APACHE,
    r"HuggingFaceTB/SmolLM2-(135M|360M|1\.7B)(-Instruct)?": APACHE,
    r"google/siglip2?-[\w-]+": APACHE,
}


def choose_licence(
    text_model: str | None, vision_model: str | None, user_licence: str | None, parent: str | None = None
) -> Licence:
    """The licence of a model that is made from a language model and a vision encoder.

    Args:
        text_model: Hub id of the language model; `None` if it is not known.
        vision_model: Hub id of the vision encoder; `None` if it is not known.
        user_licence: Identifier of the licence that the user gives with --license; `None` if the user gives none.
        parent: Hub id of the model that was trained on; `None` if the model was made from its parts.

    Raises:
        UserError: if the licence of a part or of the parent is not known and the user gives none, or if two different
            licences apply, neither of which is Apache's.
    """
    licences = []
    if user_licence is not None:
        licences.append(find_named_licence(user_licence))

    made_from = [("--text_model", text_model), ("--vision_model", vision_model)]
    if parent is not None:
        made_from.append(("the parent", parent))
    for option, hub_id in made_from:
        known_licence = find_known_licence(hub_id)
        if known_licence is not None:
            licences.append(known_licence)
        elif user_licence is None:
            raise UserError(describe_unknown(option, hub_id))

    # A part under Apache's licence may go into a model under another licence, so another licence takes precedence.
    different_licences = dict.fromkeys(licences)  # without duplicates
    other_licences = [licence for licence in different_licences if licence is not APACHE]
    if len(other_licences) > 1:
        titles = " and the ".join(licence.title for licence in other_licences)
        raise UserError(f"Parts and --license are under the {titles}, and a release can have only one licence.")
    if other_licences:
        return other_licences[0]
    return APACHE


def find_named_licence(identifier: str) -> Licence:
    """The licence with this identifier. An unknown licence links to the release's own file `LICENSE`."""
    for licence in (APACHE, LLAMA_3_2):
        if licence.identifier == identifier:
            return licence
    return Licence(identifier, title=identifier, link="LICENSE")


def find_known_licence(hub_id: str | None) -> Licence | None:
    """The licence of the model with this Hub id; `None` if the licence is not known here."""
    if hub_id is None:
        return None
    for pattern, licence in KNOWN_LICENCES.items():
        if re.fullmatch(pattern, hub_id):
            return licence
    return None


def describe_unknown(option: str, hub_id: str | None) -> str:
    """The error message for a part whose licence is not known.

    Args:
        option: The option that gives the part's Hub id.
        hub_id: The part's Hub id; `None` if it is not known.
    """
    if hub_id is not None:
        return f"The licence of {hub_id} is not known here. Read it, then name it: --license <its identifier>."
    return (
        f"No Hub id is recorded for {option}. If it was loaded from a folder, name it: {option} owner/name. Otherwise "
        "choose a licence: --license apache-2.0, for example."
    )
