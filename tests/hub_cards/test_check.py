"""A stage folder without findings, and every fault that is planted in it, found."""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hub_cards.build import MANIFEST, sha256, staged_files
from hub_cards.check import check


Plant = Callable[[Path], None]


def edit(name: str, old: str, new: str) -> Plant:
    """Replace text in a file, which must be there."""

    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return plant


def write(name: str, content: str | bytes) -> Plant:
    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return plant


def append(name: str, text: str) -> Plant:
    return lambda folder: write(name, (folder / name).read_text() + text)(folder)


def delete(name: str) -> Plant:
    return lambda folder: (folder / name).unlink()


def shard(folder: Path, stale: bool = False, twice: bool = False, lost: bool = False) -> None:
    """Split the weights in two, with an index; and break them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    if twice:
        parts[1] = [*parts[1], names[0]]
    if lost:
        parts[1] = parts[1][1:]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name].clone() for name in part}, folder / file)
    if stale:
        save_file({"left": torch.zeros(1)}, folder / "model-00003-of-00003.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def link(folder: Path) -> None:
    (folder / "images" / "example9.png").symlink_to("/etc/passwd")


def torch_archive(folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    write("images/example3.png", buffer.getvalue())(folder)


def in_manifest(field: str, value: str | None) -> Plant:
    def plant(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        assert field in manifest
        (folder / MANIFEST).write_text(json.dumps(manifest | {field: value}))

    return plant


def local_path(path: str) -> Plant:
    return edit(CONFIG, '"normllava"', f'"normllava", "from": {json.dumps(path)}')


README = "README.md"
CONFIG = "config.json"
MODELING = "modeling_normllava.py"
# What is planted, the file that the finding names, and what its reason says.
FAULTS: dict[str, tuple[Plant, str, str]] = {
    "no card": (delete(README), README, "is missing"),
    "broken YAML": (edit(README, "pipeline_tag: ", "pipeline_tag: [ "), README, "no readable YAML"),
    "no licence in metadata": (edit(README, "license: apache-2.0\n", ""), README, "metadata has no license"),
    "wrong pipeline": (edit(README, "pipeline_tag: image-text-to-text", "pipeline_tag: chat"), README, "is 'chat'"),
    "wrong library": (
        edit(README, "library_name: transformers", "library_name: ours"),
        README,
        "library_name is 'ours'",
    ),
    "no tag": (edit(README, "- custom_code\n", ""), README, "no tag custom_code"),
    "bad base model": (edit(README, "license: ", "base_model: my base\nlicense: "), README, "is no Hub id"),
    "unknown base model": (
        edit(README, "license: ", "base_model: a/b\nlicense: "),
        README,
        "base model a/b is not known",
    ),
    "another licence": (
        edit(README, "license: apache-2.0", "base_model: Qwen/Qwen2.5-7B\nlicense: mit"),
        README,
        "metadata license is mit",
    ),
    "Llama without its notice": (
        edit(README, "license: apache-2.0", "base_model: meta-llama/Llama-3.2-3B\nlicense: llama3.2"),
        "NOTICE",
        "the Llama 3.2 Community License asks for it",
    ),
    "Llama without attribution": (
        edit(README, "license: apache-2.0", "base_model: meta-llama/Llama-3.2-3B\nlicense: llama3.2"),
        README,
        "does not say 'Built with Llama'",
    ),
    "Llama under another name": (
        edit(README, "license: apache-2.0", "base_model: meta-llama/Llama-3.2-3B\nlicense: llama3.2"),
        MANIFEST,
        "does not begin with Llama",
    ),
    "Llama without Apache's licence": (
        edit(README, "license: apache-2.0", "base_model: meta-llama/Llama-3.2-3B\nlicense: llama3.2"),
        "LICENSE-APACHE",
        "the Llama 3.2 Community License asks for it",
    ),
    "another base model than built from": (
        in_manifest("text_model", "Qwen/Qwen2.5-7B"),
        README,
        "metadata base_model names none, the manifest Qwen/Qwen2.5-7B",
    ),
    "no licence file": (delete("LICENSE"), "LICENSE", "is missing or empty"),
    "missing section": (edit(README, "## Evaluation", "## Scores"), README, "no section 'Evaluation'"),
    "empty section": (append(README, "\n## Uses\n\n"), README, "section 'Uses' is empty"),
    "placeholder": (append(README, "\n[More Information Needed]\n"), README, "holds a placeholder"),
    "unrendered template": (append(README, "\n{{ prose.limits }}\n"), README, "holds a placeholder, '{{'"),
    "picture not there": (append(README, "\n![x](diagnostics/none.png)\n"), README, "shows diagnostics/none.png"),
    "widget picture not there": (delete("images/example1.png"), README, "widget 0 shows images/example1.png"),
    "widget without output": (edit(README, "output:\n", "outcome:\n"), README, "has no output"),
    "token": (append(README, "\nhf_" + "a" * 34 + "\n"), README, "a Hugging Face token"),
    "token in the vocabulary": (
        edit("tokenizer.json", '"version"', f'"note": "hf_{"a" * 34}", "version"'),
        "tokenizer.json",
        "a Hugging Face token",
    ),
    "private key": (append("handler.py", "\n# -----BEGIN RSA PRIVATE KEY-----\n"), "handler.py", "a private key"),
    "path of a machine": (local_path("/home/me/run"), CONFIG, "path of a machine, /home/me"),
    "path of a cluster": (local_path("/fsx/me/run"), CONFIG, "path of a machine, /fsx/me/run"),
    "path of a notebook": (append(README, "\n<p>/content/drive</p>\n"), README, "path of a machine, /content/drive"),
    "file URL": (local_path("file:///home/me"), CONFIG, "path of a machine, file:///home"),
    "path on a host": (local_path("host:/data/rows"), CONFIG, "path of a machine, /data/rows"),
    "path of a home": (local_path("~/runs/x"), CONFIG, "path of a machine, ~/runs"),
    "path of a drive": (local_path("C:\\Users\\me"), CONFIG, "path of a machine, C:\\\\Users"),
    "pickle by name": (write("training_args.bin", b"x"), "training_args.bin", "name of a pickle"),
    "pickle by content": (write("images/example3.png", pickle.dumps({"a": 1})), "images/example3.png", "is a pickle"),
    "old pickle by content": (
        write("images/example3.png", pickle.dumps({"a": 1}, protocol=0)),
        "images/example3.png",
        "is a pickle",
    ),
    "archive of torch": (torch_archive, "images/example3.png", "is a pickle"),
    "symlink": (link, "images/example9.png", "is a symlink"),
    "optimizer state": (write("optimizer.safetensors", b"x"), "optimizer.safetensors", "is not on the list"),
    "cache": (write("__pycache__/a.pyc", b"x"), "__pycache__/a.pyc", "is not on the list"),
    "custom generate": (write("custom_generate/generate.py", "x = 1"), "custom_generate", "generate() would run code"),
    "no weights": (delete("model.safetensors"), "model.safetensors", "there are no weights"),
    "torn weights": (write("model.safetensors", b"\x10\0\0\0"), "model.safetensors", "can't be read"),
    "stale shard": (lambda f: shard(f, stale=True), "model-00003-of-00003.safetensors", "a stale shard"),
    "tensor twice": (lambda f: shard(f, twice=True), "model-00002-of-00002.safetensors", "holds lm_head.weight, as"),
    "tensor lost": (lambda f: shard(f, lost=True), "model-00002-of-00002.safetensors", "which the index puts there"),
    "shard missing": (
        lambda f: (shard(f), delete("model-00001-of-00002.safetensors")(f))[0],
        "model-00001-of-00002.safetensors",
        "is in the index and not in the folder",
    ),
    "class that is not there": (
        edit(CONFIG, "modeling_normllava.NormLlavaModel", "modeling_normllava.Other"),
        CONFIG,
        "has no class Other",
    ),
    "module that is not there": (
        edit(CONFIG, "modeling_normllava.", "modeling_other."),
        CONFIG,
        "names modeling_other.py",
    ),
    "code of another repository": (
        edit(CONFIG, "modeling_normllava.NormLlavaModel", "you/repo--modeling_normllava.NormLlavaModel"),
        CONFIG,
        "points to another repository",
    ),
    "relative import": (append(MODELING, "\nfrom .norms import token_norms\n"), MODELING, "imports .norms"),
    "our import": (
        append(MODELING, "\nfrom diagnostics.norms import token_norms\n"),
        MODELING,
        "imports diagnostics.norms",
    ),
    "broken code": (append(MODELING, "\ndef (:\n"), MODELING, "is not Python"),
    "broken snippet": (edit(README, "generated = model", "generated == = model"), README, "snippet 0 is not Python"),
    "snippet without revision": (
        edit(README, "repository, revision=revision, ", "repository, "),
        README,
        "without a revision",
    ),
    "snippet with another revision in one call": (
        edit(README, "AutoProcessor.from_pretrained(repository, revision=revision", 'load("x", revision="main"'),
        README,
        "loads at a revision, 'main', that is not v1.0",
    ),
    "snippet with two revisions": (
        edit(README, "\nprocessor = ", '\nrevision = "main"\nprocessor = '),
        README,
        "loads at a revision, revision, that is not v1.0",
    ),
    "pipeline without revision": (
        append(README, '\n```python\nask = pipeline(model="me/Tiny-NormLlava")  # v1.0\n```\n'),
        README,
        "snippet 1 loads without a revision",
    ),
    "snippet of another revision": (edit(README, '"v1.0"', '"main"'), README, "that is not v1.0"),
    "no processor": (delete("processor_config.json"), "processor_config.json", "is missing"),
    "file changed": (append("handler.py", "\n"), "handler.py", "it was changed"),
    "dirty tree": (edit(MANIFEST, '"commit_is_clean": true', '"commit_is_clean": false'), MANIFEST, "uncommitted"),
    "broken manifest": (write(MANIFEST, "{"), MANIFEST, "can't be read"),
    "manifest without a repository": (in_manifest("repo_id", None), MANIFEST, "has no repo_id"),
    "manifest without a revision": (in_manifest("revision", ""), MANIFEST, "has no revision"),
    "metadata of another shape": (
        edit(README, "widget:\n", "widget: none\nwidgets:\n"),
        ".",
        "find_metadata_faults stopped",
    ),
}  # fmt: skip


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
    assert len(FAULTS) >= 25


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, staged: Path, tmp_path: Path) -> None:
    plant, file, reason = FAULTS[fault]
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    plant(folder)
    if fault not in ("file changed", "broken manifest"):
        renew_manifest(folder)
    findings = check(folder)
    assert any(finding.file == file and reason in finding.reason and finding.fix for finding in findings), findings


def test_weights_are_not_taken_for_a_pickle(staged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    weights = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    padded = (length // 65536 + 1) * 65536 + 0x0280  # begins with the bytes 80 02
    header = weights[8 : 8 + length] + b" " * (padded - length)
    (folder / "model.safetensors").write_bytes(padded.to_bytes(8, "little") + header + weights[8 + length :])
    renew_manifest(folder)
    assert [str(finding) for finding in check(folder)] == []


def test_all_findings_come_at_once(staged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    shutil.copytree(staged, folder)
    for fault in ("no tag", "token", "symlink", "our import", "optimizer state"):
        FAULTS[fault][0](folder)
    reasons = " ".join(str(finding) for finding in check(folder))
    for fault in ("no tag", "token", "symlink", "our import", "optimizer state"):
        assert FAULTS[fault][2] in reasons
    assert check(tmp_path / "none")[0].reason == "no such folder"
