"""lmms-eval for any chat model with pictures that `AutoModelForImageTextToText` loads; takes lmms-eval's arguments.

python -m evaluation.lmms_eval_model --model image_text_to_text --model_args pretrained=me/MyModel --tasks mmstar
"""

from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.cli.dispatch import main
from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.models.registry_v2 import ModelManifest
from lmms_eval.protocol import ChatMessages
from lmms_eval.utils import Collator
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from common.errors import UserError


class ImageTextToText(lmms):
    """Answers chats greedily, in batches. Each process of a launch answers its share of the rows.

    `pretrained` is a checkpoint folder or Hub id, whose remote code is trusted.
    """

    is_simple = False

    def __init__(self, pretrained: str, dtype: str = "auto", batch_size: int = 1) -> None:
        super().__init__()
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        self.device = self.accelerator.device
        self.batch_size = int(batch_size)
        self._processor = AutoProcessor.from_pretrained(pretrained, trust_remote_code=True)
        # Straight to the device: each process would hold a copy in the machine's memory.
        self._model = AutoModelForImageTextToText.from_pretrained(
            pretrained, dtype=dtype, device_map={"": self.device}, trust_remote_code=True
        ).eval()

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answers in the order of the requests.

        Raises:
            UserError: if a task asks for sampled answers.
        """
        # Rows of a batch share the settings of their task, and are of about the same length.
        collator = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: -len(args[0]),
            group_fn=lambda args: args[2],
            grouping=True,
        )
        answers: list[str] = []
        with tqdm(total=len(requests), desc="Answering", disable=self.rank > 0) as bar:
            for batch in collator.get_batched(n=self.batch_size):
                answers += self._answer(batch)
                bar.update(len(batch))
        return collator.get_original(answers)

    @torch.inference_mode()
    def _answer(self, batch: list[tuple[Any, ...]]) -> list[str]:
        """Greedy answers to a batch, whose rows share the settings of their task."""
        settings: dict[str, Any] = batch[0][2]
        if settings.get("do_sample", bool(settings.get("temperature"))):
            raise UserError(f"{batch[0][4]} asks for sampled answers; this model only answers greedily.")

        chats = []
        for _, to_messages, _, document, task, split in batch:
            messages = to_messages(self.task_dict[task][split][document])
            chats.append(ChatMessages(messages=messages).to_hf_messages())

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
            max_new_tokens=settings.get("max_new_tokens", 1024),
            num_beams=settings.get("num_beams", 1),
            do_sample=False,
            repetition_penalty=1.0,  # whatever the checkpoint's generation config says
            no_repeat_ngram_size=0,
        )
        answers = generated[:, inputs["input_ids"].shape[1] :]
        texts = self._processor.batch_decode(answers, skip_special_tokens=True)
        return [cut(text, settings.get("until") or []) for text in texts]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not supported: lm-eval scores such tasks."""
        raise NotImplementedError("Likelihood tasks are not supported; use lm-eval.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not supported."""
        raise NotImplementedError("Multi-round tasks are not supported.")


def cut(text: str, until: list[str] | str) -> str:
    """A text up to the first stop string."""
    stop_strings = [until] if isinstance(until, str) else until
    for stop_string in stop_strings:
        if stop_string:
            text = text.split(stop_string)[0]
    return text.strip()


if __name__ == "__main__":
    manifest = ModelManifest("image_text_to_text", chat_class_path="__main__.ImageTextToText")
    MODEL_REGISTRY_V2.register_manifest(manifest, overwrite=True)  # of an installation of an earlier version
    main()
