"""Writes Jinja chat templates that use a language model's own turn format, and that can hold pictures.

Every template puts the assistant's text and its end-of-turn token inside `{% generation %}`. When transformers
tokenizes a conversation, it can tell which tokens are inside, and training gives labels to these tokens alone. Each
part of a message is on a line of its own, as in LLaVA's "<image>\\nquestion".
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

    - User turn: `user + content + user_end`.
    - System turn: `system + content + user_end`. With `system=None` there are no system turns: the system message
      comes at the beginning of the next user turn.
    - Assistant turn: `assistant + answer_start + content + end_of_turn + separator`. The model is trained on
      `answer_start + content + end_of_turn`.
    """

    name: str
    system: str | None
    user: str
    user_end: str
    assistant: str
    end_of_turn: str
    separator: str = ""
    answer_start: str = ""


def _role_format(
    name: str, start: str, end: str, separator: str = "", assistant: str = "assistant", has_system: bool = True
) -> ChatFormat:
    """A format in which all turns start and end in the same way, except for the role's name.

    Args:
        name: The format's name.
        start: What a turn starts with. `{}` stands for the role.
        end: The token that ends a turn.
        separator: What comes between two turns.
        assistant: The format's name of the assistant's role.
        has_system: Whether there are system turns.
    """
    system = start.format("system") if has_system else None
    return ChatFormat(
        name=name,
        system=system,
        user=start.format("user"),
        user_end=end + separator,
        assistant=start.format(assistant),
        end_of_turn=end,
        separator=separator,
    )


FORMATS = (
    _role_format("ChatML", "<|im_start|>{}\n", "<|im_end|>", separator="\n"),
    _role_format("Llama 3", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    _role_format("Gemma", "<start_of_turn>{}\n", "<end_of_turn>", separator="\n", assistant="model", has_system=False),
)

# The template of all formats. `_write_template` replaces `@SYSTEM_TURN@` by one of the two texts below the template.
# `_fill` replaces `@image@` and `@bos@` by a token, and every other `@name@` by the field of `ChatFormat` with this
# name.
# In a format without system turns, `ns.system` holds a system message until the next user turn, which begins with the
# message. If no user turn follows, the system message becomes a user turn itself.
# The `-` inside Jinja's tags drops the line breaks and spaces that make this text readable. A line break that belongs
# to the prompt is written inside an expression.
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
        {{- @user@ + ns.system + @user_end@ if ns.system else "" -}}
        {%- set ns.system = "" -%}
        {{- @assistant@ -}}
        {%- generation -%}
            {{- @answer_start@ + render(message["content"]) + @end_of_turn@ -}}
        {%- endgeneration -%}
        {{- @separator@ -}}
    {%- elif message["role"] == "system" -%}
        @SYSTEM_TURN@
    {%- elif message["role"] == "user" -%}
        {{- @user@ + (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) + @user_end@ -}}
        {%- set ns.system = "" -%}
    {%- else -%}
        {{- raise_exception("Unknown role " + message["role"] + "; allowed are system, user and assistant.") -}}
    {%- endif -%}
{%- endfor -%}
{{- @user@ + ns.system + @user_end@ if ns.system else "" -}}
{{- @assistant@ if add_generation_prompt else "" -}}
"""

# The text for `@SYSTEM_TURN@` in a format with system turns.
_SYSTEM_TURN = '{{- @system@ + render(message["content"]) + @user_end@ -}}'
# The text for `@SYSTEM_TURN@` in a format without system turns.
_SYSTEM_BEFORE_USER = (
    '{%- set ns.system = (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) -%}'
)

# LLaVA's stage 1 ("plain") writes the pictures, the caption and a line break. It leaves the human's text out, since
# this text is only a request for a caption.
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
    """Choose the chat format of a tokenizer, which is the first of these that exists:

    1. the format of `FORMATS` whose end-of-turn token the tokenizer has,
    2. the format that the tokenizer's own chat template writes (`"the language model's own"`),
    3. LLaVA-1.5's format (`"Vicuna"`).

    Raises:
        UserError: if the tokenizer has no known end-of-turn token and no `eos_token` either.
    """
    vocabulary = tokenizer.get_vocab()
    for known_format in FORMATS:
        if known_format.end_of_turn in vocabulary:
            return known_format

    if tokenizer.eos_token is None:
        raise UserError(
            "The tokenizer has no `eos_token`, so answers have no end token. Set it in tokenizer_config.json."
        )
    own_format = _read_format(tokenizer)
    if own_format is not None:
        return own_format
    return ChatFormat(
        name="Vicuna",
        system="",
        user="USER: ",
        user_end=" ",
        assistant="ASSISTANT:",
        answer_start=" ",
        end_of_turn=tokenizer.eos_token,
    )


def _read_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat | None:
    """Read a tokenizer's chat format from what its own chat template writes.

    The template is made to write the question "Q1", the question with the answer "A1", and the question after a system
    message "S1". The format's texts are what stands around "Q1", "A1" and "S1".

    Returns:
        `None` if there is no chat template, or if no [`ChatFormat`] writes the same text.
    """
    if not tokenizer.chat_template:
        return None
    # The comments below say which fields of `ChatFormat` each text consists of.
    try:
        # user Q1 user_end
        question = _render(tokenizer, ["Q1"])
        # user Q1 user_end assistant
        prompt = _render(tokenizer, ["Q1"], add_generation_prompt=True)
        # user Q1 user_end assistant answer_start A1 end_of_turn separator
        answered = _render(tokenizer, ["Q1", "A1"])
    except Exception:  # a model's Jinja template may raise anything
        return None
    # system S1 user_end user Q1 user_end
    with_system = _render_system(tokenizer, ["Q1"], "S1")

    user, _, user_end = question.partition("Q1")
    answer_start, _, after_answer = answered.removeprefix(prompt).partition("A1")
    system = None
    if with_system is not None and with_system.endswith(f"S1{user_end}{question}"):
        system, _, _ = with_system.partition("S1")
    candidate = ChatFormat(
        name="the language model's own",
        system=system,
        user=user,
        user_end=user_end,
        assistant=prompt.removeprefix(question),
        answer_start=answer_start,
        end_of_turn=tokenizer.eos_token,
        separator=after_answer.removeprefix(tokenizer.eos_token),
    )
    if _writes_same_text(tokenizer, candidate):
        return candidate
    return None


def _writes_same_text(tokenizer: PreTrainedTokenizerBase, candidate: ChatFormat) -> bool:
    """Whether a format writes the same text as the tokenizer's own template.

    Conversations of one, two and four turns are compared, also with a system message if the tokenizer's template
    writes one.
    """
    # These conversations hold no pictures, so the template never writes its image token.
    template = _write_template(candidate, tokenizer, image_token=IMAGE_MARK)
    for texts in (["One?"], ["One?", "Two."], ["One?", "Two.", "Three?", "Four."]):
        if _render(tokenizer, texts, chat_template=template) != _render(tokenizer, texts):
            return False

        expected = _render_system(tokenizer, texts, "Be brief.")
        if expected is None:
            continue
        if _render(tokenizer, texts, "Be brief.", chat_template=template) != expected:
            return False
    return True


def _render(tokenizer: PreTrainedTokenizerBase, texts: list[str], system: str | None = None, **options: Any) -> str:
    """What a chat template writes for a conversation, without the BOS token.

    Args:
        tokenizer: The tokenizer. Its own chat template is used unless `options` name another.
        texts: The texts of user and assistant alternately, beginning with the user's.
        system: The system message, if there is one.
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
    """What the tokenizer's own chat template writes for a conversation with a system message.

    Returns:
        `None` if the template refuses or drops the system message.
    """
    try:
        rendered = _render(tokenizer, texts, system)
    except Exception:  # a model's Jinja template may raise anything
        return None
    if system not in rendered:
        return None
    return rendered


def _write_template(chat_format: ChatFormat, tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """The Jinja template of a chat format, for one tokenizer and one image token."""
    system_turn = _SYSTEM_BEFORE_USER if chat_format.system is None else _SYSTEM_TURN
    template = _CHAT_TEMPLATE.replace("@SYSTEM_TURN@", system_turn)
    return _fill(template, tokenizer, {"image": image_token, **asdict(chat_format)})


def _fill(template: str, tokenizer: PreTrainedTokenizerBase, texts: dict[str, str | None]) -> str:
    """A template in which each `@name@` is replaced by the text of this name, as a Jinja string.

    `@bos@` becomes Jinja's variable `bos_token` if the tokenizer starts every text with BOS. (A processor doesn't add
    BOS a second time.)
    """
    input_ids = tokenizer("a").input_ids  # "a" stands for any text
    adds_bos = tokenizer.bos_token_id is not None and input_ids[:1] == [tokenizer.bos_token_id]
    bos = "bos_token" if adds_bos else '""'
    template = template.replace("@bos@", bos)
    for name, text in texts.items():
        template = template.replace(f"@{name}@", json.dumps(text))
    return template
