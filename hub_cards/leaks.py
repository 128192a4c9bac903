"""What must not leave the machine: secrets, and names of the machine itself."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.plugins.base import BasePlugin, RegexBasedDetector
from detect_secrets.plugins.ip_public import IPPublicDetector
from detect_secrets.plugins.keyword import KeywordDetector

from hub_cards.facts import parse_json


# Secrets that detect-secrets 1.5 does not know.
SECRETS = {
    "Hugging Face Token": re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    "GitHub Fine-grained Token": re.compile(r"\bgithub_pat_\w{20,}"),
    "Anthropic Key": re.compile(r"\bsk-ant-[\w-]{20,}"),
    "Google API Key": re.compile(r"\bAIza[\w-]{35}"),
    "AWS Secret Key": re.compile(r"aws\w*(?:secret|key)\w*\W{1,6}[A-Za-z0-9/+]{40}\b", re.IGNORECASE),  # not in quotes
    "npm Token": re.compile(r"\bnpm_[A-Za-z0-9]{36}"),
    "Weights & Biases Key": re.compile(r"wandb[\w.]*key\W{1,4}[0-9a-f]{40}|\bwandb_v1_\w{20,}", re.IGNORECASE),
}
# Without its entropy detectors, which mistake hashes for secrets, and without public addresses.
KINDS: Mapping[str, type[BasePlugin]] = get_mapping_from_secret_type_to_class()
DETECTORS = [
    kind()
    for kind in KINDS.values()
    if kind is KeywordDetector or (issubclass(kind, RegexBasedDetector) and kind is not IPPublicDetector)
]
MACHINES = {
    "a path of a machine": re.compile(
        r"file:/+[\w.~-]+"
        r"|(?<![\w./<~}:])/(?!v\d+/)[\w.@+-]+(?:/[\w.@+-]+)+"  # two or more segments, but not a route like /v1/models
        r"|(?<!\w):/[\w.@+-]+(?:/[\w.@+-]+)+|(?<=\w):/(?!/)[\w.@+-]+(?:/[\w.@+-]+)+"  # after host:
        r"|(?<![\w./~])~(?!\d)[\w-]*/[\w.-]+"
        r"|(?<!\w)[A-Za-z]:\\{1,2}[\w.-]+"
        r"|\\\\[\w.-]+\\[\w.$-]+"  # a share
    ),
    "an address of a bucket or cluster": re.compile(
        r"\b(?:s3[an]?|gs|gcs|hdfs|abfss?|wasbs?|dbfs|oss|cos|nfs|smb|cifs|s?ftp|ssh)://[\w./-]+"
    ),
    "a name of a private network": re.compile(
        r"\b[\w-]+(?:\.[\w-]+)*\.(?:internal|local|localdomain|lan|intranet)\b"
        r"|\bhttps?://[A-Za-z][\w-]*(?!\.?[\w-])"  # a host without a domain
        r"|\b(?:f[cd][\da-f]{2}|fe80):[\da-f:]*[\da-f]\b"
    ),
}
ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")


def find_secrets(text: str) -> Iterator[str]:
    """Kinds of the secrets that a text holds; never the secrets themselves."""
    for detector in DETECTORS:
        if any(True for _ in detector.analyze_string(text)):
            yield detector.secret_type
    for kind, pattern in SECRETS.items():
        if pattern.search(text):
            yield kind


def find_machines(text: str) -> Iterator[str]:
    """Names of a machine, a share, a bucket or a private network that a text holds, the first of each kind."""
    for kind, pattern in MACHINES.items():
        found = pattern.search(text)
        if found:
            yield f"{kind}, {found[0]}"
    for found in ADDRESS.finditer(text):
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            continue
        if not address.is_global and not found[0].startswith("0."):  # 0.1.2.3 is a version
            yield f"an address of a private network, {address}"
            return


def as_lines(value: Any, key: str = "") -> Iterator[str]:
    """The strings in a JSON value, one per line after its key, without the escapes that hide a pattern."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from as_lines(entry, str(name))
            if not isinstance(entry, str):
                yield str(name)
    elif isinstance(value, list):
        for entry in value:
            yield from as_lines(entry, key)
    elif isinstance(value, str):
        yield f'{key} = "{value}"'


def plain_text(text: str) -> str:
    """A text unchanged, or if `parse_json` accepts it, its strings."""
    try:
        return "\n".join(as_lines(parse_json(text)))
    except ValueError:
        return text
