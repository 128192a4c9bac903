"""Chat templates: a language model's own turn format, with pictures, and with the trained spans marked.

Every template marks what the assistant says, end-of-turn token included, with `{% generation %}`, so one collator
serves both stages. Each part of a message is on a line of its own, as in LLaVA's "<image>\\nquestion".
"""

import json
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatFormat:
    """How a family of language models writes a conversation.

    A user turn is `user + content + turn_end`, a system turn likewise; with `system=None` the system message is
    prepended to the next user turn. An assistant turn is `assistant + answer_start + content + end_of_turn +
    separator`, of which answer_start, content and end_of_turn are trained.
    """

    name: str
    system: str | None
    user: str
    turn_end: str
    assistant: str
    end_of_turn: str
    separator: str = ""
    answer_start: str = ""


def _by_role(
    name: str, start: str, end: str, separator: str = "", assistant: str = "assistant", has_system: bool = True
) -> ChatFormat:
    """A format whose turns all begin with `start`, which names the role, and end alike."""
    system = start.format("system") if has_system else None
    return ChatFormat(name, system, start.format("user"), end + separator, start.format(assistant), end, separator)


FORMATS = (
    _by_role("ChatML", "<|im_start|>{}\n", "<|im_end|>", "\n"),
    _by_role("Llama 3", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    _by_role("Gemma", "<start_of_turn>{}\n", "<end_of_turn>", "\n", assistant="model", has_system=False),
)

# The outer `-` marks drop the line breaks that make this readable. A line break that belongs to the prompt is part of
# an expression, because Jinja drops the one that follows a block tag.
_CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {{- "" if loop.first else "\\n" -}}
            {{- @image@ if part["type"] == "image" else part["text"] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- @bos@ -}}
{%- set ns = namespace(system="") -%}
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {{- @user@ + ns.system + @turn_end@ if ns.system else "" -}}
        {%- set ns.system = "" -%}
        {{- @assistant@ -}}
        {%- generation -%}
            {{- @answer_start@ + render(message["content"]) + @end_of_turn@ -}}
        {%- endgeneration -%}
        {{- @separator@ -}}
    {%- elif message["role"] == "system" -%}
        @SYSTEM_TURN@
    {%- elif message["role"] == "user" -%}
        {{- @user@ + (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) + @turn_end@ -}}
        {%- set ns.system = "" -%}
    {%- else -%}
        {{- raise_exception("Unknown role " + message["role"] + "; allowed are system, user and assistant.") -}}
    {%- endif -%}
{%- endfor -%}
{{- @user@ + ns.system + @turn_end@ if ns.system else "" -}}
{{- @assistant@ if add_generation_prompt else "" -}}
"""

# LLaVA's stage 1: the pictures, the caption, a line break. The human's text has no content there and is left out.
_PLAIN_TEMPLATE = """\
{{- @bos@ -}}
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {%- generation -%}
            {{- message["content"] + "\\n" -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in message["content"] if part["type"] == "image" -%}
            {{- @image@ -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """The format whose end-of-turn token the tokenizer has; LLaVA-1.5's (Vicuna) if it has none of them.

    Raises:
        ValueError: if the tokenizer has no known end-of-turn token and no `eos_token` either.
    """
    vocabulary = tokenizer.get_vocab()
    for known in FORMATS:
        if known.end_of_turn in vocabulary:
            return known
    if tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has no `eos_token`, so answers have no end token. Set it in tokenizer_config.json."
        )
    return ChatFormat("Vicuna", "", "USER: ", " ", "ASSISTANT:", tokenizer.eos_token, answer_start=" ")


def chat_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of the tokenizer's own chat format, for messages with text and `{"type": "image"}` parts."""
    style = chat_format(tokenizer)
    system = '{{- @system@ + render(message["content"]) + @turn_end@ -}}'
    if style.system is None:
        system = '{%- set ns.system = (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) -%}'
    return _fill(_CHAT_TEMPLATE.replace("@SYSTEM_TURN@", system), tokenizer, image_token, asdict(style))


def plain_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of LLaVA's stage 1 ("plain"): images, caption, line break."""
    return _fill(_PLAIN_TEMPLATE, tokenizer, image_token, {})


def _fill(template: str, tokenizer: PreTrainedTokenizerBase, image_token: str, texts: dict[str, str | None]) -> str:
    # A tokenizer that starts every text with BOS expects it here too; processors then don't add it a second time.
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    template = template.replace("@bos@", "bos_token" if adds_bos else '""')
    for name, text in {"image": image_token, **texts}.items():
        template = template.replace(f"@{name}@", json.dumps(text))
    return template
