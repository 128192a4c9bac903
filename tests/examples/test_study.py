"""The study: its statistics against scipy and by hand, its plan of runs, its starts, and its second learning rate."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
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
    judge_block_1,
    judge_block_2,
    needs_more_seeds,
    report,
    sentence,
    simple_effects,
)
from examples.emoji.study.cells import (
    BLOCK_1,
    BLOCK_2,
    LAYER_NORM,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    Arm,
    Block,
    Projector,
    Record,
    cells_left,
    complete_seeds,
    records_that_count,
)
from examples.emoji.study.run import second_layer_rate
from examples.emoji.study.starts import START_FILE, make_arm_model
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, dump_recipe, load_weights


PROJECTOR = "model.multi_modal_projector"


def make_record(block: Block, arm: Arm, seed: int, points: float = 30.0, processor: str = "a CPU") -> Record:
    """A run's record. Each primary artist has 1,000 drawings, of which `points` percent have the right name."""
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


def make_records(block: Block, points: dict[Arm, list[float]], processor: str = "a CPU") -> list[Record]:
    """Records of a block in which each arm has these percentages of right names, one for each seed."""
    records = []
    for arm, arm_points in points.items():
        for seed, run_points in zip(block.seeds, arm_points, strict=True):
            records.append(make_record(block, arm, seed, run_points, processor))
    return records


def eight_around(mean: float, distance: float) -> list[float]:
    """Eight values, one for each seed of a block: four below the mean and four above it, all at the same distance."""
    return [mean - distance, mean + distance] * 4


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
    assert pair.adjusted_low == pytest.approx(interval.low[0, 2], abs=1e-4)
    assert pair.adjusted_high == pytest.approx(interval.high[0, 2], abs=1e-4)
    assert pair.verdict == "behind"
    assert model.pair("c", "a", level=0.005).verdict == "ahead"

    # With two arms, the model's test is a t test.
    arms_a_and_b = ArmModel(arms[:16], ["a CPU"] * 16, np.concatenate(samples[:2]))
    difference = arms_a_and_b.difference({"b": 1, "a": -1})
    expected = stats.ttest_ind(samples[1], samples[0])
    low, high = expected.confidence_interval()
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert difference.low == pytest.approx(low, abs=1e-9)
    assert difference.high == pytest.approx(high, abs=1e-9)


def test_a_processor_that_is_better_for_all_arms_changes_no_comparison() -> None:
    draw = np.random.default_rng(1)
    arms = ["a", "b"] * 8
    processors = ["a CPU"] * 10 + ["a GPU"] * 6
    outcomes = draw.normal(30, 2, size=16)
    shifted = outcomes + np.where(np.array(processors) == "a GPU", 50.0, 0.0)

    without_shift = ArmModel(arms, processors, outcomes).difference({"a": 1, "b": -1})
    with_shift = ArmModel(arms, processors, shifted).difference({"a": 1, "b": -1})
    assert with_shift.estimate == pytest.approx(without_shift.estimate)
    assert with_shift.low == pytest.approx(without_shift.low)
    assert with_shift.p == pytest.approx(without_shift.p)

    # In a model without processors, the shift would make the interval much wider.
    without_processors = ArmModel(arms, ["a CPU"] * 16, shifted).difference({"a": 1, "b": -1})
    assert without_processors.high - without_processors.low > 5 * (with_shift.high - with_shift.low)


def test_effects_of_norm_and_rate_by_hand() -> None:
    means = {SCALED: 36.0, SCALED_SLOWLY: 33.0, NOTHING_FAST: 31.0, NOTHING: 30.0}
    rows = make_records(BLOCK_1, {arm: eight_around(mean, 1.0) for arm, mean in means.items()})
    effects = judge_block_1(rows)
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
    # Each arm has eight values at 1 from its mean, so a run's variance is 8/7. A main effect is the difference of two
    # means of 16 runs: its variance is 2/16 of that. The t value of 28 degrees of freedom is 2.048.
    reach = 2.0484 * (8 / 7 * 2 / 16) ** 0.5
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
        # A p of 0.03 would be clear if this were the only test. As one of two tests it isn't.
        (0.03, 0.06, 0.5, "Undecided; effects above 6.0 points are excluded."),
        # A clear interaction forbids sentences about each effect by itself.
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
    def report_for(means: dict[Arm, float]) -> str:
        points = {arm: eight_around(mean, 1.0) for arm, mean in means.items()}
        return report(BLOCK_1, make_records(BLOCK_1, points))

    # A small norm and a fast second layer each gain 3 points, together 6.
    without_interaction = report_for({SCALED: 36, SCALED_SLOWLY: 33, NOTHING_FAST: 33, NOTHING: 30})
    assert "at norm T" not in without_interaction
    # Only both together gain.
    with_interaction = report_for({SCALED: 40, SCALED_SLOWLY: 30, NOTHING_FAST: 30, NOTHING: 30})
    assert "rate, at norm T" in with_interaction


def test_a_second_look_only_where_scaling_and_norm_are_unclear() -> None:
    nothing = eight_around(30, 2.0)
    scaled = eight_around(37, 2.0)
    unclear_rows = make_records(BLOCK_2, {NOTHING: nothing, SCALED: scaled, LAYER_NORM: eight_around(34, 2.0)})
    clear_rows = make_records(BLOCK_2, {NOTHING: nothing, SCALED: scaled, LAYER_NORM: eight_around(30, 2.0)})
    assert needs_more_seeds(unclear_rows)
    assert not needs_more_seeds(clear_rows)
    # The first look comes when all runs are done.
    assert not needs_more_seeds(unclear_rows[:-1])

    # The pairs are: scaled once less LayerNorm, scaled once less nothing, LayerNorm less nothing.
    p, pairs = judge_block_2(unclear_rows)
    assert p < 0.001
    assert [pair.verdict for pair in pairs] == ["unclear", "ahead", "ahead"]
    assert {pair.level for pair in pairs} == {0.005}
    longer_block_2 = study.planned_blocks(unclear_rows)[0]
    assert len(cells_left(longer_block_2, unclear_rows, "a CPU")) == 3 * 8

    # Eight more seeds with the same results make all pairs clear.
    more_rows = [row | {"seed": row["seed"] + 8} for row in unclear_rows]
    _, pairs = judge_block_2(unclear_rows + more_rows)
    assert [pair.verdict for pair in pairs] == ["ahead", "ahead", "ahead"]
    assert {pair.level for pair in pairs} == {0.048}


def test_equal_means_an_interval_within_three_points() -> None:
    arms = ["a"] * 16 + ["b"] * 16
    processors = ["a CPU"] * 32
    close = ArmModel(arms, processors, eight_around(30, 0.5) * 4)
    assert close.pair("a", "b", level=0.048).verdict == "equal within 3 points"
    # The means are equal here too, but the interval is too wide to say so.
    wide = ArmModel(arms, processors, eight_around(30, 6.0) * 4)
    assert wide.pair("a", "b", level=0.048).verdict == "unclear"


def test_all_arms_of_a_seed_run_on_one_processor() -> None:
    # The CPU has finished seed 101 and begun 102, and the GPU has begun 103.
    rows = [make_record(BLOCK_2, arm, 101, processor="a CPU") for arm in BLOCK_2.arms]
    rows.append(make_record(BLOCK_2, NOTHING, 102, processor="a CPU"))
    rows.append(make_record(BLOCK_2, NOTHING, 103, processor="a GPU"))
    rows.append(make_record(BLOCK_2, SCALED, 103, processor="a GPU"))

    def seeds_in_order(processor: str) -> list[int]:
        return list(dict.fromkeys(cell.seed for cell in cells_left(BLOCK_2, rows, processor)))

    untouched = [104, 105, 106, 107, 108]
    assert seeds_in_order("a CPU") == [102, *untouched, 103]
    assert seeds_in_order("a GPU") == [103, *untouched, 102]

    cells_of_gpu = cells_left(BLOCK_2, rows, "a GPU")
    assert [cell.arm for cell in cells_of_gpu if cell.seed == 103] == [LAYER_NORM]
    # The CPU began seed 102, so the GPU would have to run all of its arms.
    assert [cell.arm for cell in cells_of_gpu if cell.seed == 102] == list(BLOCK_2.arms)
    assert complete_seeds(BLOCK_2, rows) == {101: "a CPU"}
    assert records_that_count(BLOCK_2, rows) == rows[:3]


def test_no_result_is_shown_before_a_block_ends() -> None:
    points = {arm: eight_around(32, 2.0) for arm in BLOCK_2.arms}
    rows = make_records(BLOCK_2, points)
    progress = study.describe_progress(rows[:-1], "a CPU")
    assert progress.startswith("Block 2: 1 of 24 runs left, about 0.2 hours")
    assert "less" not in progress  # as in "scaled once less LayerNorm at T"

    # The first look is unclear, so eight seeds more run before anything is shown.
    progress = study.describe_progress(rows, "a CPU")
    assert progress.startswith("Block 2: 24 of 48 runs left")
    assert "less" not in progress

    # A clear first look ends the block.
    clear_rows = make_records(BLOCK_2, points | {SCALED: eight_around(60, 2.0)})
    assert "scaled once less LayerNorm at T: ahead" in study.describe_progress(clear_rows, "a CPU")


@pytest.mark.parametrize("k", [4.35, 0.5])
def test_dividing_weights_and_rate_by_k_is_the_same_as_a_multiplier_of_one_over_k(k: float) -> None:
    """Block 1 divides the second layer's weights and learning rate by k.

    A multiplier 1/k behind the layer would give the same outputs, and the same after every step.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **sizes}, text_config={"vocab_size": 9, **sizes}
    )
    multiplied = LlavaMultiModalProjector(config).double()
    nn.init.normal_(multiplied.linear_2.bias)
    divided = LlavaMultiModalProjector(config).double()
    divided.load_state_dict(multiplied.state_dict())
    with torch.no_grad():
        for parameter in divided.linear_2.parameters():
            parameter /= k

    features, wanted = torch.randn(2, 5, 4, 12, dtype=torch.float64)

    def train(projector: nn.Module, multiplier: float, second_rate: float) -> torch.Tensor:
        """The outputs after twenty steps."""
        groups = [
            {"params": projector.linear_1.parameters(), "lr": 2e-4},
            {"params": projector.linear_2.parameters(), "lr": second_rate},
        ]
        # Adam's steps don't depend on the gradients' scale only if eps is far below them.
        adam = torch.optim.AdamW(groups, eps=1e-30, weight_decay=0.0)
        for _ in range(20):
            output = multiplier * projector(features)
            adam.zero_grad()
            (output - wanted).square().mean().backward()
            adam.step()
        return output

    by_multiplier = train(multiplied, multiplier=1 / k, second_rate=2e-4)
    by_division = train(divided, multiplier=1.0, second_rate=2e-4 / k)
    assert torch.allclose(by_multiplier, by_division, rtol=1e-9, atol=1e-12)


def test_arms_begin_with_one_projector(composed: Callable[..., Path], tmp_path: Path) -> None:
    """The shared start's projector puts out: k times as much in "nothing", the same in "scaled once".

    In "LayerNorm at T" its outputs are k times as large too, and then normalised to the text's norm.
    """
    shared = NormLlavaForConditionalGeneration.from_pretrained(composed("siglip", "qwen2", "none"))
    shared.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(composed()).save_pretrained(tmp_path)
    (tmp_path / START_FILE).write_text(json.dumps({"seed": 1, "k": 4.0}))
    features = torch.randn(2, 4, 24)
    before = shared.model.multi_modal_projector(features)

    outputs = {}
    for arm in (NOTHING, SCALED, LAYER_NORM):
        model, _ = make_arm_model(arm, tmp_path)
        model.save_pretrained(tmp_path / "begun")
        loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "begun")
        outputs[arm.projector] = loaded.model.multi_modal_projector(features)
    assert torch.equal(outputs[Projector.PLAIN], 4 * before)
    assert torch.equal(outputs[Projector.SCALED], before)

    norms = loaded.get_input_embeddings().weight.norm(dim=-1)
    expected = nn.functional.layer_norm(4 * before, (32,)) * norms[norms > 0].mean() / 32**0.5
    assert torch.allclose(outputs[Projector.NORM], expected, atol=1e-5)
    assert loaded.config.projector_norm == "gwc"


def test_the_second_layers_rate_is_that_of_the_arm() -> None:
    rates = {arm: second_layer_rate(arm, norm_ratio=4.0) for arm in BLOCK_1.arms}
    assert rates == pytest.approx({SCALED: 2e-4, SCALED_SLOWLY: 5e-5, NOTHING_FAST: 8e-4, NOTHING: 2e-4})


def test_the_second_layer_learns_at_its_own_rate(composed: Callable[..., Path], tmp_path: Path) -> None:
    """Adam's first step moves every weight by the learning rate, so the largest change shows that rate."""
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

    before = load_weights(composed())
    after = load_weights(tmp_path / "out")
    for layer, rate in (("linear_1", 1e-3), ("linear_2", 4e-3)):
        name = f"{PROJECTOR}.{layer}.weight"
        largest_change = (after[name] - before[name]).abs().max()
        assert largest_change.item() == pytest.approx(rate, rel=1e-2)

    # Gradients of both layers are clipped as one module.
    clipped = measures.read_training(tmp_path / "out", max_grad_norm=0.0)["clipped"]
    modules = [name for name in clipped if "projector" in name]
    assert modules == ["multi_modal_projector", "multi_modal_projector.norm"]


def test_a_name_is_right_for_its_drawing_and_for_a_near_copy(
    always_a: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model gives the name "A" to every drawing, and "AA" is drawn nearly like "A"."""
    for module in (measures, evaluate, starts):
        monkeypatch.setattr(module, "RUN", tmp_path)
    monkeypatch.setattr(measures, "SAME_DRAWING", {"AA": "A"})
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (28, 28), "red").save(tmp_path / "pictures" / "a.png")
    names_by_artist = {
        "emojione": ["A", "b", "b", "b"],
        "twemoji": ["A", "AA", "b", "c"],
        "openmoji": ["b"],
        "noto": ["A"],
    }
    rows = []
    for artist, names in names_by_artist.items():
        rows += [{"image": "a.png", "set": artist, "name": name} for name in names]
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

    def make_tokens(model: Any, processor: Any, records: list[Record]) -> torch.Tensor:
        """Four tokens for each drawing, equal to the mean of its name's embeddings at three times the text's norm."""
        tokens = []
        for drawing in records:
            name = f" {drawing['name']}"
            ids = processor.tokenizer(name, add_special_tokens=False, return_tensors="pt").input_ids
            embedding = model.get_input_embeddings()(ids)[0].mean(dim=0)
            token = 3 * target * nn.functional.normalize(embedding, dim=-1)
            tokens.append(token.expand(4, -1))
        return torch.stack(tokens).detach()

    monkeypatch.setattr(measures, "image_tokens", make_tokens)
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
    def set_commit(commit: str | None) -> None:
        monkeypatch.setattr(study, "current_commit", lambda: commit)

    set_commit("0123-dirty")
    with pytest.raises(ValueError, match="commit them"):
        study.find_commit(None)

    set_commit("0123")
    assert study.find_commit(None) == "0123"
    assert study.find_commit("0123") == "0123"
    with pytest.raises(ValueError, match="this is 0123"):
        study.find_commit("4567")

    set_commit(None)  # a copy without a repository
    assert study.find_commit("4567") == "4567"
    with pytest.raises(ValueError, match="give --commit"):
        study.find_commit(None)


def test_a_record_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records.jsonl")
    rows = [make_record(BLOCK_2, arm, 101) for arm in BLOCK_2.arms]
    lines = [json.dumps(row) for row in rows]
    # Lines that stand in the file twice are read once.
    study.RECORDS.write_text("\n".join([*lines, *lines]))
    assert study.read_records() == rows

    other_minutes = json.dumps(rows[0] | {"minutes": 11.0})
    study.RECORDS.write_text("\n".join([*lines, other_minutes]))
    with pytest.raises(ValueError, match="two records of the run"):
        study.read_records()

    other_data = json.dumps(rows[2] | {"data": "other"})
    study.RECORDS.write_text("\n".join([*lines[:2], other_data]))
    with pytest.raises(ValueError, match="different rows"):
        study.read_records()


def test_a_run_begins_anew_on_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "processor_name", lambda: "a CPU")
    study_run.claim_folder(tmp_path / "run", "0123")
    (tmp_path / "run" / "checkpoint-60").mkdir()
    study_run.claim_folder(tmp_path / "run", "0123")
    assert (tmp_path / "run" / "checkpoint-60").exists()
    monkeypatch.setattr(study_run, "processor_name", lambda: "a GPU")
    study_run.claim_folder(tmp_path / "run", "0123")
    assert not (tmp_path / "run" / "checkpoint-60").exists()


def test_a_seed_counts_on_the_processor_that_finished_it_first() -> None:
    # The CPU begins the seed, the GPU runs all of its arms, and then the CPU runs the others.
    rows = [make_record(BLOCK_2, NOTHING, 101, processor="a CPU")]
    rows += [make_record(BLOCK_2, arm, 101, processor="a GPU") for arm in BLOCK_2.arms]
    rows += [make_record(BLOCK_2, arm, 101, processor="a CPU") for arm in BLOCK_2.arms[1:]]
    assert complete_seeds(BLOCK_2, rows) == {101: "a GPU"}
