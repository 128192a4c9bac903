"""Files for llama.cpp: what can't run there is refused, and what runs answers as transformers does."""

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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, set_seed

from hub_cards.build import BuildOptions, build_release
from hub_cards.llama_cpp_files import require_exportable
from hub_cards.llama_cpp_proof import Answer, Question, compare_answers
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
    """A small tokenizer of ASCII text, in which no token is a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    AutoModelForCausalLM.from_config(DECODERS[decoder]).save_pretrained(tmp_path / "text")
    train_tokenizer().save_pretrained(tmp_path / "text")
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
    assert (release / "README.md").read_text().count("llama-server -m Tiny-NormLlava-f16.gguf") == 1
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
