"""Writes Jinja chat templates that use a language model's own turn format, and that can hold pictures.

Every template puts the assistant's text and its end-of-turn token inside `{% generation %}`. When transformers
tokenizes a conversation, it can tell which tokens are inside, and training gives labels to these tokens alone.

Each part of a message is on a line of its own, as in LLaVA's "<image>\\nquestion". Line breaks around a part's text
are left out, and so is white space around the message of a user or system. An answer stays as it is written.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from normllava.conversations.layouts import IMAGE_MARK
from normllava.errors import UserError


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

# The template of all formats. `write_template` replaces `@SYSTEM_TURN@` by one of the two texts below the template.
# `_fill` replaces `@image@` and `@bos@` by a token, and every other `@name@` by the field of `ChatFormat` with this
# name.
# In a format without system turns, `ns.system` holds a system message until the next user turn, which begins with the
# message. If no user turn follows, the system message becomes a user turn itself.
# The `-` inside Jinja's tags drops the line breaks and spaces that make this text readable. A line break that belongs
# to the prompt is written inside an expression.
_CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- set ns = namespace(lines=[]) -%}
        {%- for part in content -%}
            {%- if part["type"] == "image" -%}
                {%- set ns.lines = ns.lines + [@image@] -%}
            {%- elif part["type"] != "text" -%}
                {{- raise_exception("A message has a part of type " + part["type"] + ", not text or image.") -}}
            {%- elif part["text"].strip("\\n") -%}
                {%- set ns.lines = ns.lines + [part["text"].strip("\\n")] -%}
            {%- endif -%}
        {%- endfor -%}
        {{- ns.lines | join("\\n") | trim -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro render_answer(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part["type"] != "text" -%}
                {{- raise_exception("An answer has a part of type " + part["type"] + ", not text.") -}}
            {%- endif -%}
        {%- endfor -%}
        {{- content | map(attribute="text") | join("\\n") -}}
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
            {{- @answer_start@ + render_answer(message["content"]) + @end_of_turn@ -}}
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
            {{- message["content"] | map(attribute="text") | join("\\n") + "\\n" -}}
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
    return write_template(chat_format(tokenizer), tokenizer, image_token)


def plain_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """The Jinja template of LLaVA's stage 1 ("plain"): pictures, caption, line break."""
    return _fill(_PLAIN_TEMPLATE, tokenizer, {"image": image_token})


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """The chat format that [`find_format`] finds for a tokenizer, otherwise LLaVA-1.5's format (`"Vicuna"`).

    Raises:
        UserError: if the format is Vicuna's, which ends answers with `eos_token`, and the tokenizer has none.
    """
    found_format = find_format(tokenizer)
    if found_format is not None:
        return found_format
    if tokenizer.eos_token is None:
        raise UserError(
            "The tokenizer has no `eos_token`, so answers have no end token. Set it in tokenizer_config.json."
        )
    return _vicuna(tokenizer)


def find_format(tokenizer: PreTrainedTokenizerBase, processor_template: str | None = None) -> ChatFormat | None:
    """The format in which a model's own chat template writes conversations.

    Args:
        tokenizer: The model's tokenizer.
        processor_template: The chat template of the model's processor, whose messages have parts. By default the
            tokenizer's own template is read.

    Returns:
        - The format that writes the same text as the template. Its name is `"the language model's own"` if it is no
          known format.
        - Otherwise the known format (those of `FORMATS` and Vicuna's) whose turns the template writes, with more text
          around them, such as a default system message.
        - Without a template, the format of `FORMATS` whose end-of-turn token the tokenizer has.
        - `None` if there is no such format.
    """
    vocabulary = tokenizer.get_vocab()
    if not (processor_template or tokenizer.chat_template):
        for known_format in FORMATS:
            if known_format.end_of_turn in vocabulary:
                return known_format
        return None

    template = _OwnTemplate(tokenizer, processor_template)
    known_formats = [known_format for known_format in FORMATS if known_format.end_of_turn in vocabulary]
    if tokenizer.eos_token is not None:
        known_formats.append(_vicuna(tokenizer))

    own_format = _read_format(template)
    if own_format is not None:
        for known_format in known_formats:
            if replace(own_format, name=known_format.name) == known_format:
                return known_format
        return own_format
    for known_format in known_formats:
        if _writes_turns(template, known_format):
            return known_format
    return None


def _vicuna(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """LLaVA-1.5's format. Its answers end with the tokenizer's `eos_token`."""
    return ChatFormat(
        name="Vicuna",
        system="",
        user="USER: ",
        user_end=" ",
        assistant="ASSISTANT:",
        answer_start=" ",
        end_of_turn=tokenizer.eos_token,
    )


class _OwnTemplate:
    """The chat template of a model, which may raise any error, since it is somebody else's.

    Args:
        tokenizer: The model's tokenizer.
        processor_template: The template of the model's processor. By default this is the tokenizer's own template,
            whose messages are texts, while those of a processor's template have parts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processor_template: str | None) -> None:
        self.tokenizer = tokenizer
        self._text = processor_template
        self._has_parts = processor_template is not None

    def render(self, texts: list[str], system: str | None = None, add_generation_prompt: bool = False) -> str | None:
        """What the template writes for a conversation, without the BOS token.

        Args:
            texts: The texts of user and assistant alternately, beginning with the user's.
            system: The system message, if there is one.
            add_generation_prompt: Whether the assistant's next turn is begun.

        Returns:
            `None` if the template raises an error, or drops the system message.
        """
        messages = _make_messages(texts, system, self._has_parts)
        try:
            rendered = _render(self.tokenizer, messages, self._text, add_generation_prompt)
        except Exception:  # a model's Jinja template may raise anything
            return None
        if system is not None and system not in rendered:
            return None
        return rendered


def _make_messages(texts: list[str], system: str | None = None, has_parts: bool = False) -> list[dict[str, Any]]:
    """Messages of a conversation; the arguments are those of `_OwnTemplate`."""
    roles_and_texts = [] if system is None else [("system", system)]
    for number, text in enumerate(texts):
        roles_and_texts.append(("user" if number % 2 == 0 else "assistant", text))

    messages: list[dict[str, Any]] = []
    for role, text in roles_and_texts:
        content = [{"type": "text", "text": text}] if has_parts else text
        messages.append({"role": role, "content": content})
    return messages


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    template: str | None,
    add_generation_prompt: bool = False,
) -> str:
    """What a chat template, by default the tokenizer's own, writes for messages, without the BOS token."""
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return rendered.removeprefix(tokenizer.bos_token or "")


def _read_format(template: _OwnTemplate) -> ChatFormat | None:
    """Read a chat format from what a model's own template writes.

    The template is made to write the question "Q1", the question with the answer "A1", and the question after a system
    message "S1". The format's texts are what stands around "Q1", "A1" and "S1".

    Returns:
        `None` if no [`ChatFormat`] writes the same text.
    """
    # The comments say which fields of `ChatFormat` each text consists of.
    question = template.render(["Q1"])  # user Q1 user_end
    prompt = template.render(["Q1"], add_generation_prompt=True)  # user Q1 user_end assistant
    # user Q1 user_end assistant answer_start A1 end_of_turn separator
    answered = template.render(["Q1", "A1"])
    if question is None or prompt is None or answered is None:
        return None
    with_system = template.render(["Q1"], system="S1")  # system S1 user_end user Q1 user_end

    user, _, user_end = question.partition("Q1")
    answer_start, _, after_answer = answered.removeprefix(prompt).partition("A1")
    end_of_turn = _token_at_start(template.tokenizer, after_answer)
    if end_of_turn is None:  # nothing would end an answer
        return None
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
        end_of_turn=end_of_turn,
        separator=after_answer.removeprefix(end_of_turn),
    )
    if _writes_same_text(template, candidate):
        return candidate
    return None


def _token_at_start(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """The special token with which a text begins; `None` if it begins with none."""
    tokens = {*tokenizer.all_special_tokens}
    tokens |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    beginnings = [token for token in tokens if token and text.startswith(token)]
    return max(beginnings, key=len, default=None)


def _writes_same_text(template: _OwnTemplate, candidate: ChatFormat) -> bool:
    """Whether a format writes the same text as a model's own template.

    Conversations of one, two and four turns are compared, also with a system message if the own template writes one.
    """
    # These conversations hold no pictures, so the candidate's template never writes its image token.
    candidate_template = write_template(candidate, template.tokenizer, image_token=IMAGE_MARK)
    for texts in (["One?"], ["One?", "Two."], ["One?", "Two.", "Three?", "Four."]):
        for system in (None, "Be brief."):
            expected = template.render(texts, system)
            if expected is None and system is not None:
                continue
            if _render(template.tokenizer, _make_messages(texts, system), candidate_template) != expected:
                return False
    return True


def _writes_turns(template: _OwnTemplate, known_format: ChatFormat) -> bool:
    """Whether a model's own template writes turns as a known format does, whatever else it writes around them."""
    rendered = template.render(["One?", "Two.", "Three?"], add_generation_prompt=True)
    if rendered is None:
        return False
    first_question, second_question = (
        f"{known_format.user}{text}{known_format.user_end}" for text in ("One?", "Three?")
    )
    before_second, is_second_written, after_second = rendered.partition(second_question)
    _, is_first_written, answer = before_second.partition(first_question)
    # The template may write more where an answer begins, such as Qwen3's "<think>".
    begins_answers = known_format.assistant in answer and known_format.assistant in after_second
    return bool(is_first_written and is_second_written and begins_answers)


def holds_pictures(tokenizer: PreTrainedTokenizerBase, processor_template: str, image_token: str) -> bool:
    """Whether a processor's chat template writes the image token for a part that is a picture."""
    content = [{"type": "image"}, {"type": "text", "text": "One?"}]
    try:
        return image_token in _render(tokenizer, [{"role": "user", "content": content}], processor_template)
    except Exception:  # a model's Jinja template may raise anything
        return False


def write_template(chat_format: ChatFormat, tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
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
