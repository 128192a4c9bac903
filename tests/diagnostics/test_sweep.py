"""A sweep of the norm of image tokens, against multiplying the decoder's input by hand and against plain passes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn.functional import cosine_similarity, cross_entropy, pad
from transformers import AutoProcessor, PreTrainedModel

import families
from diagnostics import hooks, sweep
from diagnostics.__main__ import main
from diagnostics.answers import distributions, encode_prompts, make_prompt, read_prompt
from diagnostics.loading import load_model, load_questions
from diagnostics.norm_sweep import ask_question
from diagnostics.parts import DiagnosticsError, find_decoder
from diagnostics.scaling import scaled


@contextmanager
def by_hand(model: PreTrainedModel, mask: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply the language model's input embeddings at the positions of a mask, `(S,)`."""

    def multiply(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        factors = torch.where(mask, scale, 1.0)[:, None]
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
        assert torch.equal(model(**sample).logits, plain)

    with by_hand(model, is_image_token, 3.0):
        expected = model(**sample).logits
    with scaled(model, is_image_token[None], 3.0):
        multiplied = model(**sample).logits
    assert torch.allclose(multiplied, expected, atol=1e-5)
    assert not torch.allclose(multiplied, plain, atol=1e-4)

    assert torch.equal(model(**sample).logits, plain)


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "qwen3_vl", "gemma3", "glm4v"])
@torch.no_grad()
def test_answers_are_scored_as_in_one_pass(name: str) -> None:
    """The answer is scored together with a longer one, so that it is padded."""
    model = families.build(name)
    sample = families.inputs(name)
    prompt_ids = sample["input_ids"]
    prompt_length = prompt_ids.shape[1]
    model.lm_head.weight *= 20  # so that logits differ clearly between positions

    for answer in ([5, 6, 7], [8, 9]):
        longer_answer = [8, 9, 8, 9]
        _, log_probabilities = distributions(model, read_prompt(model, sample), [longer_answer, answer])

        # The same prompt with the answer behind it. Text has token type 0.
        answered = dict(sample)
        for name_of_input, tensor in sample.items():
            if tensor.shape == prompt_ids.shape:
                fill = 1 if name_of_input == "attention_mask" else 0
                answered[name_of_input] = pad(tensor, (0, len(answer)), value=fill)
        answered["input_ids"] = torch.cat([prompt_ids, torch.tensor([answer])], dim=1)

        expected = model(**answered).logits[0, prompt_length - 1 : -1].log_softmax(dim=-1)
        assert torch.allclose(log_probabilities, expected, atol=1e-4)


def loss_by_hand(model: PreTrainedModel, inputs: Any, tokens: list[int], scale: float) -> float:
    """Mean loss of an answer's tokens, from one pass over prompt and answer."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    with by_hand(model, ids[0] == model.config.image_token_id, scale):
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits
    # The logits of a token are at the position before it.
    at_answer = logits[0, -len(tokens) - 1 : -1]
    return cross_entropy(at_answer.double(), torch.tensor(tokens)).item()


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """Three pictures with the same question and two different answers."""
    rows = []
    for turn, answer in enumerate(("A", "dog", "A")):
        picture.rotate(90 * turn).save(tmp_path / f"{turn}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{turn}.png", "conversations": turns})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path / "rows.json"


def second_picture(data: Path) -> Image.Image:
    """The picture of the second question, whose answer is "dog"."""
    return Image.open(data.with_name("1.png")).convert("RGB")


def by_place(swept: pd.DataFrame) -> pd.Series:
    """A sweep's values by measure, control, dose and picture."""
    return swept.set_index(["measure", "control", "dose", "picture"])["value"].sort_index()


@pytest.fixture
def processor(composed: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(composed())


@pytest.fixture
def sharp_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model that does not find all answers about equally likely."""
    with torch.no_grad():
        model.lm_head.weight *= 20
    return model


@torch.no_grad()
def test_losses_of_a_sweep_are_those_of_passes_by_hand(
    sharp_model: PreTrainedModel, processor: Any, data: Path
) -> None:
    rows = by_place(sweep(sharp_model, processor, data).swept)
    dog = processor.tokenizer("dog<|im_end|>", add_special_tokens=False).input_ids
    own = encode_prompts(processor, [make_prompt("what is it?", second_picture(data))])
    blank = encode_prompts(processor, [make_prompt("what is it?", Image.new("RGB", (40, 30), "white"))])
    for control, inputs, dose in (("", own, 1.0), ("", own, 10.0), ("blank", blank, 10.0)):
        expected = loss_by_hand(sharp_model, inputs, dog, dose)
        assert rows["loss", control, dose, 1].item() == pytest.approx(expected, abs=1e-4)


def test_changes_are_differences_to_the_own_picture_at_dose_1(
    sharp_model: PreTrainedModel, processor: Any, data: Path
) -> None:
    rows = by_place(sweep(sharp_model, processor, data).swept)
    assert rows["kl", "", 1.0].abs().max() < 1e-6
    assert rows["kl", "", 30.0].min() > 1e-6
    for control in ("", "blank", "another's"):
        change = rows["loss", control, 30.0] - rows["loss", "", 1.0]
        assert rows["loss_change", control, 30.0].to_numpy() == pytest.approx(change.to_numpy())


def test_one_dose_gives_image_tokens_the_norm_of_text_tokens(
    model: PreTrainedModel, processor: Any, data: Path
) -> None:
    rows = by_place(sweep(model, processor, data).swept)
    doses = rows["kl", ""].index.get_level_values("dose").unique()
    image_norm = rows["length", "", 1.0].mean()  # in multiples of the norm of text tokens
    assert 1 / image_norm == pytest.approx(min(doses, key=lambda dose: abs(dose * image_norm - 1)))


@torch.no_grad()
def test_keys_and_values_turn_as_their_projections_do(model: PreTrainedModel, processor: Any, data: Path) -> None:
    rows = by_place(sweep(model, processor, data).swept)
    attention = find_decoder(model).layers[-1].self_attn  # of two layers, only the last is measured
    outputs: dict[str, list[torch.Tensor]] = {"k_proj": [], "v_proj": []}

    def keep(name: str, module: Any, args: Any, output: torch.Tensor) -> None:
        outputs[name].append(output)

    for name in outputs:
        getattr(attention, name).register_forward_hook(partial(keep, name))
    inputs = encode_prompts(processor, [make_prompt("what is it?", second_picture(data))])
    is_image_token = inputs["input_ids"][0] == model.config.image_token_id
    for dose in (1.0, 10.0):
        with by_hand(model, is_image_token, dose):
            model(**inputs)

    for measure, name in (("keys, turned", "k_proj"), ("values, turned", "v_proj")):
        at_dose_1, at_dose_10 = outputs[name]  # [1, S, num_heads * head_dim] each
        before = at_dose_1[0, is_image_token].unflatten(-1, (-1, attention.head_dim))
        after = at_dose_10[0, is_image_token].unflatten(-1, (-1, attention.head_dim))
        expected = 1 - cosine_similarity(before, after, dim=-1).mean().item()
        assert rows[measure, "", 10.0, 1] == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_what_layer_1_adds_is_what_its_two_parts_return(model: PreTrainedModel, processor: Any, data: Path) -> None:
    rows = by_place(sweep(model, processor, data).swept)
    layer = find_decoder(model).layers[0]
    states: dict[str, torch.Tensor] = {}
    layer.self_attn.register_forward_hook(lambda _, args, output: states.update(attention=output[0]))
    layer.mlp.register_forward_hook(lambda _, args, output: states.update(mlp=output))
    layer.register_forward_pre_hook(lambda _, args: states.update(entered=args[0]))
    inputs = encode_prompts(processor, [make_prompt("what is it?", second_picture(data))])
    model(**inputs)

    is_image_token = inputs["input_ids"][0] == model.config.image_token_id
    norms = {part: tensor[0, is_image_token].norm(dim=-1).mean().item() for part, tensor in states.items()}
    for part in ("attention", "mlp"):
        measured = rows[f"{part}_update", "", 1.0, 1].item() / rows["length", "", 1.0, 1].item()
        assert measured == pytest.approx(norms[part] / norms["entered"], rel=1e-4)


def test_too_few_pictures_and_a_model_in_training_mode_are_refused(
    model: PreTrainedModel, processor: Any, data: Path
) -> None:
    with pytest.raises(DiagnosticsError, match=r"there are 2: give at least 3\."):
        sweep(model, processor, data, num_samples=2)
    with pytest.raises(DiagnosticsError, match=r"call model.eval\(\)"):
        sweep(model.train(), processor, data)


@torch.no_grad()
def test_all_pictures_of_a_row_are_asked_about(model: PreTrainedModel, processor: Any, data: Path) -> None:
    rows = json.loads(data.read_text())
    rows[0]["image"] = ["0.png", "1.png"]
    rows[0]["conversations"][0]["value"] = "<image><image>\nwhat is it?"
    data.write_text(json.dumps(rows))
    questions = load_questions(data, 3).questions

    measured = ask_question(model, processor, questions, 0, [1.0])
    (loss,) = [row.value for row in measured if row.measure == "loss" and row.control == ""]
    right = processor.tokenizer("A<|im_end|>", add_special_tokens=False).input_ids
    expected = loss_by_hand(model, encode_prompts(processor, [questions[0].prompt]), right, 1.0)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_a_model_that_always_answers_a_is_right_where_a_is_right(always_a: Callable[..., Path], data: Path) -> None:
    """Its answer has one letter, fewer tokens than a greedy answer may have. At dose 1 no answer changes."""
    model, processor = load_model(str(always_a()))
    questions = load_questions(data, 3).questions
    for number, named in ((0, 1), (1, 0)):  # the right answers are "A" and "dog"
        measured = ask_question(model, processor, questions, number, [1.0])
        assert {row.value for row in measured if row.measure == "changed"} == {0}
        assert {row.value for row in measured if row.measure == "named"} == {named}


@pytest.mark.parametrize("with_answers", [True, False])
def test_the_command(
    with_answers: bool, composed: Callable[..., Path], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows with answers; and pictures without answers, with a model that has no norm before its MLP."""
    source = data
    if not with_answers:
        source = tmp_path / "pictures"
        source.mkdir()
        for path in tmp_path.glob("*.png"):
            path.rename(source / path.name)
        monkeypatch.setattr(hooks, "MLP_NORMS", ())
    monkeypatch.setattr("diagnostics.tokens.SINK_FACTOR", 1.01)  # so that some image tokens are sinks

    out = tmp_path / "report"
    options = ["--model", composed(), "--data", source, "--output_dir", out, "--sweep", "--num_samples", 3]
    main([str(option) for option in options])

    rows = pd.read_csv(out / "sweep.csv").fillna({"control": ""})
    measures = set(rows["measure"])
    norms = rows.query("measure == 'norm' and layer == 0 and dose == 1").groupby("modality")["value"].mean()
    assert rows.query("measure == 'length'")["value"].mean() == pytest.approx(norms["visual"] / norms["text"])
    assert set(rows["control"]) == ({"", "blank", "another's"} if with_answers else {""})
    assert ("named" in measures) == with_answers
    # Without a norm before the MLP, the two updates can't be told apart.
    assert ("attention_update" in measures) == with_answers
    assert ("mlp_update" in measures) == with_answers

    page = (out / "report.html").read_text()
    assert ("attention and MLP add was not told apart" in page) != with_answers
    assert ("Rows without answers tell only what changes" in page) != with_answers
    first_chapter = page.split("<h2>")[0]
    assert "Image tokens enter at " in first_chapter
    assert (out / "figures/sweep.png").exists()
