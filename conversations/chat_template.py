"""Chat templates: a language model's own turn format, with pictures, and with the trained spans marked.

Every template marks what the assistant says, end-of-turn token included, with `{% generation %}`, so one collator
serves both stages. Each part of a message is on a line of its own, as in LLaVA's "<image>\\nquestion".
"""

import json
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatFormat:
    """How a family of language models writes a conversation.

    A user turn is `user[0] + content + user[1]`, a system turn likewise; with `system=None` the system message is
    prepended to the next user turn. An assistant turn is `assistant + answer_start + content + end_of_turn +
    separator`, of which answer_start, content and end_of_turn are trained.
    """

    name: str
    user: tuple[str, str]
    system: tuple[str, str] | None
    assistant: str
    answer_start: str
    end_of_turn: str
    separator: str


CHATML = ChatFormat(
    name="ChatML",
    user=("<|im_start|>user\n", "<|im_end|>\n"),
    system=("<|im_start|>system\n", "<|im_end|>\n"),
    assistant="<|im_start|>assistant\n",
    answer_start="",
    end_of_turn="<|im_end|>",
    separator="\n",
)
LLAMA3 = ChatFormat(
    name="Llama 3",
    user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
    answer_start="",
    end_of_turn="<|eot_id|>",
    separator="",
)
GEMMA = ChatFormat(
    name="Gemma",
    user=("<start_of_turn>user\n", "<end_of_turn>\n"),
    system=None,
    assistant="<start_of_turn>model\n",
    answer_start="",
    end_of_turn="<end_of_turn>",
    separator="\n",
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
            {{- @IMAGE@ if part["type"] == "image" else part["text"] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- @BOS@ -}}
{%- set ns = namespace(system="") -%}
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {{- @USER_START@ + ns.system + @USER_END@ if ns.system else "" -}}
        {%- set ns.system = "" -%}
        {{- @ASSISTANT@ -}}
        {%- generation -%}
            {{- @ANSWER_START@ + render(message["content"]) + @END_OF_TURN@ -}}
        {%- endgeneration -%}
        {{- @SEPARATOR@ -}}
    {%- elif message["role"] == "system" -%}
        @SYSTEM@
    {%- elif message["role"] == "user" -%}
        {{- @USER_START@ + (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) + @USER_END@ -}}
        {%- set ns.system = "" -%}
    {%- else -%}
        {{- raise_exception("Unknown role " + message["role"] + "; allowed are system, user and assistant.") -}}
    {%- endif -%}
{%- endfor -%}
{{- @USER_START@ + ns.system + @USER_END@ if ns.system else "" -}}
{{- @ASSISTANT@ if add_generation_prompt else "" -}}
"""

# LLaVA's stage 1: the pictures, the caption, a line break. The human's text has no content there and is left out.
_PLAIN_TEMPLATE = """\
{{- @BOS@ -}}
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {%- generation -%}
            {{- message["content"] + "\\n" -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in message["content"] if part["type"] == "image" -%}
            {{- @IMAGE@ -}}
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
    for known in (CHATML, LLAMA3, GEMMA):
        if known.end_of_turn in vocabulary:
            return known
    if tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has no `eos_token`, so answers have no end token. Set it in tokenizer_config.json."
        )
    return ChatFormat(
        name="Vicuna",
        user=("USER: ", " "),
        system=("", " "),
        assistant="ASSISTANT:",
        answer_start=" ",
        end_of_turn=tokenizer.eos_token,
        separator="",
    )


def chat_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of the tokenizer's own chat format, for messages with text and `{"type": "image"}` parts."""
    style = chat_format(tokenizer)
    if style.system is None:
        system = '{%- set ns.system = (ns.system + "\\n\\n" if ns.system else "") + render(message["content"]) -%}'
    else:
        system = (
            f'{{{{- {json.dumps(style.system[0])} + render(message["content"]) + {json.dumps(style.system[1])} -}}}}'
        )
    return _fill(
        _CHAT_TEMPLATE,
        tokenizer,
        image_token,
        ASSISTANT=json.dumps(style.assistant),
        ANSWER_START=json.dumps(style.answer_start),
        END_OF_TURN=json.dumps(style.end_of_turn),
        SEPARATOR=json.dumps(style.separator),
        SYSTEM=system,
        USER_START=json.dumps(style.user[0]),
        USER_END=json.dumps(style.user[1]),
    )


def plain_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Jinja template of LLaVA's stage 1 ("plain"): images, caption, line break."""
    return _fill(_PLAIN_TEMPLATE, tokenizer, image_token)


def _fill(template: str, tokenizer: PreTrainedTokenizerBase, image_token: str, **literals: str) -> str:
    # A tokenizer that starts every text with BOS expects it here too; processors then don't add it a second time.
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    literals |= {"IMAGE": json.dumps(image_token), "BOS": "bos_token" if adds_bos else '""'}
    for name, literal in literals.items():
        template = template.replace(f"@{name}@", literal)
    return template
