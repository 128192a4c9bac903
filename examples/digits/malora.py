"""Adapt two models of the digits, without the norm and with it, in four arms each, through the real scripts.

    make malora

Stage 2 as adaptation: plain LoRA; gated key adapters in place of LoRA on `k_proj`; these with the MMD; with MMD and
Gram reference. Start, order of rows and everything else are the same for arms of the same seed. Finished steps are
skipped. `malora_report.py` measures the models and writes up the results.
"""

from dataclasses import dataclass
from pathlib import Path

from ablation import GWC, SEEDS, Arm, arm_folder, check_parts, evaluate, read_folder, run_arm, run_steps
from quickstart import launch
from tqdm import tqdm


NORMS = (Arm("none", "no norm", ("--projector_norm", "none"), stages=1), Arm("gwc", "GWC", GWC, stages=1))
RECIPE = "training/recipes/digits/malora.yaml"


@dataclass(frozen=True)
class Adaptation:
    """One arm.

    Attributes:
        name: Folder, and key in the results.
        title: Its name in tables.
        start: Folder of the model that it starts from: with key adapters, or without.
        mmd_weight, gram_weight: Weights of the losses on keys.
    """

    name: str
    title: str
    start: str = "stage1-keys"
    mmd_weight: float = 0.0
    gram_weight: float = 0.0


ADAPTATIONS = (
    Adaptation("lora", "plain LoRA", start="stage1"),
    Adaptation("keys", "+ gated key adapters"),
    Adaptation("mmd", "+ MMD", mmd_weight=0.1),
    Adaptation("gram", "+ MMD and Gram", mmd_weight=0.1, gram_weight=0.1),
)


def commands(arm: Adaptation, seed: int, base: Path) -> list[tuple[Path, list[str]]]:
    """The steps to run, in order: the file that a step writes last, and its command."""
    adapter, merged = base / arm.name / "adapter", base / arm.name / "merged"
    steps = []
    if arm.start == "stage1-keys":
        keys = ["training/add_key_adapters.py", "--model", str(base / "stage1"), "--rank", "16"]
        keys += ["--seed", str(seed), "--output_dir", str(base / arm.start)]
        steps.append((base / arm.start / "processor_config.json", keys))
    train = [*launch(1), "training/sft.py", "--config", RECIPE, "--model_name_or_path", str(base / arm.start)]
    train += ["--output_dir", str(adapter), "--seed", str(seed), "--resume_from_checkpoint", "true"]
    train += ["--key_mmd_weight", str(arm.mmd_weight), "--key_gram_weight", str(arm.gram_weight)]
    merge = ["training/merge.py", "--adapter", str(adapter), "--output_dir", str(merged)]
    return [*steps, (adapter / "trainer_state.json", train), (merged / "trainer_state.json", merge)]


def main() -> None:
    """Run the command line."""
    root = read_folder(__doc__, "--output_dir", "malora")
    check_parts()
    jobs = [(norm, seed, arm) for seed in SEEDS for norm in NORMS for arm in ADAPTATIONS]
    for norm, seed, arm in tqdm(jobs, desc="Adaptations", unit="run"):
        run_arm(norm, seed, root)
        base = arm_folder(root, norm, seed)
        run_steps(commands(arm, seed, base), base / arm.name, ["evaluation.json"])
        if not (base / arm.name / "evaluation.json").exists():
            evaluate(base / arm.name / "merged", base / arm.name / "evaluation.json")


if __name__ == "__main__":
    main()
