"""Files for llama.cpp: what can't run there is refused, and what runs answers as transformers does."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3Config,
    set_seed,
)

from hub_cards import llama_cpp
from hub_cards.build import BuildOptions, build_release
from hub_cards.llama_cpp import find_problem
from hub_cards.llama_cpp_files import DTYPES, cuts_like_qwen2, require_exportable
from hub_cards.llama_cpp_proof import Answer, Comparison, Question, compare_answers
from hub_cards.model_folder import ModelFolder
from hub_cards.push import push_release
from hub_server import REPO_ID, HubServer, place_files, read_published
from normllava.errors import UserError
from training.compose import compose


ROOT = Path(__file__).parents[2]
QUESTION = Question("a picture", Image.new("RGB", (8, 8)), "What?")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"projector_norm": "gwc"}, "it has a LayerNorm after the projector"),
        ({"spatial_merge_size": 2}, "it merges patches"),
        ({"max_tiles": 4}, "it cuts pictures into tiles"),
        ({"key_adapter_rank": 4}, "it merges patches or has key adapters"),
        ({"vision": "clip"}, "its encoder has a class token"),
        ({"vision": "dinov2"}, "its encoder has a class token"),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_wrongly_is_refused(
    options: dict[str, Any], reason: str, make_model_folder: Callable[..., Path]
) -> None:
    folder = make_model_folder(**{"projector_norm": "none", **options})
    with pytest.raises(UserError, match=rf"can't run in llama.cpp: {reason}.*A model of a SigLIP"):
        require_exportable(ModelFolder(folder))


def test_a_plain_model_of_a_siglip_is_not_refused(make_model_folder: Callable[..., Path]) -> None:
    require_exportable(ModelFolder(make_model_folder(projector_norm="none")))


HERE = Answer(num_prompt_tokens=9, token_ids=[5, 6], log_probabilities=[-1.0, -2.0], margins=[0.5, 0.01, 0.5])


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (Answer(9, [5, 6], [-1.001, -2.0], []), None),
        (Answer(9, [5, 7], [-1.0, -2.0], []), None),  # nearly a tie here
        (Answer(8, [5, 6], [-1.0, -2.0], []), "the prompt has 9 tokens, and 8 in llama.cpp"),
        (Answer(9, [4, 6], [-1.0, -2.0], []), "token 1 is 4 and not 5"),
        (Answer(9, [5, 6, 7], [-1.0, -2.0, -3.0], []), "token 3 is 7 and not None"),
        (Answer(9, [5, 6], [-1.0, -2.03], []), "log-probabilities are up to 0.030 apart"),
    ],
)
def test_answers_are_compared_token_by_token(there: Answer, problem: str | None) -> None:
    comparison = compare_answers(QUESTION, HERE, there)
    assert comparison.problem == problem
    if problem is None:
        assert math.isclose(comparison.largest_difference, 0.001 if there.token_ids == [5, 6] else 0, abs_tol=1e-9)


def make_comparisons(num_same: int, there: Answer) -> list[Comparison]:
    """Eight comparisons: in the first, llama.cpp gives transformers' answer, and in the others `there`."""
    answers = num_same * [HERE] + (8 - num_same) * [there]
    return [compare_answers(QUESTION, HERE, answer) for answer in answers]


OTHER_TOKEN = Answer(9, [4, 6], [-1.0, -2.0], [])
OTHER_PROMPT = Answer(8, [5, 6], [-1.0, -2.0], [])
FEWER_DIGITS = Answer(9, [5, 6], [-1.0, -2.03], [])


@pytest.mark.parametrize(
    ("num_same", "there", "refused_dtypes"),
    [
        (8, OTHER_TOKEN, set()),
        (7, OTHER_TOKEN, {"f32"}),
        (4, OTHER_TOKEN, {"f32"}),
        (3, OTHER_TOKEN, {"f32", "f16"}),
        (7, OTHER_PROMPT, {"f32", "f16"}),
        (0, FEWER_DIGITS, {"f32"}),
    ],
)
def test_float16_may_change_the_tokens_of_half_of_the_pictures(
    num_same: int, there: Answer, refused_dtypes: set[str]
) -> None:
    comparisons = make_comparisons(num_same, there)
    assert {dtype for dtype in DTYPES if find_problem(dtype, comparisons) is not None} == refused_dtypes


@pytest.fixture
def export_made_up(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], None]:
    """Exports to `tmp_path` with empty files, so that this many of eight pictures get the same tokens in float16."""

    def write(folder: Path, path: Path, dtype: str) -> None:
        path.touch()

    def export(num_same: int) -> None:
        def compare(folder: Path, language_model: Path, *_: object) -> list[Comparison]:
            return make_comparisons(8 if "f32" in language_model.name else num_same, OTHER_TOKEN)

        monkeypatch.setattr(llama_cpp, "compare", compare)
        llama_cpp.export(make_model_folder(projector_norm="none"), tmp_path)

    monkeypatch.setattr(llama_cpp, "require_packages", lambda: None)
    monkeypatch.setattr(llama_cpp, "write_language_model", write)
    monkeypatch.setattr(llama_cpp, "write_vision", write)
    return export


def test_the_card_says_how_many_pictures_get_the_same_tokens_in_float16(
    export_made_up: Callable[[int], None], tmp_path: Path
) -> None:
    export_made_up(7)
    assert len(list(tmp_path.glob("*.gguf"))) == 4
    text = " ".join((tmp_path / "README.md").read_text().split())
    assert "In float16, 7 of 8 pictures get the same tokens;" in text


def test_wrong_files_of_float16_are_deleted(export_made_up: Callable[[int], None], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"f16\.gguf: llama.cpp doesn't answer as transformers does, about 8"):
        export_made_up(0)
    assert list(tmp_path.glob("*f16.gguf")) == []
    assert not (tmp_path / "README.md").exists()


def test_files_that_llama_cpp_can_not_load_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: object) -> list[Comparison]:
        raise UserError("llama.cpp can't load it")

    monkeypatch.setattr(llama_cpp, "compare", compare)
    for name in ("Mine-f16.gguf", "mmproj-Mine-f16.gguf"):
        (tmp_path / name).touch()
    assert llama_cpp.find_problems(tmp_path) == ["Mine-f16.gguf: llama.cpp can't load it"]


@pytest.mark.parametrize("offsets", [True, False])
def test_only_a_tokenizer_that_cuts_text_as_qwen2s_does_is_taken_for_one(tmp_path: Path, offsets: bool) -> None:
    """A tokenizer of GPT-2's kind keeps the digits of a number together."""
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert cuts_like_qwen2(tmp_path)

    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = offsets
    path.write_text(json.dumps(content))
    assert cuts_like_qwen2(tmp_path)

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save_pretrained(tmp_path)
    assert not cuts_like_qwen2(tmp_path)


# Language models with a tokenizer that merges bytes, as llama.cpp wants it.
DECODERS = {
    "qwen3": Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False,
    ),
    "llama": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    ),
}  # fmt: skip


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A small tokenizer of ASCII text of Qwen2's kind, in which no token is a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<|im_start|>", "<|im_end|>", "<|image_pad|>"])
    tokenizer.train_from_iterator([text.encode("ascii", "ignore").decode()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


@pytest.fixture(scope="module")
def gguf_python() -> Path:
    """The Python of an environment with llama.cpp and its converter, which is installed first if it is missing."""
    make = ["make", ".venv-gguf/installed", f"PYTHON={sys.executable}"]
    completed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return ROOT / ".venv-gguf/bin/python"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("decoder", DECODERS)
def test_llama_cpp_answers_as_transformers_does(
    decoder: str,
    backbones: Callable[[str], Path],
    prose: Path,
    widget_data: Path,
    hub: HubServer,
    api: HfApi,
    gguf_python: Path,
    tmp_path: Path,
) -> None:
    """A release gets the files, is pushed with them, and `verify` asks again from what it downloaded."""
    set_seed(0)
    language_model = AutoModelForCausalLM.from_config(DECODERS[decoder])
    tokenizer = train_tokenizer()
    # Our models never say the image token, and llama.cpp doesn't know that. With this row it is never the likeliest.
    language_model.lm_head.weight.data[tokenizer.convert_tokens_to_ids("<|image_pad|>")] = 0
    language_model.save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    model, processor = compose(
        str(backbones("siglip")), str(tmp_path / "text"), projector_norm="none", scale_projector=True
    )
    model.save_pretrained(tmp_path / "mine")
    processor.save_pretrained(tmp_path / "mine")
    release = tmp_path / "release"
    options = BuildOptions(repo_id=REPO_ID, prose=prose, widget_data=widget_data, license="apache-2.0")
    build_release(tmp_path / "mine", release, options)

    def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [gguf_python, "-m", "hub_cards", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    completed = run_command("gguf", release)
    assert completed.returncode == 0, completed.stderr[-3000:]
    files = sorted(path.name for path in release.glob("*.gguf"))
    assert files == sorted(
        f"{part}Tiny-NormLlava-{dtype}.gguf" for part in ("", "mmproj-") for dtype in ("f32", "f16")
    )
    card = (release / "README.md").read_text()
    assert card.count("llama-server -m Tiny-NormLlava-f16.gguf") == 1
    assert "In float16, 10 of 10 pictures get the same" in card
    rows = [line.split() for line in completed.stderr.splitlines() if line.startswith(("noise", "example"))]
    num_examples = len(list(release.glob("images/*.png")))
    assert num_examples > 0
    assert len(rows) == 2 * (8 + num_examples)  # in float32 and float16
    # Of random weights, some tokens are nearly ties, behind which the answers go on differently.
    in_float32 = rows[: len(rows) // 2]
    assert sum(int(row[-2]) for row in in_float32) > 0.5 * sum(int(row[-3]) for row in in_float32)
    assert all(float(row[-1]) < 0.02 for row in in_float32)

    push_release(release, api, public=True)
    verified = run_command("verify", REPO_ID, "--revision", "v1.0")
    assert verified.returncode == 0, verified.stderr[-3000:]

    # Most tensors of the encoder and the projector are lost.
    published = read_published(hub)
    vision = "mmproj-Tiny-NormLlava-f32.gguf"
    num_lost = len(published[vision]) * 3 // 4
    published[vision] = published[vision][:-num_lost] + bytes(num_lost)
    place_files(hub, published)
    refused = run_command("verify", REPO_ID, "--revision", "v1.0")
    assert refused.returncode == 1
    assert "Tiny-NormLlava-f32.gguf: llama.cpp doesn't answer as transformers does" in refused.stderr
