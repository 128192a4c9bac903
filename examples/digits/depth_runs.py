"""One run of the depth study: composing, both stages through `training/sft.py`, evaluation, and its record."""

import json
import logging
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from depth_plan import (
    ARMS,
    VARIANTS,
    VISION_SHARE,
    Arm,
    Job,
    Record,
    Study,
    add_record,
    options,
    read_records,
    size_of,
)
from depth_scenes import KINDS, write_data
from filelock import FileLock
from PIL import Image
from pretrain import TextSettings, train_text, train_vision
from report import (
    PROBE_SIZE,
    Prompt,
    SceneQuestion,
    accuracy,
    answer,
    load_scene_questions,
    with_image,
    with_text,
    write_probe,
)
from scenes import CELL, DIGITS
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaProcessor
from transformers.utils import logging as transformers_logging

from conversations.files import weights_fingerprint, write_whole
from diagnostics.dynamics import measure_point
from diagnostics.loading import load_model, load_questions
from diagnostics.samples import prepare_samples
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration
from modeling_normllava.modeling_normllava import Float32LayerNorm
from training import loading, sft
from training.compose import compose, measure_target
from training.merge import merge
from training.run import Run
from training.stages import LearningRates, ModuleGroup, Stage, freeze, prepare_stage


logger = logging.getLogger(__name__)

DEVICE_MAP = "cuda:0" if torch.cuda.is_available() else None  # stages and evaluation; backbones are trained on the CPU
MAX_NEW_TOKENS = 10  # the longest answer is four numbers of two words, and the end of the turn
VOCAB_SIZE = 700
# Settings of the language models, tried in turn until one can answer every kind of question in words: steps, learning
# rate, initializer range.
ATTEMPTS: dict[int, tuple[tuple[int, float, float], ...]] = {
    2: ((2000, 2e-3, 0.05),),
    3: ((2000, 2e-3, 0.05), (4000, 2e-3, 0.05)),
    6: ((2000, 1e-3, 0.04), (3000, 7e-4, 0.03)),
    12: ((2500, 7e-4, 0.03), (4000, 7e-4, 0.03)),
    24: ((2000, 5e-4, 0.02), (3000, 3e-4, 0.02)),
}


class Workplace:
    """Where a study's data, backbones, runs and records are."""

    def __init__(self, study: Study, root: Path, results: Path) -> None:
        self.study, self.root, self.results = study, root, results
        self.data, self.vision = root / "data", root / "vision"

    def text(self, decoder: str) -> Path:
        """The language model of a decoder."""
        return self.root / "text" / decoder


def prepare(place: Workplace) -> None:
    """Make data and vision encoder, as far as they aren't there.

    Raises:
        ValueError: if the folder was made with other sizes, or the records are of other data.
    """
    sizes = {"sizes": asdict(place.study.sizes), "steps": [place.study.vision_steps, place.study.text_steps]}
    made_with = place.root / "sizes.json"
    if made_with.exists() and json.loads(made_with.read_text(encoding="utf-8")) != sizes:
        raise ValueError(f"{place.root} was made with other sizes, see {made_with}: choose another --output_dir.")
    write_whole(made_with, json.dumps(sizes))
    if not (place.data / "test.json").exists():
        write_data(place.data, place.study.sizes)
    write_probe(plain_questions(place.data), place.data / "probe.json")
    guessing = {split: guessing_scores(load_scene_questions(place.data, split)) for split in ("validation", "test")}
    recorded = read_records(place.results)["data"]
    for split, scores in guessing.items():
        if recorded.get(split, scores) != scores:
            raise ValueError(f"{place.results} holds results on other data than {place.data}: choose other --results.")
        if split not in recorded:
            add_record(place.results, "data", split, scores)
    if not (place.vision / "preprocessor_config.json").exists():
        logger.info("%s", train_vision(place.vision, place.study.vision_steps))


def plain_questions(data: Path) -> list[SceneQuestion]:
    """What test runs are looked inside of with: colour and digit of a cell, so that all are of one length."""
    return [question for question in load_scene_questions(data) if question.kind == "both"][:PROBE_SIZE]


def guessing_scores(questions: list[SceneQuestion]) -> Record:
    """How many questions there are, and what the commonest answer of each kind scores."""
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        answers[question.kind][question.answer] += 1
    guessing = {kind: max(found.values()) / found.total() for kind, found in answers.items()}
    return {"questions": len(questions), "guessing": guessing}


def make_language_model(place: Workplace, decoder: str) -> None:
    """Train a decoder's language model with the first settings that pass the gate, or those that pass most of it.

    Raises:
        ValueError: if it was recorded on another machine, and passes in other kinds of question now.
    """
    folder = place.text(decoder)
    rows = json.loads((place.data / "text.json").read_text(encoding="utf-8"))
    attempts: list[tuple[Path, Record]] = []
    layers, width = size_of(decoder)
    for steps, rate, initializer_range in ATTEMPTS[layers]:
        steps, narrower = round(steps * place.study.text_steps), 128 / width
        settings = TextSettings(layers, width, VOCAB_SIZE, steps, rate * narrower, initializer_range * narrower**0.5)
        attempt = folder.with_name(f"{decoder}-{settings.num_steps}-{settings.learning_rate:g}")
        if not (attempt / "tokenizer.json").exists():
            train_text(rows, attempt, settings, compiled=True)
        gate = score_in_words(place, attempt)
        kinds = [kind for kind in KINDS if gate[kind] >= place.study.gate]
        attempts.append((attempt, {"settings": asdict(settings), "gate": gate, "kinds": kinds}))
        if len(kinds) == len(KINDS):
            break
    best, record = max(attempts, key=lambda attempt: len(attempt[1]["kinds"]))
    before = read_records(place.results)["language_models"].get(decoder, record)
    if before["kinds"] != record["kinds"]:
        raise ValueError(
            f"The language model of {decoder}, made again, answers {record['kinds']}, the recorded one "
            f"{before['kinds']}: runs that are recorded would be scored anew. Choose other --results."
        )
    shutil.copytree(best, folder, dirs_exist_ok=True)
    tried = [record for _, record in attempts]
    add_record(place.results, "language_models", decoder, {**record, "attempts": tried})


def score_in_words(place: Workplace, folder: Path) -> dict[str, float]:
    """Exact match by kind of a language model about validation scenes in words."""
    questions = load_scene_questions(place.data, "validation")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return ask_all(model, tokenizer, questions, with_text, "gate")


def run_jobs(place: Workplace, jobs: list[Job]) -> None:
    """Run jobs that share stage 1, one after the other; those that are recorded by now are left out."""
    for job in jobs:
        if job.key not in read_records(place.results)["runs"]:
            add_record(place.results, "runs", job.key, run_job(place, job))


def run_job(place: Workplace, job: Job) -> Record:
    """Compose, train and evaluate; the record of it."""
    arm, started = ARMS[job.arm], time.monotonic()
    stage1 = place.root / "runs" / job.stage1
    stage2 = stage1.with_name(f"{stage1.name}-{job.variant}-{job.rates[1]:g}-{job.split}")
    with swapped(Float32LayerNorm, "_normalize", scale, arm.start == "scale"):
        try:
            with FileLock(stage1.with_name(f"{stage1.name}.lock")):
                if not (stage1 / "trainer_state.json").exists():
                    make_stage1(place, job, stage1)
            trained = make_stage2(place, job, stage1, stage2)
        except FloatingPointError as error:  # it diverged, and is scored for it
            nothing_right = {asked: dict.fromkeys(KINDS, 0.0) for asked in ("picture", "words", "blanked")}
            return {**options(job), "diverged": str(error), **nothing_right}
        record = {**options(job), "environment": asdict(Run.read(stage2).environment)}
        record["language_model"] = weights_fingerprint(place.text(job.decoder))
        record["vision"] = weights_fingerprint(place.vision)
        record |= {name: losses(folder) for name, folder in (("stage1", stage1), ("stage2", stage2))}
        record |= evaluate(place, job, trained)
        if job.split == "test":
            probe = place.data / "probe.json"
            record["inside"] = {
                name: look_inside(place, folder) | norms_by_layer(folder, probe)
                for name, folder in (("stage1", stage1), ("stage2", trained))
            }
    shutil.rmtree(stage2)
    return record | {"seconds": round(time.monotonic() - started)}


@contextmanager
def swapped(owner: Any, name: str, value: Any, condition: bool) -> Iterator[None]:
    """Another attribute for the time of the block, where the condition holds."""
    before = getattr(owner, name)
    if condition:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def scale(self: Float32LayerNorm, hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """Gain and bias of a norm that doesn't normalise (LayerScale, arXiv 2103.17239)."""
    return hidden_states * weight + bias


def prepare_projector(model: Any, stage: Stage, rates: LearningRates, **dtypes: torch.dtype) -> list[ModuleGroup]:
    """`training.stages.prepare_stage`, and then everything frozen but the projector and its norm."""
    groups = [
        group if group.name.startswith("multi_modal_projector") else replace(group, learning_rate=None)
        for group in prepare_stage(model, stage, rates, **dtypes)
    ]
    freeze(groups)
    return groups


def make_stage1(place: Workplace, job: Job, folder: Path) -> None:
    """Compose, and train projector and norm."""
    arm, composed = ARMS[job.arm], folder.with_name(f"{folder.name}-composed")
    with FileLock(place.text(job.decoder).with_suffix(".lock")):
        if not place.text(job.decoder).exists():  # recorded on another machine
            make_language_model(place, job.decoder)
    parts = (str(place.vision), str(place.text(job.decoder)))
    model, processor = compose(*parts, arm.norm, arm.align, vision_feature_layer=-1, seed=job.seed)
    start_arm(model, processor, arm, place.data)
    for part in (model, processor):
        part.save_pretrained(composed)
    train_stage(place, job, "stage1", composed, folder, {"weight_decay": arm.decay})
    shutil.rmtree(composed)


def make_stage2(place: Workplace, job: Job, stage1: Path, folder: Path) -> Path:
    """Train on questions; where the model is, with adapters merged."""
    variant, rate = VARIANTS[job.variant], job.rates[1]
    changes = {"vision_learning_rate": rate * VISION_SHARE, **dict(variant.stage2)}
    with swapped(loading, "prepare_stage", prepare_projector, variant.projector_alone):
        train_stage(place, job, "stage2", stage1, folder, changes)
    if changes.get("stage") != Stage.ADAPT:
        return folder
    merged = folder / "merged"
    merge(str(folder)).save_pretrained(merged)
    LlavaProcessor.from_pretrained(folder).save_pretrained(merged)
    return merged


@torch.no_grad()
def start_arm(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, arm: Arm, data: Path) -> None:
    """What composing doesn't offer: a gain that is a multiple of T's, and starts at T without normalising."""
    projector: Any = model.model.multi_modal_projector
    config: Any = model.config
    if arm.dial != 1:
        projector.norm.weight *= arm.dial
        config.projector_norm_target *= arm.dial
    if arm.start:
        pictures = [Image.open(path) for path in sorted((data / "images" / "train").iterdir())[:PROBE_SIZE]]
        if arm.start == "scale":
            projector.norm.weight.fill_(1)
        pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        features = torch.cat(model.model.get_image_features(pixel_values).pooler_output)  # [tokens, hidden]
        factor = measure_target(model.model.language_model) / features.norm(dim=-1).mean()
        scaled = [projector.norm.weight] if arm.start == "scale" else projector.linear_2.parameters()
        for parameter in scaled:
            parameter *= factor


def train_stage(place: Workplace, job: Job, stage: str, before: Path, folder: Path, changes: Record) -> None:
    """Run a stage with the quickstart's recipe and these changes. What a killed run left is cleared away."""
    number = int(stage[-1]) - 1
    variant = VARIANTS[job.variant]
    recipe = yaml.safe_load((ROOT / "training" / "recipes" / "digits" / f"{stage}.yaml").read_text(encoding="utf-8"))
    recipe |= {
        "model_name_or_path": str(before),
        "dataset_name": str(place.data / f"{stage}.json"),
        "output_dir": str(folder),
        "use_cpu": DEVICE_MAP is None,
        "num_train_epochs": place.study.epochs[number] * variant.epochs,
        "learning_rate": job.rates[number],
        "seed": job.seed,
        "logging_steps": 10,
        **changes,
        **dict(variant.both),
    }
    if recipe["stage"] != Stage.INSTRUCT:
        recipe.pop("vision_learning_rate", None)  # which trains the vision encoder alone
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.yaml")
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    torch.compiler.reset()  # a process compiles a function for few kinds of model, and a worker meets many
    sft.main(["--config", str(path)])


def losses(folder: Path) -> Record:
    """Of a stage: the last logged loss, the curve, the share of logged steps that were clipped, the ratio of norms;
    whether its layers were compiled, since runs may share a stage 1 that was made before they were."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "loss": steps[-1]["loss"],
        "curve": [[line["step"], round(line["loss"], 4)] for line in steps],
        "clipped": sum(line["grad_norm"] > 1 for line in steps) / len(steps),
        "ratio": [round(line["norm/ratio"], 3) for line in steps],
        "compiled": Run.read(folder).arguments.get("torch_compile", False),
    }


def evaluate(place: Workplace, job: Job, folder: Path) -> Record:
    """Exact match by kind about pictures, and for the runs that are compared in words and with the picture blanked."""
    questions = load_scene_questions(place.data, job.split)
    some = questions[: place.study.text_scenes * len(KINDS)]
    model, processor = load_model(str(folder), device_map=DEVICE_MAP)
    asked: dict[str, tuple[list[SceneQuestion], Callable[[SceneQuestion], Prompt]]] = {
        "picture": (questions, with_image)
    }
    if job.split == "test":
        asked |= {"words": (some, with_text), "blanked": (some, with_blank)}
    return {name: ask_all(model, processor, chosen, prompt, name) for name, (chosen, prompt) in asked.items()}


def ask_all(
    model: Any, processor: Any, questions: list[SceneQuestion], prompt: Callable[[SceneQuestion], Prompt], title: str
) -> dict[str, float]:
    """Exact match by kind. Kind by kind, since a batch takes as long as its longest question and answer."""
    ordered = sorted(questions, key=lambda question: question.kind)
    answers = answer(model, processor, [prompt(question) for question in ordered], title, MAX_NEW_TOKENS)
    return accuracy(ordered, answers)


def with_blank(question: SceneQuestion) -> Prompt:
    """The question about a black picture."""
    [message] = with_image(question)
    message["content"][0]["image"] = Image.new("RGB", (2 * CELL, 2 * CELL))
    return [message]


def norms_by_layer(folder: Path, probe: Path) -> Record:
    """Ratio of norms at the decoder, by layer norm and cosine of both modalities, by third of
    the layers the gap of cosines, over the probe's questions."""
    questions = load_questions(str(probe), PROBE_SIZE).questions
    model, processor = load_model(str(folder), device_map=DEVICE_MAP)
    point = measure_point(model, prepare_samples(model, processor, questions), step=0)
    layers = {name: getattr(point.layers, name) for name in ("visual", "text")}
    return {
        "ratio": point.interface.ratio.mean,
        "norm": {name: rounded(turning.norm.mean) for name, turning in layers.items()},
        "cosine": {name: rounded(turning.cosine.mean) for name, turning in layers.items()},
        "gap": rounded([group.gap.mean for group in point.layers.groups]),
    }


def look_inside(place: Workplace, folder: Path) -> Record:
    """By layer, over the same questions: attention of the position that answers on the picture; share of visual tokens
    that decode to the right one of the ten digits' words; norm of the gradient of the answer's first token."""
    questions = plain_questions(place.data)
    scenes = json.loads((place.data / "test.json").read_text(encoding="utf-8"))[: len(questions)]
    model, processor = load_model(str(folder), device_map=DEVICE_MAP)
    model.set_attn_implementation("eager")
    inputs = processor.apply_chat_template(
        [with_image(question) for question in questions], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt", processor_kwargs={"padding": True},
    ).to(model.device)  # fmt: skip
    tokenizer = processor.tokenizer
    first = torch.tensor([tokenizer(question.answer)["input_ids"][0] for question in questions], device=model.device)
    words = torch.tensor([tokenizer(f" {word}")["input_ids"][0] for word in DIGITS], device=model.device)
    output = model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
    nn.functional.cross_entropy(output.logits[:, -1], first).backward()
    visual = inputs["input_ids"] == model.config.image_token_id  # [B, S]
    cells = torch.arange(2 * CELL // 8) // 2
    cells = (2 * cells[:, None] + cells).flatten()  # of each patch, [num_patches]
    labels = torch.tensor([scene["digits"] for scene in scenes], device=model.device)[:, cells].flatten()
    norm, states = model.model.language_model.norm, output.hidden_states  # the last is normalised already
    with torch.no_grad():
        decoded = [model.lm_head(norm(state)[visual])[:, words].argmax(-1) for state in states[:-1]]
        decoded.append(model.lm_head(states[-1][visual])[:, words].argmax(-1))
    gradients = [
        nn.utils.get_total_norm([parameter.grad for parameter in layer.parameters()]).item()
        for layer in model.model.language_model.layers
    ]
    return {
        "attention": rounded(
            [(layer[:, :, -1] * visual[:, None]).sum(-1).mean().item() for layer in output.attentions]
        ),
        "decoded": rounded([(found == labels).float().mean().item() for found in decoded]),
        "gradients": gradients,
    }


def rounded(values: list[float]) -> list[float]:
    """To four digits, since there are many."""
    return [round(value, 4) for value in values]


def set_up_worker(log: Path) -> None:
    """One thread for each run, and what it says into a file: many run beside each other."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with log.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
