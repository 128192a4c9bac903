"""A sweep of visual norms, beside multiplying the decoder's input by hand and beside plain passes."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel

import families
from diagnostics import hooks, scaling, sweep
from diagnostics.__main__ import main
from diagnostics.answers import ask, distributions, encode, read
from diagnostics.comparison import ask_at_doses
from diagnostics.hooks import InterfaceHooks
from diagnostics.loading import load_model, load_questions
from diagnostics.parts import DiagnosticsError, find_decoder
from diagnostics.report import tell_sweep
from diagnostics.table import make_rows


@contextmanager
def by_hand(model: PreTrainedModel, mask: torch.Tensor, scale: float) -> Iterator[None]:
    """Multiply what the language model is given at a mask's positions, `(S,)`, in front of all of its layers."""

    def multiply(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        factors = torch.where(mask, scale, 1.0)[:, None]
        return args, kwargs | {"inputs_embeds": kwargs["inputs_embeds"] * factors}

    handle = model.get_decoder().register_forward_pre_hook(multiply, with_kwargs=True)
    yield
    handle.remove()


def first_layer(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What enters the decoder's first layer, what the norm before its MLP is given if there is one, and what leaves:
    `(S, hidden_size)` each."""
    seen: dict[str, torch.Tensor] = {}
    with InterfaceHooks(model, lambda place, states: seen.update({place: states[0]})):
        model(**sample)
    return seen


@pytest.mark.parametrize("name", ["normllava", "llava_next", "qwen2_5_vl", "gemma3", "cohere2_vision", "lfm2_vl"])
@torch.no_grad()
def test_scaling_equals_multiplying_by_hand(name: str) -> None:
    model, sample = families.build(name), families.inputs(name)
    visual = sample["input_ids"][0] == families.IMAGE
    plain = model(**sample).logits
    for control in scaling.CONTROLS:
        with scaling.scaled(model, visual, 1.0, control):
            assert torch.equal(model(**sample).logits, plain)
    for control, mask, factor in (("", visual, 3.0), (scaling.DIVIDED, ~visual, 1 / 3)):
        with by_hand(model, mask, factor):
            expected = model(**sample).logits
        with scaling.scaled(model, visual[None], 3.0, control):
            found = model(**sample).logits
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-4)
    seen = {None: first_layer(model, sample)}
    for control in ("", scaling.TAKEN_OUT, scaling.TURNED):
        with scaling.scaled(model, visual, 3.0, control):
            seen[control] = first_layer(model, sample)
    left, multiplied = seen[scaling.TAKEN_OUT]["after_mlp"], seen[""]["after_mlp"]
    expected = torch.where(visual[:, None], multiplied - 2 * seen[None]["decoder"], multiplied)
    assert torch.allclose(left, expected, atol=1e-5)
    if "before_mlp" in seen[None]:
        before, turned = (seen[of]["before_mlp"].double() for of in (None, scaling.TURNED))
        towards = torch.where(visual[:, None], before + 2 * seen[None]["decoder"], before)
        cosine = torch.nn.functional.cosine_similarity
        assert torch.allclose(cosine(before, turned), cosine(before, towards), atol=1e-5)
        assert torch.allclose(turned.norm(dim=-1), before.norm(dim=-1), rtol=1e-5)
        assert cosine(turned - before, towards - before)[visual].abs().mean() < 0.5  # another way
        assert torch.equal(turned[~visual], before[~visual])
    assert torch.equal(model(**sample).logits, plain)


@torch.no_grad()
def test_bfloat16_turns_as_little() -> None:
    model, sample = families.build("normllava").bfloat16(), families.inputs("normllava")
    visual, turned = sample["input_ids"][0] == families.IMAGE, []
    plain = first_layer(model, sample)
    for _ in range(2):
        with scaling.scaled(model, visual, 1.1, scaling.TURNED):
            turned.append(first_layer(model, sample)["before_mlp"])
    states = (plain["before_mlp"], plain["before_mlp"] + 0.1 * plain["decoder"].double(), turned[0])
    before, towards, found = (of[visual].double() for of in states)
    expected, cosine = (torch.nn.functional.cosine_similarity(before, of) for of in (towards, found))
    assert (1 - cosine).numpy() == pytest.approx((1 - expected).numpy(), rel=0.2)
    assert torch.equal(*turned)  # the same way each time


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "qwen3_vl", "gemma3", "glm4v"])
@torch.no_grad()
def test_answers_are_scored_as_in_one_pass(name: str) -> None:
    model, sample = families.build(name), families.inputs(name)
    model.lm_head.weight *= 20  # so that positions tell
    for answer in ([5, 6, 7], [8, 9]):
        (_, scores) = distributions(model, read(model, sample), [[8, 9, 8, 9], answer])
        longer = {key: of for key, of in sample.items() if of.shape != sample["input_ids"].shape}
        longer["input_ids"] = torch.cat([sample["input_ids"], torch.tensor([answer])], dim=1)
        for key in sample.keys() - longer.keys():  # masks and token types, as those of text
            longer[key] = torch.nn.functional.pad(sample[key], (0, len(answer)), value=int(key == "attention_mask"))
        expected = model(**longer).logits[0, sample["input_ids"].shape[1] - 1 : -1].log_softmax(dim=-1)
        assert torch.allclose(scores, expected, atol=1e-4)


def loss_by_hand(model: PreTrainedModel, inputs: Any, tokens: list[int], scale: float) -> float:
    """Mean loss of an answer in one pass over all of it."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    with by_hand(model, ids[0] == model.config.image_token_id, scale):
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, -len(tokens) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens)).item()


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


@torch.no_grad()
def test_measures_of_a_sweep(model: PreTrainedModel, composed: Callable[..., Path], data: Path) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    model.lm_head.weight *= 20
    measured = sweep(model, processor, data)
    rows = measured.swept.set_index(["measure", "control", "dose", "picture"])["value"].sort_index()
    own, blank = Image.open(data.with_name("1.png")).convert("RGB"), Image.new("RGB", (40, 30), "white")
    dog = processor.tokenizer("dog<|im_end|>", add_special_tokens=False).input_ids
    for control, image, dose in (("", own, 1.0), ("", own, 10.0), ("blank", blank, 10.0)):
        inputs = encode(processor, [ask("what is it?", image)])
        assert rows["loss", control, dose, 1].item() == pytest.approx(loss_by_hand(model, inputs, dog, dose), abs=1e-4)
    assert rows["kl", "", 1.0].abs().max() < 1e-6 < rows["kl", "", 30.0].min()
    change = rows["loss", "", 30.0] - rows["loss", "", 1.0]
    assert rows["loss_change", "", 30.0].to_numpy() == pytest.approx(change.to_numpy())
    doses = rows["kl", ""].index.get_level_values("dose").unique()
    assert 1 / rows["length", "", 1.0].mean() == pytest.approx(sorted(doses, key=lambda dose: abs(dose - 1))[1])
    # A key and a value of the last layer, as its projections make them.
    last, projected = find_decoder(model).layers[-1], {}
    for name in ("k_proj", "v_proj"):
        projection = getattr(last.self_attn, name)
        projection.register_forward_hook(
            lambda _, args, output, name=name: projected.setdefault(name, []).append(output)
        )
    inputs = encode(processor, [ask("what is it?", own)])
    visual = inputs["input_ids"][0] == model.config.image_token_id
    for dose in (1.0, 10.0):
        with by_hand(model, visual, dose):
            model(**inputs)
    for measure, name in (("keys, turned", "k_proj"), ("values, turned", "v_proj")):
        heads = [of[0, visual].unflatten(-1, (-1, last.self_attn.head_dim)) for of in projected[name]]
        expected = 1 - torch.nn.functional.cosine_similarity(*heads, dim=-1).mean().item()
        assert rows[measure, "", 10.0, 1] == pytest.approx(expected, abs=1e-5)
    # What layer 1 adds is what its two parts return.
    layer, seen = find_decoder(model).layers[0], {}
    layer.self_attn.register_forward_hook(lambda _, args, output: seen.update(attention=output[0]))
    layer.mlp.register_forward_hook(lambda _, args, output: seen.update(mlp=output))
    layer.register_forward_pre_hook(lambda _, args: seen.update(length=args[0]))
    model(**inputs)
    norms = {part: of[0, visual].norm(dim=-1).mean().item() for part, of in seen.items()}
    for part in ("attention", "mlp"):
        found = rows[f"{part}_update", "", 1.0, 1].item() / rows["length", "", 1.0, 1].item()
        assert found == pytest.approx(norms[part] / norms["length"], rel=1e-4)
    with pytest.raises(DiagnosticsError, match=r"call model.eval\(\)"):
        sweep(model.train(), processor, data)


@torch.no_grad()
def test_all_pictures_of_a_row_are_asked_about(
    model: PreTrainedModel, composed: Callable[..., Path], data: Path
) -> None:
    rows, processor = json.loads(data.read_text()), AutoProcessor.from_pretrained(composed())
    rows[0]["image"], rows[0]["conversations"][0]["value"] = ["0.png", "1.png"], "<image><image>\nwhat is it?"
    data.write_text(json.dumps(rows))
    questions = load_questions(data, 3).questions
    found = {measure: value for measure, value, *_ in ask_at_doses(model, processor, questions, 0, [1.0])}
    right = processor.tokenizer("A<|im_end|>", add_special_tokens=False).input_ids
    expected = loss_by_hand(model, encode(processor, [questions[0].prompt]), right, 1.0)
    assert found["loss"] - found["loss_change"] == pytest.approx(expected, abs=1e-5)


def test_a_short_answer_has_not_changed_and_is_right_where_it_is(always_a: Callable[..., Path], data: Path) -> None:
    model, processor = load_model(str(always_a()))
    for number, named in ((0, 1), (1, 0)):
        rows = [*ask_at_doses(model, processor, load_questions(data, 3).questions, number, [1.0])]
        assert {value for measure, value, *_ in rows if measure == "changed"} == {0}
        assert {value for measure, value, *_ in rows if measure == "named"} == {named}


@pytest.mark.parametrize(
    ("sign", "verdict"), [(-1, "Don't rescale .* clearly worse: × 0.3, × 3; clearly better: none"), (1, "may help:")]
)
def test_the_verdict(sign: int, verdict: str) -> None:
    rows = []
    for dose in (1.0, 0.3, 3.0):
        change = sign * (dose != 1) * np.array([0.2, 0.3, 0.4])
        numbers = {"named": 0.5 + change, "named_change": change, "loss": 2 - change, "loss_change": -change}
        numbers |= dict.fromkeys(("length", "attention_update", "mlp_update", "eps", "kl"), np.ones(3))
        rows += [make_rows(name, of).assign(dose=dose, control="") for name, of in numbers.items()]
    assert re.search(verdict, " ".join(tell_sweep(pd.concat(rows))))


@pytest.mark.parametrize("with_answers", [True, False])
def test_the_command(
    with_answers: bool, composed: Callable[..., Path], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, source = tmp_path / "report", data
    if not with_answers:
        source = tmp_path / "pictures"
        source.mkdir()
        for path in tmp_path.glob("*.png"):
            path.rename(source / path.name)
    options = ["--model", composed(), "--data", source, "--output_dir", out, "--sweep", "--num_samples", 3]
    monkeypatch.setattr("diagnostics.tokens.SINK_FACTOR", 1.01)  # some visual tokens are sinks
    monkeypatch.setattr(sys, "argv", ["diagnostics", *map(str, options)])
    if not with_answers:
        data.unlink()  # the folder's pictures alone
        monkeypatch.setattr(hooks, "MLP_NORMS", ())  # as if no norm stood before the MLP
    main()
    page, rows = (out / "report.html").read_text(), pd.read_csv(out / "sweep.csv")
    assert (out / "figures/sweep.png").exists()
    norms = rows.query("measure == 'norm' and layer == 0 and dose == 1").groupby("modality")["value"].mean()
    assert rows.query("measure == 'length'")["value"].mean() == pytest.approx(norms["visual"] / norms["text"])
    assert ("named" in set(rows["measure"])) == with_answers
    assert (scaling.TURNED in set(rows["control"])) == with_answers
    # Without a norm between them, what both add is neither's.
    assert ("attention_update" in set(rows["measure"])) == with_answers
    assert ("mlp_update" in set(rows["measure"])) == with_answers
    assert ("attention and MLP add was not told apart" in page) != with_answers
    assert ("Rows without answers tell only what changes" in page) != with_answers
    assert "Visual tokens enter at " in page.split("<h2>")[0]
