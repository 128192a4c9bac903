"""A model without a norm is transformers' own Llava: from composing, through each stage, to what is published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from normllava.errors import UserError
from normllava.llava import add_norm
from script_runs import INSTRUCT, load_weights, read_steps, run
from training.folders.run import Composed, Run
from training.merge import main as merge


ADAPT = {"stage": "adapt", "lora_r": 4, "lora_alpha": 8}
COMPOSED = Composed(projector_scaled=True, projector_aligned=False, llava_name_or_path=None)


@pytest.fixture(params=["siglip", "dinov2"])
def llava_folder(request: pytest.FixtureRequest, make_model_folder: Callable[..., Path]) -> Path:
    """The folder of a composed Llava. transformers saves the weights of DINOv2 under other names than in memory."""
    return make_model_folder(vision=request.param, projector_norm="none")


def save_as_normllava(llava_folder: Path, folder: Path) -> Path:
    """Save the same model as a NormLlava that adds nothing, which is the reference here."""
    add_norm(LlavaForConditionalGeneration.from_pretrained(llava_folder), "none").save_pretrained(folder)
    AutoProcessor.from_pretrained(llava_folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stage", [{"stage": "align"}, INSTRUCT], ids=["align", "instruct"])
def test_a_llava_trains_like_a_normllava_that_adds_nothing(
    stage: dict[str, Any], llava_folder: Path, data: Path, tmp_path: Path
) -> None:
    folders = {"llava": llava_folder, "normllava": save_as_normllava(llava_folder, tmp_path / "reference")}
    losses = {}
    weights = {}
    for name, folder in folders.items():
        run(tmp_path, **stage, model_name_or_path=str(folder), dataset_name=str(data), output_dir=str(tmp_path / name))
        losses[name] = [step["loss"] for step in read_steps(tmp_path / name)]
        weights[name] = AutoModelForImageTextToText.from_pretrained(tmp_path / name).state_dict()

    assert losses["llava"] == losses["normllava"]
    assert weights["llava"].keys() == weights["normllava"].keys()
    for name, weight in weights["normllava"].items():
        assert torch.equal(weights["llava"][name], weight), name


def test_the_result_is_a_llava_also_after_a_kill(llava_folder: Path, data: Path, tmp_path: Path) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(llava_folder), "dataset_name": str(data), "save_steps": 4}
    run(tmp_path, **fields, output_dir=str(tmp_path / "whole"))
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "llava"
    assert list((tmp_path / "whole").glob("*.py")) == []

    # The run goes on from its first checkpoint, as after a kill, and ends with the same weights.
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    whole = load_weights(tmp_path / "whole")
    run(tmp_path, **fields, output_dir=str(tmp_path / "whole"), resume_from_checkpoint=str(checkpoint))
    resumed = load_weights(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_an_adapter_of_a_llava_is_merged_into_a_llava(llava_folder: Path, data: Path, tmp_path: Path) -> None:
    fields = {**ADAPT, "model_name_or_path": str(llava_folder), "dataset_name": str(data)}
    run(tmp_path, **fields, output_dir=str(tmp_path / "adapter"))
    merge(["--adapter", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")])
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert type(merged) is LlavaForConditionalGeneration


def test_the_record_of_composing_goes_from_stage_to_stage(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    composed = tmp_path / "composed"
    LlavaForConditionalGeneration.from_pretrained(make_model_folder(projector_norm="none")).save_pretrained(composed)
    AutoProcessor.from_pretrained(make_model_folder()).save_pretrained(composed)
    COMPOSED.write(composed)

    fields = {"dataset_name": str(data), "max_steps": 1}
    run(tmp_path, **fields, stage="align", model_name_or_path=str(composed), output_dir=str(tmp_path / "align"))
    run(tmp_path, **fields, **ADAPT, model_name_or_path=str(tmp_path / "align"), output_dir=str(tmp_path / "adapt"))
    merge(["--adapter", str(tmp_path / "adapt"), "--output_dir", str(tmp_path / "merged")])
    for name in ("align", "adapt", "merged"):
        assert Run.read(tmp_path / name).composed == COMPOSED


def test_a_llava_that_lacks_weights_is_refused(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """transformers itself would only warn, and train random weights."""
    folder = tmp_path / "llava"
    model = LlavaForConditionalGeneration.from_pretrained(make_model_folder(projector_norm="none"))
    weights = {name: weight for name, weight in model.state_dict().items() if "linear_1" not in name}
    model.save_pretrained(folder, state_dict=weights)
    AutoProcessor.from_pretrained(make_model_folder()).save_pretrained(folder)
    with pytest.raises(UserError, match=r"llava doesn't fit its config. Weights missing: 2 of multi_modal_projector"):
        run(
            tmp_path,
            stage="align",
            model_name_or_path=str(folder),
            dataset_name=str(data),
            output_dir=str(tmp_path / "out"),
        )


def drop_crop_size(processor: Any) -> None:
    """As in the Llavas of the Hub whose image processor doesn't crop."""
    processor.image_processor.crop_size = None


def leave_end_unmarked(processor: Any) -> None:
    """As in the Llavas of the Hub whose template marks an answer's text alone."""
    text = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    answer = "{% generation %}" + text + "{% endgeneration %}"
    turn = "{{ m.role }}: {% if m.role == 'assistant' %}" + answer + "{% else %}" + text + "{% endif %}"
    processor.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"


def leave_answers_unmarked(processor: Any) -> None:
    """As in most Llavas of the Hub."""
    leave_end_unmarked(processor)
    for mark in ("{% generation %}", "{% endgeneration %}"):
        processor.chat_template = processor.chat_template.replace(mark, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_crop_size, "its image processor names no crop_size"),
        (leave_end_unmarked, "its chat template marks no token that ends an answer"),
        (leave_answers_unmarked, "its chat template marks no answer"),
    ],
)
def test_a_llava_whose_processor_is_not_complete_is_refused_with_what_to_do(
    change: Callable[[Any], None], message: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "llava"
    LlavaForConditionalGeneration.from_pretrained(make_model_folder(projector_norm="none")).save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(make_model_folder(projector_norm="none"))
    change(processor)
    processor.save_pretrained(folder)
    fields = {**INSTRUCT, "model_name_or_path": str(folder), "dataset_name": str(data)}
    with pytest.raises(UserError, match=rf"can't be trained as it is: {message}.*compose.py --llava_model {folder}"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
