"""The licence of a release. It is known from the models that it was made from, or given; otherwise it is refused."""

import re
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Licence:
    """A licence, and what it asks of a model that is made from one under it.

    Attributes:
        identifier: The Hub's name for it.
        title: Its name on the card.
        link: Where the card's reader finds it.
        name_prefix: What the new model's name has to begin with.
        notice: Text of the file `NOTICE`.
        attribution: A sentence that the card has to show.
    """

    identifier: str
    title: str
    link: str
    name_prefix: str = ""
    notice: str | None = None
    attribution: str | None = None


APACHE = Licence("apache-2.0", "Apache License 2.0", "https://www.apache.org/licenses/LICENSE-2.0")

# Section 1.b of the agreement asks for a copy of it, "Built with Llama", the name, and the notice.
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

# By the Hub id of a base model. Sizes are named, since Qwen2.5 has other licences at 3B and 72B.
KNOWN: dict[str, Licence] = {
    r"meta-llama/Llama-3\.2-[13]B(-Instruct)?": LLAMA_3_2,
    r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B(-Instruct)?": APACHE,
    r"Qwen/Qwen3-[\d.]+B(-Base)?": APACHE,
    r"HuggingFaceTB/SmolLM2-(135M|360M|1\.7B)(-Instruct)?": APACHE,
    r"google/siglip2?-[\w-]+": APACHE,
}


def choose_licence(text_model: str | None, vision_model: str | None, given: str | None) -> Licence:
    """The licence of a model that is made from these two.

    Args:
        text_model: Hub id of the language model; `None` if it is not from the Hub.
        vision_model: Hub id of the vision encoder; `None` if it is not from the Hub.
        given: Identifier of a licence, for what no known licence covers.

    Raises:
        UserError: if the licence of a part is neither known nor given, or two of them ask more than Apache's.
    """
    licences = []
    if given is not None:
        licences.append(named_licence(given))

    for option, base_model in (("--text_model", text_model), ("--vision_model", vision_model)):
        known = known_licence(base_model)
        if known is not None:
            licences.append(known)
        elif given is None:
            raise UserError(describe_unknown(option, base_model))

    # Apache's lets a larger work be under another licence.
    stricter = [licence for licence in dict.fromkeys(licences) if licence is not APACHE]
    if len(stricter) > 1:
        titles = " and the ".join(licence.title for licence in stricter)
        raise UserError(f"The model's parts are under the {titles}, and a release can have only one licence.")
    return stricter[0] if stricter else APACHE


def named_licence(identifier: str) -> Licence:
    """The licence that a user gives. Of one that is not known here, the card links the copy in the release."""
    for licence in (APACHE, LLAMA_3_2):
        if licence.identifier == identifier:
            return licence
    return Licence(identifier, title=identifier, link="LICENSE")


def known_licence(base_model: str | None) -> Licence | None:
    """The licence of a base model by its Hub id; `None` if it is not known here."""
    if base_model is None:
        return None
    for pattern, licence in KNOWN.items():
        if re.fullmatch(pattern, base_model):
            return licence
    return None


def describe_unknown(option: str, base_model: str | None) -> str:
    """What to do about a part whose licence is not known."""
    if base_model is not None:
        return f"The licence of {base_model} is not known here. Read it, then name it: --license <its identifier>."
    return (
        f"No Hub id is recorded for {option}. If it was loaded from a folder, name it: {option} owner/name. Otherwise "
        "choose a licence: --license apache-2.0, for example."
    )
