"""A stage folder without findings, and every fault that is planted in it, found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, PngImagePlugin

from conversations.files import sha256
from hub_cards.check import check
from hub_cards.leaks import find_machines, find_secrets, plain_text
from hub_cards.manifest import MANIFEST, staged_files
from plants import CONFIG, WEIGHTS, Plant, append, delete, edit, put, tensors, write


README = "README.md"
MODELING = "modeling_normllava.py"
PICTURE = "images/example1.png"
TOKEN = "hf_" + "a" * 34
LLAMA_3, QWEN, SIGLIP = "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B", "google/siglip-so400m-patch14-384"


def made_from(text: str, licence: str, name: str = "me/Llama-Tiny") -> Plant:
    """Another language model in card and manifest."""
    card = edit(README, "license: apache-2.0", f"base_model:\n- {text}\n- {SIGLIP}\nlicense: {licence}")
    manifest = put(MANIFEST, text_model=text, vision_model=SIGLIP, repo_id=name)
    return lambda folder: (card(folder), manifest(folder))


LLAMA = made_from(LLAMA_3, "llama3.2")


def link(folder: Path) -> None:
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def save_with(**settings: Any) -> Plant:
    return lambda folder: Image.new("RGB", (8, 8)).save(folder / PICTURE, **settings)


def png_text() -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("Software", "made on my laptop")
    return text


def exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x013B] = "me"
    return tags


# What is planted, the file that the finding names, and what its reason says.
FAULTS: dict[str, tuple[Plant, str, str]] = {
    "no card": (delete(README), README, "no readable YAML"),
    "broken YAML": (edit(README, "pipeline_tag: ", "pipeline_tag: [ "), README, "no readable YAML"),
    "unknown base model": (made_from("a/b", "apache-2.0"), MANIFEST, "base model a/b is not known"),
    "another licence": (made_from(QWEN, "mit"), README, "metadata license is mit"),
    "no licence in metadata": (edit(README, "license: apache-2.0\n", ""), MANIFEST, "No Hub id of the text_model and"),
    "Llama under Apache's licence": (made_from(LLAMA_3, "apache-2.0"), README, "metadata license is apache-2.0"),
    "Llama without its agreement": (LLAMA, "LICENSE", "is Apache's"),
    "Llama without its notice": (LLAMA, "NOTICE", "the Llama 3.2 Community License requires it"),
    "Llama without attribution": (LLAMA, README, "does not say 'Built with Llama'"),
    "Llama under another name": (made_from(LLAMA_3, "llama3.2", "me/Tiny"), MANIFEST, "name that begins with 'Llama'"),
    "Llama without Apache's licence": (LLAMA, "LICENSE-APACHE", "the Llama 3.2 Community License requires it"),
    "another base model than built from": (
        put(MANIFEST, text_model=QWEN), README, f"metadata base_model is [], the manifest's ['{QWEN}']"
    ),
    "no licence file": (delete("LICENSE"), "LICENSE", "is missing or empty"),
    "placeholder": (append(README, "\n[More Information Needed]\n"), README, "holds a placeholder"),
    "unrendered template": (append(README, "\n{{ prose.limits }}\n"), README, "holds a placeholder, '{{'"),
    "picture not there": (append(README, "\n![x](diagnostics/none.png)\n"), README, "shows diagnostics/none.png"),
    "token": (append(README, f"\n{TOKEN}\n"), README, "holds a secret: Hugging Face Token"),
    "token in the vocabulary": (put("tokenizer.json", note=TOKEN), "tokenizer.json", "holds a secret: Hugging Face"),
    "token in the manifest": (put(MANIFEST, note=TOKEN), MANIFEST, "holds a secret: Hugging Face Token"),
    "token in the weights' metadata": (tensors(lambda w: w, {"by": TOKEN}), WEIGHTS, "holds a secret: Hugging Face"),
    "path in the weights' metadata": (tensors(lambda w: w, {"by": "/home/me/run"}), WEIGHTS, "/home/me/run"),
    "path in a config": (put(CONFIG, note="/home/me/run"), CONFIG, "path of a machine, /home/me/run"),
    "share in a config": (put(CONFIG, note="\\\\nas\\runs"), CONFIG, "path of a machine, \\\\nas\\runs"),
    "text in a picture": (save_with(pnginfo=png_text()), PICTURE, "holds metadata: Software"),
    "EXIF in a picture": (save_with(exif=exif()), PICTURE, "holds metadata: exif"),
    "colour profile in a picture": (save_with(icc_profile=b"0" * 200), PICTURE, "holds metadata: icc_profile"),
    "picture that is none": (write(PICTURE, b"\x80\x02."), ".", "cannot identify image file"),
    "pickle": (write("training_args.bin", b"x"), "training_args.bin", "is not on the list"),
    "symlink": (link, "images/example9.png", "is a symlink"),
    "optimizer state": (write("optimizer.safetensors", b"x"), "optimizer.safetensors", "is not on the list"),
    "cache": (write("__pycache__/a.pyc", b"x"), "__pycache__/a.pyc", "is not on the list"),
    "custom generate": (write("custom_generate/generate.py", "x"), "custom_generate/generate.py", "not on the list"),
    "no weights": (delete(WEIGHTS), ".", "model.safetensors is missing"),
    "torn weights": (write(WEIGHTS, b"\x10\0\0\0"), ".", "model.safetensors can't be read"),
    "weights of another shape": (tensors(lambda w: w.update(extra=torch.zeros(1))), WEIGHTS, "holds extra"),
    "broken code": (append(MODELING, "\ndef (:\n"), MODELING, "differs from this version"),
    "another handler": (append("handler.py", "\n"), "handler.py", "differs from this version"),
    "no handler": (delete("handler.py"), "handler.py", "differs from this version"),
    "other requirements": (append("requirements.txt", "evil\n"), "requirements.txt", "differs from this version"),
    "broken snippet": (edit(README, "generated = model", "generated == = model"), README, "0 is not valid Python"),
    "snippet without revision": (
        edit(README, "repository, revision=revision, ", "repository, "), README, "does not load `repo"
    ),
    "snippet with another revision in one call": (
        edit(README, "AutoProcessor.from_pretrained(repository, revision=revision", 'load("x", revision="main"'),
        README, "snippet 0: load does not load `repository` at `revision`",
    ),
    "snippet with two revisions": (
        edit(README, "\nprocessor = ", '\nrevision = "main"\nprocessor = '), README, "snippet 0 must contain"
    ),
    "pipeline without revision": (
        append(README, '\n```python\nask = pipeline(model="me/Tiny-NormLlava")  # v1.0\n```\n'),
        README, "snippet 1: pipeline does not load",
    ),
    "snippet of another revision": (edit(README, '"v1.0"', '"main"'), README, "snippet 0 must contain `repository,"),
    "snippet of another repository": (
        edit(README, '= "me/Tiny-NormLlava"', '= "you/Tiny-NormLlava"'), README, "snippet 0 must contain"
    ),
    "snippet with a revision set in a loop": (
        edit(README, "\nprocessor = ", '\nfor revision in ["main"]:\n    pass\nprocessor = '),
        README, "snippet 0 must contain",
    ),
    "snippet with another revision of the code": (
        edit(README, "(repository, revision", '(repository, code_revision="a", revision'),
        README, "snippet 0: AutoProcessor.from_pretrained does not load",
    ),
    "snippet with torch.hub": (
        append(README, '\n```python\ntorch.hub.load("you/repo", "model")\n```\n'),
        README, "snippet 1: torch.hub.load does not load",
    ),
    **{
        f"snippet after {fence!r}": (
            append(README, f'\n{fence}\nm = AutoModel.from_pretrained("you/repo", trust_remote_code=True)\n```\n'),
            README, "loads code outside of checked snippets: m = AutoModel.from_pretrained",
        )
        for fence in ("```py", "```Python", "``` python", "~~~python", "````python", "- ```python", "")
    },
    "command without revision": (
        append(README, "\n```bash\nvllm serve me/Tiny-NormLlava --trust-remote-code\n```\n"),
        README, "loads code outside of checked snippets: vllm serve",
    ),
    "token under a key that is there twice": (
        edit("evaluation.json", '"task"', f'"task": "{TOKEN}", "task"'),
        "evaluation.json", "holds a secret: Hugging Face Token",
    ),
    "no snippet": (edit(README, "```python", "```"), README, "shows no snippet"),
    "dirty tree": (put(MANIFEST, commit_is_clean=False), MANIFEST, "uncommitted"),
    "file changed": (append("LICENSE", "\n"), "LICENSE", "it was changed"),
    "weights changed": (tensors(lambda w: w["lm_head.weight"].add_(1)), WEIGHTS, "it was changed"),
    "file added": (write("images/example7.png", b"x"), "images/example7.png", "is not in the manifest"),
    "file taken away": (delete("images/example2.png"), "images/example2.png", "is in the manifest but not in the"),
    "broken manifest": (write(MANIFEST, "{"), MANIFEST, "is missing, or can't be read"),
    "manifest without a repository": (put(MANIFEST, repo_id=""), MANIFEST, "has no repo_id"),
    "manifest without a revision": (put(MANIFEST, revision=None), MANIFEST, "is not a valid tag"),
    "manifest of a branch": (put(MANIFEST, revision="main"), MANIFEST, "is a branch or commit name"),
}  # fmt: skip
# Those that the manifest's hashes find; of all others it is renewed, so that the change itself is no finding.
BY_MANIFEST = {"file changed", "weights changed", "file added", "file taken away", "broken manifest"}


def renew_manifest(folder: Path) -> None:
    """Put the planted fault into the manifest, so that the change itself is no finding."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "size": path.stat().st_size}
        for path in staged_files(folder)
        if not path.is_symlink()
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_what_was_built_has_no_findings(staged: Path) -> None:
    assert [str(finding) for finding in check(staged)] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, staged: Path, tmp_path: Path) -> None:
    plant, file, reason = FAULTS[fault]
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    plant(folder)
    if fault not in BY_MANIFEST:
        renew_manifest(folder)
    findings = check(folder)
    assert any(finding.file == file and reason in finding.reason and finding.fix for finding in findings), findings


def test_what_prose_may_show_is_no_finding(staged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    command = "vllm serve me/Tiny-NormLlava --revision v1.0 --model-impl transformers --trust-remote-code"
    append(README, f"\nOne `from_pretrained()` is enough, todo el mundo.\n\n```bash\n{command}\n```\n")(folder)
    renew_manifest(folder)
    assert [*map(str, check(folder))] == []


def test_all_findings_come_at_once(staged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    for fault in ("placeholder", "token", "symlink", "broken code", "optimizer state"):
        FAULTS[fault][0](folder)
    reasons = " ".join(str(finding) for finding in check(folder))
    for fault in ("placeholder", "token", "symlink", "broken code", "optimizer state"):
        assert FAULTS[fault][2] in reasons
    assert check(tmp_path / "none")[0].reason == "no such folder"


def random_text(length: int, alphabet: str = "aB3dE5gH7jK9mN1pQ") -> str:
    """The same at each run, and of no pattern."""
    return "".join(alphabet[(7 * place * place + 3 * place) % len(alphabet)] for place in range(length))


SECRETS = {
    "Hugging Face": TOKEN,
    "GitHub": f"ghp_{random_text(36)}",
    "GitHub, fine-grained": f"github_pat_{random_text(60)}",
    "GitLab": f"glpat-{random_text(20)}",
    "OpenAI": f"sk-{random_text(20)}T3BlbkFJ{random_text(20)}",
    "Anthropic": f"sk-ant-api03-{random_text(93)}AA",
    "AWS, key": "AKIA" + random_text(16, "ABCD3EFG5HJ7K"),
    "AWS, secret": f"AWS_SECRET_ACCESS_KEY={random_text(40)}",
    "AWS, secret in quotes": f'aws_secret_access_key = "{random_text(40)}"',
    "Google": f"AIzaSy{random_text(33)}",
    "Slack": f"xoxb-123456789012-123456789012-{random_text(24)}",
    "Slack, hook": f"https://hooks.slack.com/services/T12345678/B12345678/{random_text(24)}",
    "URL": "postgres://admin:correcthorse@db.example.org/x",
    "URL of git": "https://me:correcthorse@example.org/x.git",
    "Weights & Biases": "wandb_api_key: " + random_text(40, "0a1b2c3d4e5f6"),
    "Azure": f"AccountKey={random_text(86)}==",
    "PyPI": f"pypi-AgEIcHlwaS5vcmcC{random_text(120)}",
    "npm": f"npm_{random_text(36)}",
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c",
    "password": 'password = "correct-horse-1"',
}


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_as_text_and_in_json(kind: str) -> None:
    for text in (f"before\n{SECRETS[kind]}\nafter", json.dumps({"a": [{"note": SECRETS[kind]}]})):
        kinds = [*find_secrets(plain_text(text))]
        assert kinds
        assert SECRETS[kind] not in " ".join(kinds)


def test_a_key_of_json_says_what_its_value_is() -> None:
    for field, value in (("password", "correct-horse-1"), ("aws_secret_access_key", random_text(40))):
        assert [*find_secrets(plain_text(json.dumps({"a": {field: value}})))]


@pytest.mark.parametrize(
    "name",
    [
        "/home/me/run", "/fsx/me/run", "/root/x", "/Users/me/x", "file:///home/me", "host:/data/rows", "~/runs/x",
        "C:\\Users\\me", "D:/data/rows", "\\\\nas\\runs", "s3://bucket/run", "gs://bucket/run",
        "hdfs://node/run", "10.1.2.3",
        "http://192.168.0.7:8000/v1", "172.20.0.3", "100.64.0.1", "127.0.0.1", "train7.cluster.local",
        "db.corp.internal:5432",
        "http://gpu07:8000/v1", "http://localhost", "nfs://filer/rows", "fd12:3456::1", "fe80::1",
    ],
)  # fmt: skip
def test_names_of_machines_are_found_as_text_and_in_json(name: str) -> None:
    for text in (f"from {name} on", name, json.dumps({"a": [{"note": name}]})):
        assert [*find_machines(plain_text(text))], text


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/me/Model/blob/v1.0/README.md", "torch 2.13.0.1", "version 0.1.2.3", "8.8.8.8",
        "about ~3/4 of the rows", "`/v1/chat/completions`", "see https://example.org.",
        "and/or",
        "google/siglip-so400m-patch14-384", "4/5", "a ratio of 3:4", "tokens: 5/6/7 of 8", "the norm's gain: 0.0134",
        "locally", "an internal report", "<|image_pad|>", "T = 0.11", "0" * 40, "hf_hub_download", "eos_token: </s>",
        '{"pad_token": "<|endoftext|>", "unk_token": "<unk>"}', '{"auto_map": {"AutoModel": "a.B"}}',
    ],
)  # fmt: skip
def test_what_is_harmless_is_passed(text: str) -> None:
    says = plain_text(text)
    assert [*find_secrets(says), *find_machines(says)] == []
