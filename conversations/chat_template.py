"""Chat templates in a language model's own turn format, to which they add pictures and marks of the trained text.

Every template puts what the assistant says, with its end-of-turn token, inside `{% generation %}`. The labels of both
training stages are made from these marks. Each part of a message is on a line of its own, as in LLaVA's
"<image>\\nquestion".
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

    - User turn: `user + content + turn_end`.
    - System turn: `system + content + turn_end`. With `system=None` there are no system turns: the system message
      comes at the beginning of the next user turn.
    - Assistant turn: `assistant + answer_start + content + end_of_turn + separator`. The model is trained on
      `answer_start + content + end_of_turn`.
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
    """A format in which all turns end alike, and begin alike but for the role, which stands at `{}` in `start`."""
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

# `_fill` puts texts in place of the names between `@`. The `-` inside Jinja's tags drops the line breaks and spaces
# that make this text readable. A line break that belongs to the prompt is written inside an expression.
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

# What stands at `@SYSTEM_TURN@` where a system message has a turn of its own.
_SYSTEM_TURN = '{{- @system@ + render(message["content"]) + @turn_end@ -}}'
# What stands there where the next user turn begins with the system message.
_SYSTEM_BEFORE_USER = (
    '{%- set ns.system = (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) -%}'
)

# LLaVA's stage 1 ("plain") writes the pictures, the caption and a line break. It leaves the human's text out, since
# this is only a request for a caption.
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
    """The Jinja template of the tokenizer's own chat format, for messages of text and `{"type": "image"}` parts."""
    return _write_template(chat_format(tokenizer), tokenizer, image_token)


def plain_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """The Jinja template of LLaVA's stage 1 ("plain"): pictures, caption, line break."""
    return _fill(_PLAIN_TEMPLATE, tokenizer, {"image": image_token})


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """The tokenizer's chat format.

    It is the first of these that there is:

    1. the one of `FORMATS` whose end-of-turn token the tokenizer has,
    2. the format that the tokenizer's own chat template shows (`"the language model's own"`),
    3. LLaVA-1.5's format (`"Vicuna"`).

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
    """Read a tokenizer's chat format from what its own chat template writes.

    The template is given a conversation with the texts Q1 (question), A1 (answer) and S1 (system message), and the
    format's texts are what stands between them.

    Returns:
        `None` if there is no chat template, or if no [`ChatFormat`] writes the same text.
    """
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
    if _writes_the_same(tokenizer, candidate):
        return candidate
    return None


def _writes_the_same(tokenizer: PreTrainedTokenizerBase, candidate: ChatFormat) -> bool:
    """Whether a format writes the same text as the tokenizer's own template.

    Conversations of one to four turns are compared, also with a system message if the tokenizer's template writes one.
    """
    template = _write_template(candidate, tokenizer, image_token=IMAGE_MARK)
    for texts in (["One?"], ["One?", "Two."], ["One?", "Two.", "Three?", "Four."]):
        if _render(tokenizer, texts, chat_template=template) != _render(tokenizer, texts):
            return False
        own_text = _render_system(tokenizer, texts, "Be brief.")
        if own_text is not None and _render(tokenizer, texts, "Be brief.", chat_template=template) != own_text:
            return False
    return True


def _render(tokenizer: PreTrainedTokenizerBase, texts: list[str], system: str | None = None, **options: Any) -> str:
    """What a chat template writes for a conversation, without the BOS token.

    Args:
        tokenizer: The tokenizer, whose own chat template is used unless `options` have another.
        texts: Questions and answers in turn, beginning with a question.
        system: The system message, if there is to be one.
        options: More options for `apply_chat_template`.
    """
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for number, text in enumerate(texts):
        role = "user" if number % 2 == 0 else "assistant"
        messages.append({"role": role, "content": text})

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return rendered.removeprefix(tokenizer.bos_token or "")


def _render_system(tokenizer: PreTrainedTokenizerBase, texts: list[str], system: str) -> str | None:
    """What the tokenizer's own template writes with a system message; `None` if it refuses or drops the message."""
    try:
        rendered = _render(tokenizer, texts, system)
    except Exception:  # a model's Jinja template may raise anything
        return None
    if system not in rendered:
        return None
    return rendered


def _write_template(chat_format: ChatFormat, tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """The Jinja template of a format."""
    system_turn = _SYSTEM_BEFORE_USER if chat_format.system is None else _SYSTEM_TURN
    template = _CHAT_TEMPLATE.replace("@SYSTEM_TURN@", system_turn)
    return _fill(template, tokenizer, {"image": image_token, **asdict(chat_format)})


def _fill(template: str, tokenizer: PreTrainedTokenizerBase, texts: dict[str, str | None]) -> str:
    """A template in which each `@name@` is replaced by the text of this name, as a Jinja string."""
    # If the tokenizer starts every text with BOS, so does the template. Processors don't add BOS a second time.
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    template = template.replace("@bos@", "bos_token" if adds_bos else '""')
    for name, text in texts.items():
        template = template.replace(f"@{name}@", json.dumps(text))
    return template
