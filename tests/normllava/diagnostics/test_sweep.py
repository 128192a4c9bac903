"""Tests of a sweep of the norm of image tokens, against passes whose image tokens are multiplied by hand.

A sweep multiplies image tokens by several factors, the doses. At dose 1 the model is unchanged.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, pad
from transformers import AutoProcessor, DynamicCache, PreTrainedModel

import families
from normllava.diagnostics import comparison, sweep
from normllava.diagnostics.answers import distributions, encode_prompts, make_prompt, read_prompt
from normllava.diagnostics.command import main
from normllava.diagnostics.loading import load_model, load_questions
from normllava.diagnostics.norm_sweep import ask_question
from normllava.diagnostics.report import make_sweep_table
from normllava.diagnostics.scaling import DOSES, scaled
from normllava.parts import DiagnosticsError


QUESTION = "what is it?"  # about each picture of `data`
DOG = 1  # index of the picture in `data` whose answer is "dog"


@contextmanager
def multiplied_by_hand(model: PreTrainedModel, is_image_token: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply the language model's input embeddings where the mask `is_image_token`, `(num_tokens,)`, is true."""

    def multiply(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        factors = torch.where(is_image_token, scale, 1.0)[:, None]  # [num_tokens, 1]
        return args, kwargs | {"inputs_embeds": kwargs["inputs_embeds"] * factors}

    handle = model.get_decoder().register_forward_pre_hook(multiply, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("name", ["normllava", "llava_next", "qwen2_5_vl", "gemma3", "cohere2_vision", "lfm2_vl"])
@torch.no_grad()
def test_scaling_equals_multiplying_by_hand(name: str) -> None:
    model = families.build(name)
    sample = families.inputs(name)
    is_image_token = sample["input_ids"][0] == families.IMAGE
    plain = model(**sample).logits

    with scaled(model, is_image_token, 1.0):
        logits_at_scale_1 = model(**sample).logits
    assert torch.equal(logits_at_scale_1, plain)

    with multiplied_by_hand(model, is_image_token, 3.0):
        expected = model(**sample).logits
    with scaled(model, is_image_token[None], 3.0):  # the mask may also have a batch axis
        logits_at_scale_3 = model(**sample).logits
    assert torch.allclose(logits_at_scale_3, expected, atol=1e-5)
    assert not torch.allclose(logits_at_scale_3, plain, atol=1e-4)

    logits_afterwards = model(**sample).logits
    assert torch.equal(logits_afterwards, plain)


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "qwen3_vl", "gemma3", "glm4v"])
@torch.no_grad()
def test_answers_are_scored_as_in_one_pass(name: str) -> None:
    """Each answer is scored together with a longer answer, so that the shorter is padded."""
    model = families.build(name)
    sample = families.inputs(name)
    prompt_ids = sample["input_ids"]
    prompt_length = prompt_ids.shape[1]
    model.lm_head.weight *= 20  # so that logits differ clearly between positions

    longer_answer = [8, 9, 8, 9]  # any token ids
    for answer in ([5, 6, 7], [8, 9]):  # the second is the beginning of the longer answer
        _, log_probabilities = distributions(model, read_prompt(model, sample), [longer_answer, answer])

        # The same sample with the answer after the prompt: inputs with a value for each token get more values.
        answered = dict(sample)
        for input_name, tensor in sample.items():
            if tensor.shape == prompt_ids.shape:
                fill = 1 if input_name == "attention_mask" else 0  # text has token type 0
                answered[input_name] = pad(tensor, (0, len(answer)), value=fill)
        answered["input_ids"] = torch.cat([prompt_ids, torch.tensor([answer])], dim=1)

        logits = model(**answered).logits[0]  # [num_tokens, vocab_size]
        # The logits of a token are at the position before it.
        expected = logits[prompt_length - 1 : -1].log_softmax(dim=-1)
        assert torch.allclose(log_probabilities, expected, atol=1e-4)


def loss_by_hand(model: PreTrainedModel, inputs: Any, tokens: list[int], scale: float) -> float:
    """Mean loss of an answer's tokens, from one pass over prompt and answer with multiplied image tokens."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    is_image_token = ids[0] == model.config.image_token_id
    with multiplied_by_hand(model, is_image_token, scale):
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits
    # The logits of a token are at the position before it.
    before_answer = len(ids[0]) - len(tokens) - 1
    answer_logits = logits[0, before_answer:-1]
    return cross_entropy(answer_logits.double(), torch.tensor(tokens)).item()


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """Rows with three pictures, 0.png to 2.png, and the same question. The answers are "A", "dog" and "A"."""
    rows = []
    for number, answer in enumerate(("A", "dog", "A")):
        picture.rotate(90 * number).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path / "rows.json"


def dog_prompt(processor: Any, data: Path) -> Any:
    """The inputs for the question about the picture whose answer is "dog"."""
    picture = Image.open(data.with_name(f"{DOG}.png")).convert("RGB")
    return encode_prompts(processor, [make_prompt(QUESTION, picture)])


def values_of(swept: pd.DataFrame) -> pd.Series:
    """The values of a sweep by measure, dose and picture."""
    return swept.set_index(["measure", "dose", "picture"])["value"].sort_index()


@pytest.fixture
def processor(make_model_folder: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(make_model_folder())


@pytest.fixture
def sharp_model(model: PreTrainedModel) -> PreTrainedModel:
    """A random model whose logits are made larger, so that not all answers are about equally likely."""
    with torch.no_grad():
        model.lm_head.weight *= 20
    return model


@torch.no_grad()
def test_losses_of_a_sweep_are_those_of_passes_by_hand(
    sharp_model: PreTrainedModel, processor: Any, data: Path
) -> None:
    values = values_of(sweep(sharp_model, processor, data).swept)
    # An answer ends with the token that ends the turn.
    dog = processor.tokenizer("dog<|im_end|>", add_special_tokens=False).input_ids
    inputs = dog_prompt(processor, data)
    at_1 = loss_by_hand(sharp_model, inputs, dog, scale=1.0)
    at_10 = loss_by_hand(sharp_model, inputs, dog, scale=10.0)
    assert values["loss", 1.0, DOG].item() == pytest.approx(at_1, abs=1e-4)
    assert values["loss", 10.0, DOG].item() == pytest.approx(at_10, abs=1e-4)
    assert values["loss_change", 10.0, DOG].item() == pytest.approx(at_10 - at_1, abs=1e-4)


def test_one_dose_gives_image_tokens_the_norm_of_text_tokens(
    make_model_folder: Callable[..., Path], data: Path
) -> None:
    model, processor = load_model(str(make_model_folder(projector_norm="none")))
    values = values_of(sweep(model, processor, data).swept)
    doses = values["loss"].index.get_level_values("dose").unique()
    # `length` is the norm of image tokens, in multiples of the norm of text tokens.
    image_norm = values["length", 1.0].mean()
    (dose_of_text,) = set(doses) - set(DOSES)
    assert dose_of_text == pytest.approx(1 / image_norm)


def test_a_model_that_starts_at_the_texts_norm_has_no_dose_twice(
    model: PreTrainedModel, processor: Any, data: Path
) -> None:
    swept = sweep(model, processor, data).swept
    image_norm = values_of(swept)["length", 1.0].mean()
    assert 0.9 < image_norm < 1.1
    table = make_sweep_table(swept)
    assert list(table.index) == ["× 0.03", "× 0.1", "× 0.3", "× 1", "× 3", "× 10", "× 30"]
    assert table.loc["× 1", "answers"] == "as it is"


def test_models_keep_their_order_and_so_their_colours_in_the_figure(
    model: PreTrainedModel, processor: Any, data: Path
) -> None:
    models = {"before": (model, processor), "after": (model, processor)}
    figures = comparison.compare(models, data, sweep=True).figures()
    (legend,) = figures["sweep"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["before", "after", "norm as it is"]


def test_a_model_whose_answers_cannot_be_scored_is_refused_before_it_is_measured(
    model: PreTrainedModel, processor: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the cache of a decoder with linear attention, this one can't be repeated."""

    def repeat(cache: Any, repeats: int) -> None:
        raise AttributeError("a layer without keys")

    monkeypatch.setattr(DynamicCache, "batch_repeat_interleave", repeat)
    monkeypatch.setattr(comparison, "measure_questions", lambda *args: pytest.fail("it was measured"))
    with pytest.raises(DiagnosticsError, match="answers can't be scored: leave --sweep out"):
        sweep(model, processor, data)


def test_an_answer_that_no_dose_changes_has_not_changed(
    model: PreTrainedModel, processor: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a token that was generated isn't always the likeliest in a pass over the whole answer."""
    questions = load_questions(data, 3).questions
    original_generate = model.generate

    def generate_another_last_token(**inputs: Any) -> torch.Tensor:
        ids = original_generate(**inputs)
        ids[0, -1] = (ids[0, -1] + 1) % 8
        return ids

    monkeypatch.setattr(model, "generate", generate_another_last_token)
    measured = ask_question(model, processor, questions, number=0, doses=[1.0])
    assert [row.value for row in measured if row.measure == "changed"] == [0]


def test_too_few_pictures_are_refused(model: PreTrainedModel, processor: Any, data: Path) -> None:
    with pytest.raises(DiagnosticsError, match=r"there are 2: give at least 3\."):
        sweep(model, processor, data, num_samples=2)


def test_a_model_in_training_mode_is_measured_without_dropout(
    model: PreTrainedModel, processor: Any, data: Path
) -> None:
    rows = sweep(model, processor, data).swept
    model.train()
    model.get_decoder().layers[0].self_attn.attention_dropout = 0.5
    assert sweep(model, processor, data).swept.equals(rows)
    assert model.training


@torch.no_grad()
def test_all_pictures_of_a_row_are_asked_about(model: PreTrainedModel, processor: Any, data: Path) -> None:
    rows = json.loads(data.read_text())
    rows[0]["image"] = ["0.png", "1.png"]
    rows[0]["conversations"][0]["value"] = f"<image><image>\n{QUESTION}"
    data.write_text(json.dumps(rows))
    questions = load_questions(data, 3).questions

    measured = ask_question(model, processor, questions, number=0, doses=[1.0])
    (loss,) = [row.value for row in measured if row.measure == "loss"]
    right_answer = processor.tokenizer("A<|im_end|>", add_special_tokens=False).input_ids
    prompt = encode_prompts(processor, [questions[0].prompt])
    expected = loss_by_hand(model, prompt, right_answer, scale=1.0)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_named_is_1_where_the_models_answer_is_right(always_a: Callable[..., Path], data: Path) -> None:
    """The model answers "A" to every question. At dose 1 its answer doesn't change."""
    model, processor = load_model(str(always_a()))
    questions = load_questions(data, 3).questions

    def scores(number: int, measure: str) -> set[float]:
        """The different values of a measure for the question with this number."""
        measured = ask_question(model, processor, questions, number, doses=[1.0])
        return {row.value for row in measured if row.measure == measure}

    # `named` is 1 if the right answer is the likeliest of the answers in `data`.
    assert scores(0, "named") == {1}  # the right answer is "A"
    assert scores(1, "named") == {0}  # the right answer is "dog"
    assert scores(0, "changed") == {0}
    assert scores(1, "changed") == {0}


def run_sweep(model: Path, data: Path, output_dir: Path) -> tuple[pd.DataFrame, str]:
    """Run the command with `--sweep`, and return the rows of sweep.csv and the page."""
    options = ["--model", model, "--data", data, "--output_dir", output_dir, "--sweep", "--num_samples", 3]
    main([str(option) for option in options])

    rows = pd.read_csv(output_dir / "sweep.csv")
    page = (output_dir / "report.html").read_text()
    assert (output_dir / "figures/sweep.png").exists()
    return rows, page


def test_the_command_with_rows_that_have_answers(
    make_model_folder: Callable[..., Path], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("normllava.tokens.SINK_FACTOR", 1.01)  # so that some image tokens are sinks
    rows, page = run_sweep(make_model_folder(), data, tmp_path / "report")

    assert "named" in set(rows["measure"])
    # Two of the three answers are "A".
    assert rows.query("measure == 'guessing'")["value"].tolist() == pytest.approx([2 / 3] * 3)

    # Sinks count neither for `length` nor for the report's `norm`.
    length = rows.query("measure == 'length'")["value"].mean()
    measured = pd.read_csv(tmp_path / "report" / "rows.csv")
    norms = measured.query("measure == 'norm' and layer == 0").groupby("modality")["value"].mean()
    assert length == pytest.approx(norms["image"] / norms["text"])

    summary_of_page = page.split("<h2>Other norms")[0]  # before the first chapter
    assert "Right answers: " in summary_of_page
    assert "give rows with answers" not in page


def test_the_command_with_pictures_which_have_no_answers_to_score(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for path in data.parent.glob("*.png"):
        path.rename(pictures / path.name)
    rows, page = run_sweep(make_model_folder(), pictures, tmp_path / "report")

    assert "named" not in set(rows["measure"])
    assert "Answers that change: " in page
    assert "What to do: give rows with answers" in page
