"""Chat templates: a language model's own turn format, with pictures, and with the trained spans marked.

Every template marks what the assistant says, end-of-turn token included, with `{% generation %}`, so one collator
serves both stages. Each part of a message is on a line of its own, as in LLaVA's "<image>\\nquestion".
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from conversations.layouts import IMAGE_MARK


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
    return ChatFormat(
        name=name,
        system=start.format("system") if has_system else None,
        user=start.format("user"),
        turn_end=end + separator,
        assistant=start.format(assistant),
        end_of_turn=end,
        separator=separator,
    )


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

# A system message that has a turn of its own, and one that the next user turn begins with.
_SYSTEM_TURN = '{{- @system@ + render(message["content"]) + @turn_end@ -}}'
_SYSTEM_BEFORE_USER = (
    '{%- set ns.system = (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) -%}'
)

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


def chat_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of the tokenizer's own chat format, for messages with text and `{"type": "image"}` parts."""
    return _write_template(chat_format(tokenizer), tokenizer, image_token)


def plain_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of LLaVA's stage 1 ("plain"): images, caption, line break."""
    return _fill(_PLAIN_TEMPLATE, tokenizer, {"image": image_token})


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """The tokenizer's chat format: a known one by its end-of-turn token, else the one that its own chat template shows
    (`"the language model's own"`), else LLaVA-1.5's (`"Vicuna"`).

    Raises:
        UserError: if the tokenizer has no known end-of-turn token and no `eos_token` either.
    """
    vocabulary = tokenizer.get_vocab()
    for known in FORMATS:
        if known.end_of_turn in vocabulary:
            return known

    if tokenizer.eos_token is None:
        raise UserError(
            "The tokenizer has no `eos_token`, so answers have no end token. Set it in tokenizer_config.json."
        )
    vicuna = ChatFormat(
        name="Vicuna",
        system="",
        user="USER: ",
        turn_end=" ",
        assistant="ASSISTANT:",
        answer_start=" ",
        end_of_turn=tokenizer.eos_token,
    )
    return _read_format(tokenizer) or vicuna


def _read_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat | None:
    """The format that a tokenizer's own chat template shows, if a [`ChatFormat`] can say it; else `None`."""
    if not tokenizer.chat_template:
        return None
    try:
        question = _render(tokenizer, ["Q1"])
        asked = _render(tokenizer, ["Q1"], add_generation_prompt=True)
        answered = _render(tokenizer, ["Q1", "A1"])
    except Exception:  # a model's Jinja template may raise anything
        return None
    instructed = _render_system(tokenizer, ["Q1"], "S1")

    user, _, turn_end = question.partition("Q1")
    answer_start, _, after_answer = answered.removeprefix(asked).partition("A1")
    system = None
    if instructed is not None and instructed.endswith(f"S1{turn_end}{question}"):
        system = instructed.partition("S1")[0]
    candidate = ChatFormat(
        name="the language model's own",
        system=system,
        user=user,
        turn_end=turn_end,
        assistant=asked.removeprefix(question),
        answer_start=answer_start,
        end_of_turn=tokenizer.eos_token,
        separator=after_answer.removeprefix(tokenizer.eos_token),
    )
    return candidate if _writes_the_same(tokenizer, candidate) else None


def _writes_the_same(tokenizer: PreTrainedTokenizerBase, candidate: ChatFormat) -> bool:
    """Whether a format writes what the tokenizer's own template does, of several turns, and with a system message
    where that has a place for it."""
    template = _write_template(candidate, tokenizer, image_token=IMAGE_MARK)
    for texts in (["One?"], ["One?", "Two."], ["One?", "Two.", "Three?", "Four."]):
        if _render(tokenizer, texts, chat_template=template) != _render(tokenizer, texts):
            return False
        own = _render_system(tokenizer, texts, "Be brief.")
        if own is not None and _render(tokenizer, texts, "Be brief.", chat_template=template) != own:
            return False
    return True


def _render(tokenizer: PreTrainedTokenizerBase, texts: list[str], system: str | None = None, **options: Any) -> str:
    """Questions and answers in turn, as the tokenizer's chat template writes them, less what begins every text."""
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for number, text in enumerate(texts):
        role = "user" if number % 2 == 0 else "assistant"
        messages.append({"role": role, "content": text})

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return rendered.removeprefix(tokenizer.bos_token or "")


def _render_system(tokenizer: PreTrainedTokenizerBase, texts: list[str], system: str) -> str | None:
    """As `_render`, with a system message; `None` where the tokenizer's own template refuses it or drops it."""
    try:
        rendered = _render(tokenizer, texts, system)
    except Exception:  # a model's Jinja template may raise anything
        return None
    return rendered if system in rendered else None


def _write_template(chat_format: ChatFormat, tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of a format."""
    system_turn = _SYSTEM_BEFORE_USER if chat_format.system is None else _SYSTEM_TURN
    template = _CHAT_TEMPLATE.replace("@SYSTEM_TURN@", system_turn)
    return _fill(template, tokenizer, {"image": image_token, **asdict(chat_format)})


def _fill(template: str, tokenizer: PreTrainedTokenizerBase, texts: dict[str, str | None]) -> str:
    """A template with texts, as Jinja strings, in place of their `@names@`."""
    # A tokenizer that starts every text with BOS expects it here too; processors then don't add it a second time.
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    template = template.replace("@bos@", "bos_token" if adds_bos else '""')
    for name, text in texts.items():
        template = template.replace(f"@{name}@", json.dumps(text))
    return template
