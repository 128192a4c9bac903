"""The study's statistics against scipy and counting by hand, its plan, its starts and its second learning rate."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import nn
from transformers import AutoProcessor, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from examples.emoji import evaluate
from examples.emoji.study import __main__ as study
from examples.emoji.study import measures, starts
from examples.emoji.study import run as study_run
from examples.emoji.study import train as study_train
from examples.emoji.study.analysis import (
    ArmModel,
    Difference,
    holm,
    judge_norm_or_rate,
    judge_what_to_do,
    needs_more_seeds,
    report,
    sentence,
    simple_effects,
)
from examples.emoji.study.cells import (
    LAYER_NORM,
    NORM_OR_RATE,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    WHAT_TO_DO,
    Arm,
    Block,
    Projector,
    Record,
    cells_left,
    complete_seeds,
    counted,
)
from examples.emoji.study.run import second_layer_rate
from examples.emoji.study.starts import START_FILE, begin
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, dump_recipe, weights


PROJECTOR = "model.multi_modal_projector"


def record(block: Block, arm: Arm, seed: int, points: float = 30.0, processor: str = "a CPU") -> Record:
    """A run's record whose two deciding artists have `points` percent of right names, of 1,000 drawings each."""
    digits = ("1" * round(10 * points)).ljust(1000, "0")
    return {
        "block": block.number,
        "arm": arm.name,
        "seed": seed,
        "processor": processor,
        "data": "rows",
        "minutes": 10.0,
        "hits": {"twemoji": digits, "emojione": digits, "openmoji": "01"},
        "perplexity": 18.0,
        "losses": [2.0, 1.0],
        "start": {"norm": 1.0, "names_by_tokens": 20.0},
        "end": {"norm": 2.0, "names_by_tokens": 25.0},
        "gain": None,
        "clipped": {"language_model": 50.0},
    }


def records_of(block: Block, points: dict[Arm, list[float]], processor: str = "a CPU") -> list[Record]:
    rows = []
    for arm, shares in points.items():
        for seed, share in zip(block.seeds, shares, strict=True):
            rows.append(record(block, arm, seed, share, processor))
    return rows


def test_arms_are_compared_as_scipy_does_where_there_is_one_processor() -> None:
    draw = np.random.default_rng(0)
    samples = [draw.normal(mean, 2, size=8) for mean in (28, 31, 35)]
    arms = [name for name in "abc" for _ in range(8)]
    model = ArmModel(arms, ["a CPU"] * 24, np.concatenate(samples))

    assert model.f_test() == pytest.approx(stats.f_oneway(*samples).pvalue, rel=1e-9)
    tukey = stats.tukey_hsd(*samples)
    interval = tukey.confidence_interval(0.995)
    pair = model.pair("a", "c", level=0.005)
    assert pair.adjusted_p == pytest.approx(tukey.pvalue[0, 2], rel=1e-3)
    assert (pair.adjusted_low, pair.adjusted_high) == pytest.approx(
        (interval.low[0, 2], interval.high[0, 2]), abs=1e-4
    )
    assert (pair.verdict, model.pair("c", "a", 0.005).verdict) == ("behind", "ahead")

    # Two arms alone are a t test.
    two = ArmModel(arms[:16], ["a CPU"] * 16, np.concatenate(samples[:2]))
    difference = two.difference({"b": 1, "a": -1})
    expected = stats.ttest_ind(samples[1], samples[0])
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (difference.low, difference.high) == pytest.approx(tuple(expected.confidence_interval()), abs=1e-9)


def test_a_processor_that_is_better_for_all_arms_changes_no_comparison() -> None:
    draw = np.random.default_rng(1)
    arms = ["a", "b"] * 8
    processors = ["a CPU"] * 10 + ["a GPU"] * 6
    outcomes = draw.normal(30, 2, size=16)
    shifted = outcomes + np.where(np.array(processors) == "a GPU", 50.0, 0.0)

    as_it_is = ArmModel(arms, processors, outcomes).difference({"a": 1, "b": -1})
    with_shift = ArmModel(arms, processors, shifted).difference({"a": 1, "b": -1})
    assert with_shift.estimate == pytest.approx(as_it_is.estimate)
    assert (with_shift.low, with_shift.p) == pytest.approx((as_it_is.low, as_it_is.p))
    # Without processors in the model the shift would drown the arms.
    ignored = ArmModel(arms, ["a CPU"] * 16, shifted).difference({"a": 1, "b": -1})
    assert ignored.high - ignored.low > 5 * (with_shift.high - with_shift.low)


def test_effects_of_norm_and_rate_by_hand() -> None:
    spread = [-1.0, 1.0] * 4
    means = {SCALED: 36.0, SCALED_SLOWLY: 33.0, NOTHING_FAST: 31.0, NOTHING: 30.0}
    rows = records_of(NORM_OR_RATE, {arm: [mean + apart for apart in spread] for arm, mean in means.items()})
    effects = judge_norm_or_rate(rows)
    expected = {
        "norm": 4.0,  # (36 + 33) / 2 - (31 + 30) / 2
        "rate": 2.0,  # (36 + 31) / 2 - (33 + 30) / 2
        "interaction": 2.0,  # (36 - 33) - (31 - 30)
    }
    simple = {
        "norm, at relative rate 1": 5.0,
        "norm, at relative rate 1/k": 3.0,
        "rate, at norm T": 3.0,
        "rate, at norm kT": 1.0,
    }
    assert {name: effect.estimate for name, effect in effects.items()} == pytest.approx(expected)
    assert {name: effect.estimate for name, effect in simple_effects(rows).items()} == pytest.approx(simple)
    # Eight values of +-1 an arm: a variance of 8/7 a run, half of it by 8 for a main effect; t of 28 degrees is 2.048.
    reach = 2.0484 * (8 / 7 / 8) ** 0.5
    assert effects["norm"].high - 4.0 == pytest.approx(reach, abs=1e-3)


def test_holm_by_hand() -> None:
    assert holm({"a": 0.03, "b": 0.02}) == pytest.approx({"b": 0.04, "a": 0.04})
    assert holm({"a": 0.01, "b": 0.6}) == pytest.approx({"a": 0.02, "b": 0.6})
    assert holm({"a": 0.7, "b": 0.6}) == pytest.approx({"b": 1.0, "a": 1.0})


@pytest.mark.parametrize(
    ("norm_p", "rate_p", "interaction_p", "said"),
    [
        (0.001, 0.3, 0.5, "At equal relative rates, smaller image embeddings gain 4.0 points (2.0 to 6.0); a faster"),
        (
            0.3,
            0.001,
            0.5,
            "At equal norms, models with a faster second layer lose 1.0 points (-3.0 to 1.0 gained); smal",
        ),
        (0.001, 0.04, 0.5, "Smaller image embeddings gain 4.0 points (2.0 to 6.0); models with a faster second layer"),
        # 0.03 alone would be clear; of two tests, neither is.
        (0.03, 0.06, 0.5, "Undecided; effects above 6.0 points are excluded."),
        # Where only both together gain, neither gains by itself.
        (0.001, 0.001, 0.01, "Norm and rate interact: read the simple effects."),
    ],
)
def test_block_1_says_what_its_effects_allow(norm_p: float, rate_p: float, interaction_p: float, said: str) -> None:
    effects = {
        "norm": Difference(4, 2, 6, norm_p),
        "rate": Difference(-1, -3, 1, rate_p),
        "interaction": Difference(0, 0, 0, interaction_p),
    }
    assert sentence(effects).startswith(said)


def test_simple_effects_are_shown_only_where_the_interaction_is_clear() -> None:
    spread = [-1.0, 1.0] * 4

    def shown(**means: float) -> str:
        points = {arm: [means[name] + apart for apart in spread] for name, arm in ARMS.items()}
        return report(NORM_OR_RATE, records_of(NORM_OR_RATE, points))

    assert "at norm T" not in shown(both=36, norm=33, rate=33, neither=30)
    assert "rate, at norm T" in shown(both=40, norm=30, rate=30, neither=30)


ARMS = {"both": SCALED, "norm": SCALED_SLOWLY, "rate": NOTHING_FAST, "neither": NOTHING}


def test_a_second_look_only_where_scaling_and_norm_are_unclear() -> None:
    spread = [-2.0, 2.0] * 4
    unclear = {NOTHING: spread, SCALED: [7 + apart for apart in spread], LAYER_NORM: [4 + apart for apart in spread]}
    clear = {**unclear, LAYER_NORM: spread}
    unclear_rows = records_of(WHAT_TO_DO, {arm: [30 + apart for apart in shares] for arm, shares in unclear.items()})
    clear_rows = records_of(WHAT_TO_DO, {arm: [30 + apart for apart in shares] for arm, shares in clear.items()})
    assert needs_more_seeds(unclear_rows)
    assert not needs_more_seeds(unclear_rows[:-1])  # not before the first look
    assert not needs_more_seeds(clear_rows)

    p, pairs = judge_what_to_do(unclear_rows)
    assert p < 0.001
    assert [(pair.verdict, pair.level) for pair in pairs] == [("unclear", 0.005), ("ahead", 0.005), ("ahead", 0.005)]
    block = study.planned_blocks(unclear_rows)[0]
    assert len(cells_left(block, unclear_rows, "a CPU")) == 3 * 8

    more = [row | {"seed": row["seed"] + 8} for row in unclear_rows]
    _, pairs = judge_what_to_do(unclear_rows + more)
    assert [(pair.verdict, pair.level) for pair in pairs] == [("ahead", 0.048), ("ahead", 0.048), ("ahead", 0.048)]


def test_equal_means_an_interval_within_three_points() -> None:
    close = [30 + apart for apart in (-0.5, 0.5)] * 8
    arms = [name for name in ("a", "b") for _ in range(16)]
    assert ArmModel(arms, ["a CPU"] * 32, close * 2).pair("a", "b", 0.048).verdict == "equal within 3 points"
    wide = [30 + apart for apart in (-6, 6)] * 8
    assert ArmModel(arms, ["a CPU"] * 32, wide * 2).pair("a", "b", 0.048).verdict == "unclear"


def test_all_arms_of_a_seed_run_on_one_processor() -> None:
    rows = [record(WHAT_TO_DO, arm, 101, processor="a CPU") for arm in WHAT_TO_DO.arms]
    rows.append(record(WHAT_TO_DO, NOTHING, 102, processor="a CPU"))
    rows.append(record(WHAT_TO_DO, NOTHING, 103, processor="a GPU"))
    rows.append(record(WHAT_TO_DO, SCALED, 103, processor="a GPU"))

    def seeds_in_order(processor: str) -> list[int]:
        return list(dict.fromkeys(cell.seed for cell in cells_left(WHAT_TO_DO, rows, processor)))

    untouched = [104, 105, 106, 107, 108]
    assert seeds_in_order("a CPU") == [102, *untouched, 103]
    assert seeds_in_order("a GPU") == [103, *untouched, 102]
    assert [cell.arm for cell in cells_left(WHAT_TO_DO, rows, "a GPU") if cell.seed == 103] == [LAYER_NORM]
    # What began elsewhere begins anew, with all arms.
    assert [cell.arm for cell in cells_left(WHAT_TO_DO, rows, "a GPU") if cell.seed == 102] == list(WHAT_TO_DO.arms)
    assert complete_seeds(WHAT_TO_DO, rows) == {101: "a CPU"}
    assert counted(WHAT_TO_DO, rows) == rows[:3]


def test_no_result_is_shown_before_a_block_ends() -> None:
    rows = records_of(WHAT_TO_DO, {arm: [30.0, 33, 36, 31, 32, 34, 29, 30] for arm in WHAT_TO_DO.arms})
    said = study.describe_progress(rows[:-1], "a CPU")
    assert said.splitlines()[0].startswith("Block 2: 1 of 24 runs left, about 0.2 hours")
    assert "less" not in said
    said = study.describe_progress(rows, "a CPU")
    assert "scaled once less LayerNorm at T: unclear" not in said  # eight seeds more come first
    assert said.splitlines()[0].startswith("Block 2: 24 of 48 runs left")
    far = [row | {"hits": {**row["hits"], "twemoji": "1"}} if row["arm"] == SCALED.name else row for row in rows]
    assert "scaled once less LayerNorm at T: ahead" in study.describe_progress(far, "a CPU")


@pytest.mark.parametrize("k", [4.35, 0.5])
def test_a_folded_multiplier_behind_the_second_layer_is_that_multiplier(k: float) -> None:
    """Block 1 divides weights and rate by k in place of a multiplier 1/k: the same outputs, and the same steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **sizes}, text_config={"vocab_size": 9, **sizes}
    )
    multiplied = LlavaMultiModalProjector(config).double()
    nn.init.normal_(multiplied.linear_2.bias)
    folded = LlavaMultiModalProjector(config).double()
    folded.load_state_dict(multiplied.state_dict())
    with torch.no_grad():
        for parameter in folded.linear_2.parameters():
            parameter /= k

    def optimizer(projector: nn.Module, second_rate: float) -> torch.optim.Optimizer:
        groups = [
            {"params": projector.linear_1.parameters(), "lr": 2e-4},
            {"params": projector.linear_2.parameters(), "lr": second_rate},
        ]
        return torch.optim.AdamW(groups, eps=1e-30, weight_decay=0.0)

    steps = [(multiplied, 1 / k, optimizer(multiplied, 2e-4)), (folded, 1.0, optimizer(folded, 2e-4 / k))]
    features, wanted = torch.randn(2, 5, 4, 12, dtype=torch.float64)
    outputs = []
    for projector, multiplier, adam in steps:
        for _ in range(20):
            output = multiplier * projector(features)
            adam.zero_grad()
            (output - wanted).square().mean().backward()
            adam.step()
        outputs.append(output)
    assert torch.allclose(*outputs, rtol=1e-9, atol=1e-12)


def test_arms_begin_with_one_projector(composed: Callable[..., Path], tmp_path: Path) -> None:
    """Outputs of the shared start: times k for nothing, the same for scaled once, normed for the norm."""
    shared = NormLlavaForConditionalGeneration.from_pretrained(composed("siglip", "qwen2", "none"))
    shared.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(composed()).save_pretrained(tmp_path)
    (tmp_path / START_FILE).write_text(json.dumps({"seed": 1, "k": 4.0}))
    features = torch.randn(2, 4, 24)
    before = shared.model.multi_modal_projector(features)

    outputs = {}
    for arm in (NOTHING, SCALED, LAYER_NORM):
        model, _ = begin(arm, tmp_path)
        model.save_pretrained(tmp_path / "begun")
        loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "begun")
        outputs[arm.projector] = loaded.model.multi_modal_projector(features)
    assert torch.equal(outputs[Projector.PLAIN], 4 * before)
    assert torch.equal(outputs[Projector.SCALED], before)

    norms = loaded.get_input_embeddings().weight.norm(dim=-1)
    expected = nn.functional.layer_norm(4 * before, (32,)) * norms[norms > 0].mean() / 32**0.5
    assert torch.allclose(outputs[Projector.NORM], expected, atol=1e-5)
    assert loaded.config.projector_norm == "gwc"
    assert [second_layer_rate(study.Cell(NORM_OR_RATE, arm, 201), 4.0) for arm in NORM_OR_RATE.arms] == pytest.approx(
        [2e-4, 5e-5, 8e-4, 2e-4]
    )


def test_the_second_layer_learns_at_its_own_rate(composed: Callable[..., Path], tmp_path: Path) -> None:
    """Adam's first step moves a weight by its rate, so the largest change says which rate that was."""
    Image.new("RGB", (28, 28), "red").save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    (tmp_path / "data.json").write_text(json.dumps([{"image": "a.png", "conversations": turns}] * 4))
    fields: dict[str, Any] = {
        **FAST,
        **INSTRUCT,
        "model_name_or_path": str(composed()),
        "dataset_name": str(tmp_path / "data.json"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "lr_scheduler_type": "constant",
        "projector_learning_rate": 1e-3,
        "clip_by_module": True,
        "logging_steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(dump_recipe(**fields))
    study_train.main(4e-3, ["--config", str(tmp_path / "recipe.yaml")])

    before = weights(composed())
    after = weights(tmp_path / "out")
    for layer, rate in (("linear_1", 1e-3), ("linear_2", 4e-3)):
        moved = (after[f"{PROJECTOR}.{layer}.weight"] - before[f"{PROJECTOR}.{layer}.weight"]).abs().max()
        assert moved.item() == pytest.approx(rate, rel=1e-2)
    # Both layers are one module to clipping.
    (clipped,) = [measures.read_training(tmp_path / "out", max_grad_norm=0.0)["clipped"]]
    assert [name for name in clipped if "projector" in name] == ["multi_modal_projector", "multi_modal_projector.norm"]


def test_a_model_of_one_name(always_a: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is right for its drawing and for a near copy, whoever drew it."""
    for module in (measures, evaluate, starts):
        monkeypatch.setattr(module, "RUN", tmp_path)
    monkeypatch.setattr(measures, "ONE_NAME", {"AA": "A"})
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (28, 28), "red").save(tmp_path / "pictures" / "a.png")
    sets = {"emojione": ["A", "b", "b", "b"], "twemoji": ["A", "AA", "b", "c"], "openmoji": ["b"], "noto": ["A"]}
    rows = [{"image": "a.png", "set": artist, "name": name} for artist, names in sets.items() for name in names]
    (tmp_path / "pictures" / "pictures.json").write_text(json.dumps(rows))

    model = NormLlavaForConditionalGeneration.from_pretrained(always_a()).eval()
    processor = AutoProcessor.from_pretrained(always_a())
    measured = measures.measure_model(model, processor)
    assert measured["hits"] == {"twemoji": "1100", "emojione": "1000", "openmoji": "0"}


def test_tokens_that_point_at_a_name_find_it(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (measures, evaluate):
        monkeypatch.setattr(module, "RUN", tmp_path)
    (tmp_path / "pictures").mkdir()
    rows = []
    for artist, name in itertools.product(("twemoji", "emojione"), ("ant", "bee", "cat")):
        Image.new("RGB", (28, 28)).save(tmp_path / "pictures" / f"{name}.png")
        rows.append({"image": f"{name}.png", "set": artist, "name": name})
    (tmp_path / "pictures" / "pictures.json").write_text(json.dumps(rows))
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    vocabulary = model.get_input_embeddings().weight.norm(dim=-1)
    target = vocabulary[vocabulary > 0].mean()

    def tokens_of(model: Any, processor: Any, records: list[Record]) -> torch.Tensor:
        """Each drawing's tokens are the mean of its name's embeddings, at three times the text's norm."""
        pointing = []
        for drawn in records:
            ids = processor.tokenizer(f" {drawn['name']}", add_special_tokens=False, return_tensors="pt").input_ids
            embedding = model.get_input_embeddings()(ids)[0].mean(dim=0)
            pointing.append((3 * target * nn.functional.normalize(embedding, dim=-1)).expand(4, -1))
        return torch.stack(pointing).detach()

    monkeypatch.setattr(measures, "image_tokens", tokens_of)
    measured = measures.measure_tokens(model, processor)
    assert measured["names_by_tokens"] == 100
    assert measured["norm"] == pytest.approx(3, rel=1e-4)


def test_rows_of_the_artists_who_are_asked_about_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "RUN", tmp_path)
    (tmp_path / "pictures").mkdir()
    rows = [{"image": "emojione/a.png"}, {"image": "noto/a.png"}, {"conversations": []}]
    (tmp_path / "pictures" / "train.json").write_text(json.dumps(rows))
    assert json.loads(starts.write_rows("train.json", tmp_path).read_text()) == rows[1:]


def test_records_name_a_commit_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(commit: str | None) -> None:
        environment = SimpleNamespace(commit=commit)
        monkeypatch.setattr(study, "describe_environment", lambda *args, **kwargs: environment)

    at("0123-dirty")
    with pytest.raises(ValueError, match="commit them"):
        study.find_commit(None)
    at("0123")
    assert study.find_commit(None) == study.find_commit("0123") == "0123"
    with pytest.raises(ValueError, match="this is 0123"):
        study.find_commit("4567")
    at(None)
    assert study.find_commit("4567") == "4567"
    with pytest.raises(ValueError, match="give --commit"):
        study.find_commit(None)


def test_a_record_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records.jsonl")
    rows = [record(WHAT_TO_DO, arm, 101) for arm in WHAT_TO_DO.arms]
    lines = [json.dumps(row) for row in rows]
    study.RECORDS.write_text("\n".join([*lines, *lines]))
    assert study.read_records() == rows
    study.RECORDS.write_text("\n".join([*lines, json.dumps(rows[0] | {"minutes": 11.0})]))
    with pytest.raises(ValueError, match="two records of the run"):
        study.read_records()
    study.RECORDS.write_text("\n".join([*lines[:2], json.dumps(rows[2] | {"data": "other"})]))
    with pytest.raises(ValueError, match="different rows"):
        study.read_records()


def test_what_another_processor_began_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "processor_name", lambda: "a CPU")
    study_run.claim(tmp_path / "run", "0123")
    (tmp_path / "run" / "checkpoint-60").mkdir()
    study_run.claim(tmp_path / "run", "0123")
    assert (tmp_path / "run" / "checkpoint-60").exists()
    monkeypatch.setattr(study_run, "processor_name", lambda: "a GPU")
    study_run.claim(tmp_path / "run", "0123")
    assert not (tmp_path / "run" / "checkpoint-60").exists()


def test_of_two_processors_the_first_that_had_all_arms_counts() -> None:
    rows = [record(WHAT_TO_DO, NOTHING, 101, processor="a CPU")]
    rows += [record(WHAT_TO_DO, arm, 101, processor="a GPU") for arm in WHAT_TO_DO.arms]
    rows += [record(WHAT_TO_DO, arm, 101, processor="a CPU") for arm in WHAT_TO_DO.arms[1:]]
    assert complete_seeds(WHAT_TO_DO, rows) == {101: "a GPU"}
