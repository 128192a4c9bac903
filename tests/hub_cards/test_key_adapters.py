"""A model with key adapters: what its card says, what is found in it, and that all but vLLM answers with it."""

import base64
import importlib
import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from chat_servers import serving
from hub_cards.assets.handler import EndpointHandler
from hub_cards.build import ASSETS, build
from hub_cards.card import KEY_ADAPTERS
from hub_cards.check import check
from hub_cards.check_model import find_model_faults
from hub_cards.facts import collect_facts
from hub_cards.fresh_load import ask, fixed_picture
from hub_cards.weights import read_weights
from hub_server import NAME, HubServer, run, start
from modeling_normllava import NormLlavaForConditionalGeneration
from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration as Adapted
from plants import CONFIG, WEIGHTS, Plant, append, edit, put, tensors
from training.add_key_adapters import add_key_adapters, main


README, RANK, QUESTION, MAX_NEW_TOKENS = "README.md", 4, "what is it?", 256
VLLM = "vllm serve me/Tiny-NormLlava --revision v1.0 --model-impl transformers --trust-remote-code"
UP = "model.language_model.layers.{}.self_attn.k_proj.key_adapter.up"


def zero(*layers: int) -> Plant:
    return tensors(lambda weights: [weights[UP.format(layer)].zero_() for layer in layers])


@pytest.fixture(scope="module")
def adapted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose model has key adapters that were trained."""
    run = tmp_path_factory.mktemp("adapted") / "adapt"
    shutil.copytree(trained, run)
    torch.manual_seed(0)
    model = add_key_adapters(NormLlavaForConditionalGeneration.from_pretrained(trained), RANK, 32, 0.05)
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.up.data.normal_()
    model.save_pretrained(run)
    (run / "evaluation.json").unlink()  # of the model before
    put("run.json", arguments={"stage": "adapt", "key_mmd_weight": 0.1, "key_gram_weight": 0.0})(run)
    return run


@pytest.fixture(scope="module")
def release(adapted: Path, prose: Path, widget_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage folder. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("release") / "stage"
    return build(adapted, folder, NAME, prose, widget_data=widget_data, own_licence="apache-2.0")


@pytest.fixture(scope="module")
def answer(release: Path) -> str:
    """The model's own greedy answer about the fixed picture."""
    model = Adapted.from_pretrained(release).eval()
    processor = AutoProcessor.from_pretrained(release)
    inputs = ask(processor, fixed_picture(), QUESTION)
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def changed(release: Path, folder: Path, plant: Plant) -> list[str]:
    """Findings about a copy with a fault, less those on what the manifest says."""
    shutil.copytree(release, folder)
    plant(folder)
    return [str(finding) for finding in check(folder) if "does not match the manifest" not in finding.reason]


def test_the_card_says_what_the_config_and_the_weights_say(release: Path, adapted: Path) -> None:
    assert [*map(str, check(release))] == []
    card = (release / README).read_text()
    assert "The decoder's keys have adapters of rank 4, one for visual and one for text tokens (MaLoRA-style" in card
    assert "transformers runs them, vLLM refuses a model with them." in card
    model = Adapted.from_pretrained(adapted)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} weights" in card
    decoder = model.model.language_model.named_parameters()
    sizes = {name: parameter.numel() for name, parameter in decoder}
    adapters = sum(size for name, size in sizes.items() if ".key_adapter." in name)
    assert f"| key adapters in it | trained here | {adapters:,} |" in card
    language_model = sum(sizes.values()) - adapters + model.lm_head.weight.numel()
    assert f"| language model | trained from scratch | {language_model:,} |" in card
    assert "| `key_mmd_weight` | 0.1 |" in card
    assert "key_gram_weight" not in card  # which did nothing


def test_a_card_without_key_adapters_says_nothing_of_them(staged: Path) -> None:
    assert not re.search("key adapters|vllm|malora", (staged / README).read_text(), re.IGNORECASE)


def test_llavas_own_class_starts_the_key_projections_at_random(release: Path, adapted: Path) -> None:
    _, info = LlavaForConditionalGeneration.from_pretrained(adapted, output_loading_info=True)
    missing = {name for name in info["missing_keys"] if name.endswith("k_proj.weight")}
    assert len(missing) == 2
    assert "initializes the key projections of all layers at random" in (release / README).read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"```bash\n{VLLM}\n```",
        "python -m vllm.entrypoints.openai.api_server --model me/Tiny-NormLlava",
        "from vllm import LLM",
        "docker run vllm/vllm-openai --model me/Tiny-NormLlava",
    ],
)
def test_the_card_does_not_tell_to_run_it_with_vllm(text: str, release: Path, tmp_path: Path) -> None:
    (finding,) = changed(release, tmp_path / "stage", append(README, f"\n{text}\n"))
    assert finding.startswith(f"{README}: runs vLLM, which can't run key adapters: ")


def test_a_card_may_say_that_vllm_does_not_run_it(release: Path, tmp_path: Path) -> None:
    assert changed(release, tmp_path / "stage", append(README, "\nIt does not run in vLLM.\n")) == []


@pytest.mark.parametrize("plant", [edit(README, "vLLM refuses", "vLLM runs"), edit(README, "of rank 4", "of rank 8")])
def test_the_card_has_to_say_who_runs_it(plant: Plant, release: Path, tmp_path: Path) -> None:
    findings = changed(release, tmp_path / "stage", plant)
    assert any(f"{README}: does not say '{KEY_ADAPTERS.format(rank=RANK)}'" in finding for finding in findings)


WRONG: dict[str, tuple[Plant, str]] = {
    "adapters that were not trained": (
        zero(0, 1), f"holds untrained key adapters: {UP.format(0)} (and 1 more) is 0 everywhere after 8 steps"
    ),
    "a layer that was not trained": (zero(1), f"holds untrained key adapters: {UP.format(1)}"),
    "another rank": (put(CONFIG, key_adapter_rank=8), "key_adapter.down of [2, 4, 32], not [2, 8, 32]"),
    "adapters lost": (
        tensors(lambda w: [w.pop(name) for name in [*w] if ".key_adapter." in name]), "key_adapter.down (and 7 more)"
    ),
    "an adapter in another dtype": (
        tensors(lambda w: w.update({UP.format(0): w[UP.format(0)].bfloat16()})), f"{UP.format(0)} as BF16, not F32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_in_the_adapters_is_found(fault: str, adapted: Path, tmp_path: Path) -> None:
    plant, reason = WRONG[fault]
    shutil.copytree(adapted, tmp_path / "run")
    plant(tmp_path / "run")
    findings = [*find_model_faults(tmp_path / "run", read_weights(tmp_path / "run"), steps=8)]
    assert any(finding.file == WEIGHTS and reason in finding.reason for finding in findings), findings


def test_adapters_that_were_not_trained_are_those_of_a_model_that_claims_no_training(
    adapted: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapted, tmp_path / "run")
    zero(0, 1)(tmp_path / "run")
    assert [*find_model_faults(tmp_path / "run", read_weights(tmp_path / "run"), steps=0)] == []


def test_a_cast_takes_the_adapters_along(adapted: Path, prose: Path, tmp_path: Path) -> None:
    stage = build(adapted, tmp_path / "stage", NAME, prose, own_licence="apache-2.0", dtype="bfloat16")
    assert [*map(str, check(stage))] == []
    dtypes = {tensor.dtype for tensor in read_weights(stage).tensors if ".key_adapter." in tensor.name}
    assert dtypes == {"BF16"}


def compose_keys(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    arguments = ["--model", model, "--rank", RANK, "--output_dir", folder]
    monkeypatch.setattr(sys, "argv", ["add_key_adapters", *map(str, arguments)])
    main()
    return folder


def test_training_before_the_adapters_were_added_is_recorded(
    trained: Path, adapted: Path, composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted, run)

    def start_from(folder: Path) -> Any:
        put("run.json", arguments={"stage": "adapt", "model_name_or_path": str(folder)})(run)
        return collect_facts(run, None)

    facts = start_from(compose_keys(trained, tmp_path / "keys", monkeypatch))
    assert [stage.stage for stage in facts.stages] == ["instruct", "adapt"]
    assert facts.steps == 16
    # Without a record, as of a model from the Hub, nobody knows.
    facts = start_from(compose_keys(composed(), tmp_path / "bare", monkeypatch))
    assert not facts.earlier_is_recorded
    assert start_from(composed()).earlier_is_recorded


def test_the_space_answers_as_the_model_does(
    release: Path, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_picture().save(tmp_path / "upload.png")
    monkeypatch.setenv("MODEL", str(release))
    monkeypatch.setenv("REVISION", "main")
    monkeypatch.delenv("BASELINE", raising=False)
    monkeypatch.syspath_prepend(ASSETS / "space")
    sys.modules.pop("app", None)
    space = importlib.import_module("app")
    given, figures = space.answer({"path": str(tmp_path / "upload.png")}, QUESTION)
    assert given == answer
    assert "visual, without norm" in figures


@pytest.mark.slow
def test_it_is_pushed_and_verified(
    release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = start(hub, "push", str(release), "--public", token=hub.token)
    output = "".join(pushed.communicate())
    assert pushed.returncode == 0, output
    run(monkeypatch, "verify", NAME, "--revision", "v1.0", "--stage", str(release))
    assert f"Verified: {NAME} at v1.0 matches the stage folder." in caplog.text


def picture_url() -> str:
    encoded = io.BytesIO()
    fixed_picture().save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def conversation(picture: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]


def test_the_handler_answers_as_the_model_does(release: Path, answer: str) -> None:
    messages = conversation({"type": "image", "image": picture_url()})
    assert EndpointHandler(str(release))({"inputs": messages}) == {"generated_text": answer}


@pytest.mark.slow
def test_the_server_answers_as_the_model_does(release: Path, answer: str, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")  # the extra "serve"
    messages = conversation({"type": "image_url", "image_url": {"url": picture_url()}})
    with serving(release, tmp_path / "log") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        options = {"max_tokens": MAX_NEW_TOKENS, "temperature": 0}
        given = client.chat.completions.create(model=str(release), messages=messages, **options)
    assert given.choices[0].message.content.strip() == answer
