"""One more model for lmms-eval, `image_text_to_text`: any chat model that `AutoModelForImageTextToText` loads.

python -m lmms_eval --model image_text_to_text --model_args pretrained=me/MyModel --tasks mmstar
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.api.task import TaskConfig
from lmms_eval.protocol import ChatMessages
from lmms_eval.utils import Collator
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from normllava.errors import UserError
from normllava.parts import complete_processor


def leave_out_default_stop() -> None:
    """Let `until` be empty for tasks whose file names no stop string.

    lmms-eval fills in the text that separates its examples, an empty line. That would cut an answer after its first
    paragraph. lmms-eval's own chat models pass over `until`.
    """
    fill_in = TaskConfig.__post_init__

    def fill_in_without_stop(config: TaskConfig) -> None:
        names_stop = "until" in (config.generation_kwargs or {})
        fill_in(config)
        if config.generation_kwargs is not None and not names_stop:
            config.generation_kwargs["until"] = []

    TaskConfig.__post_init__ = fill_in_without_stop


# lmms-eval imports this module before it reads the tasks.
leave_out_default_stop()


class RequestArguments(NamedTuple):
    """The arguments of a request, in lmms-eval's order."""

    text: str
    """The row's question without its pictures. Only the length of this text is used."""
    to_messages: Callable[[Any], list[Any]]
    """Makes the chat messages of a row."""
    settings: dict[str, Any]
    """The task's settings for generation."""
    row_number: int
    task: str
    split: str


class ImageTextToText(lmms):
    """Answers chats without sampling, in batches. Each of several processes answers its share of the rows.

    Args:
        pretrained: Checkpoint folder or Hub id. The code that comes with it is run.
        dtype: dtype of the weights; "auto" is the checkpoint's.
        batch_size: Rows per batch.
    """

    # `False` makes lmms-eval's requests give chat messages instead of a text and its pictures.
    is_simple = False

    def __init__(self, pretrained: str, dtype: str = "auto", batch_size: int = 1) -> None:
        super().__init__()
        self.accelerator = Accelerator()
        # The base class has properties `rank` and `world_size`, which return the next two.
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        self.device = self.accelerator.device
        self.batch_size = int(batch_size)
        self._processor = AutoProcessor.from_pretrained(pretrained, trust_remote_code=True)
        # The key "" stands for the whole model. Without a `device_map`, each process would first load the model into
        # the machine's memory.
        self._model = AutoModelForImageTextToText.from_pretrained(
            pretrained, dtype=dtype, device_map={"": self.device}, trust_remote_code=True
        ).eval()
        complete_processor(self._processor, self._model)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answer requests, and return the answers in the order of the requests.

        Raises:
            UserError: if a task asks for sampled answers, or about videos or sounds.
        """
        # The requests of a batch have the same settings, and texts of about the same length, the longest first.
        collator = Collator(
            [RequestArguments(*request.args) for request in requests],
            sort_fn=lambda arguments: -len(arguments.text),
            group_fn=lambda arguments: arguments.settings,
            grouping=True,
        )
        answers: list[str] = []
        with tqdm(total=len(requests), desc="Answering", disable=self.rank > 0) as bar:
            for batch in collator.get_batched(n=self.batch_size):
                answers += self._answer(batch)
                bar.update(len(batch))
        return collator.get_original(answers)

    @torch.inference_mode()
    def _answer(self, batch: list[RequestArguments]) -> list[str]:
        """Answers to a batch of requests, which have the same settings."""
        settings = batch[0].settings
        # A task that doesn't set `do_sample` asks for sampling by a temperature above 0.
        has_temperature = bool(settings.get("temperature"))
        is_sampled = settings.get("do_sample", has_temperature)
        if is_sampled:
            raise UserError(f"{batch[0].task} asks for sampled answers; here answers are never sampled.")

        chats = []
        for request in batch:
            row = self.task_dict[request.task][request.split][request.row_number]  # lmms-eval sets `task_dict`
            messages = ChatMessages(messages=request.to_messages(row))
            _, videos, sounds = messages.extract_media()
            if videos or sounds:
                raise UserError(f"{request.task} asks about videos or sounds; only pictures are shown to the model.")
            chats.append(messages.to_hf_messages())

        inputs = self._processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        ).to(self.device, self._model.dtype)

        generated = self._model.generate(
            **inputs,
            max_new_tokens=settings.get("max_new_tokens", 1024),  # the default of most models in lmms-eval
            num_beams=settings.get("num_beams", 1),
            do_sample=False,
            # The checkpoint's generation config may set these two, but answers shall depend on the task's settings.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        prompt_length = inputs["input_ids"].shape[1]
        answer_ids = generated[:, prompt_length:]
        texts = self._processor.batch_decode(answer_ids, skip_special_tokens=True)
        stop_strings = settings.get("until") or []
        return [cut_at_stop(text, stop_strings) for text in texts]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Likelihood tasks are not supported here: lm-eval scores them."""
        raise NotImplementedError("Likelihood tasks are not supported; use lm-eval.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Tasks of several rounds are not supported."""
        raise NotImplementedError("Multi-round tasks are not supported.")


def cut_at_stop(text: str, stop_strings: list[str] | str) -> str:
    """A text up to the first place where any of the stop strings begins, without white space around it."""
    if isinstance(stop_strings, str):
        stop_strings = [stop_strings]
    for stop_string in stop_strings:
        if stop_string:  # `split` takes no empty string
            text = text.split(stop_string)[0]
    return text.strip()
