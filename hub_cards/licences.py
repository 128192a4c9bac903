"""Choose the licence of a release from the licences of its parts.

The licence of a part is known by its Hub id, or the user gives one. If neither is the case, there is no release.
"""

import re
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Licence:
    """A licence, and what it asks of a new model whose part is under it.

    Attributes:
        identifier: The Hub's name for the licence.
        title: The licence's name on the card.
        link: Where the card's reader finds the licence.
        name_prefix: What the new model's name has to begin with.
        notice: Text of the file `NOTICE`; `None` if the licence asks for no such file.
        attribution: A sentence that the card has to show; `None` if the licence asks for none.
    """

    identifier: str
    title: str
    link: str
    name_prefix: str = ""
    notice: str | None = None
    attribution: str | None = None


APACHE = Licence("apache-2.0", "Apache License 2.0", "https://www.apache.org/licenses/LICENSE-2.0")

# Section 1.b of the agreement asks for a copy of the agreement, the sentence "Built with Llama", a name that begins
# with "Llama", and the notice.
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

# Licences by a pattern of the base model's Hub id. The patterns name sizes, since Qwen2.5 has other licences at 3B and
# 72B.
KNOWN: dict[str, Licence] = {
    r"meta-llama/Llama-3\.2-[13]B(-Instruct)?": LLAMA_3_2,
    r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?": APACHE,
    r"Qwen/Qwen3-[\d.]+B(-Base)?": APACHE,
    r"HuggingFaceTB/SmolLM2-(135M|360M|1\.7B)(-Instruct)?": APACHE,
    r"google/siglip2?-[\w-]+": APACHE,
}


def choose_licence(text_model: str | None, vision_model: str | None, given: str | None) -> Licence:
    """The licence of a model that is made from a language model and a vision encoder.

    Args:
        text_model: Hub id of the language model; `None` if it is not from the Hub.
        vision_model: Hub id of the vision encoder; `None` if it is not from the Hub.
        given: Identifier of the licence that the user names, for a part whose licence is not known.

    Raises:
        UserError: if the licence of a part is neither known nor given, or if the parts are under two different
            licences, neither of which is Apache's.
    """
    licences = []
    if given is not None:
        licences.append(find_named_licence(given))

    for option, base_model in (("--text_model", text_model), ("--vision_model", vision_model)):
        known_licence = find_known_licence(base_model)
        if known_licence is not None:
            licences.append(known_licence)
        elif given is None:
            raise UserError(describe_unknown(option, base_model))

    # A part under Apache's licence may go into a work under another licence, so only the others decide.
    other_licences = [licence for licence in dict.fromkeys(licences) if licence is not APACHE]
    if len(other_licences) > 1:
        titles = " and the ".join(licence.title for licence in other_licences)
        raise UserError(f"The model's parts are under the {titles}, and a release can have only one licence.")
    if other_licences:
        return other_licences[0]
    return APACHE


def find_named_licence(identifier: str) -> Licence:
    """The licence that a user names.

    The card links the text of an unknown licence in the release's own file `LICENSE`.
    """
    for licence in (APACHE, LLAMA_3_2):
        if licence.identifier == identifier:
            return licence
    return Licence(identifier, title=identifier, link="LICENSE")


def find_known_licence(base_model: str | None) -> Licence | None:
    """The licence of a base model by its Hub id; `None` if it is not known here."""
    if base_model is None:
        return None
    for pattern, licence in KNOWN.items():
        if re.fullmatch(pattern, base_model):
            return licence
    return None


def describe_unknown(option: str, base_model: str | None) -> str:
    """The message for a part whose licence is not known: what is missing, and what to do."""
    if base_model is not None:
        return f"The licence of {base_model} is not known here. Read it, then name it: --license <its identifier>."
    return (
        f"No Hub id is recorded for {option}. If it was loaded from a folder, name it: {option} owner/name. Otherwise "
        "choose a licence: --license apache-2.0, for example."
    )
