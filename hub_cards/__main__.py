"""Publish a trained model.

python -m hub_cards build <run folder> --repo_id me/Llama-NormLlava-3B
python -m hub_cards check <run folder>/release
python -m hub_cards push <run folder>/release --dry_run
python -m hub_cards verify me/Llama-NormLlava-3B --revision v1.0 --stage <run folder>/release
"""

import argparse
import logging
import os
from pathlib import Path

from huggingface_hub import HfApi
from transformers.utils import logging as transformers_logging

from hub_cards.build import build
from hub_cards.check import check
from hub_cards.client import use_patient_client
from hub_cards.push import plan_push, push, read_manifest
from hub_cards.verify import ReleaseError, verify
from training.run import RUN_FILE, Run


logger = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("build", help="stage folder and card").add_argument
    add("run", type=Path, help="output folder of the last stage")
    add("--repo_id", required=True, help="owner/name that the repository will have")
    add("--output_dir", type=Path, help="stage folder to make (default: release in the run folder)")
    add("--prose", type=Path, help="YAML with the card's prose (default: card.yaml next to the run's recipe)")
    add("--revision", default="v1.0", help="tag that the card pins, not a branch (default: v1.0)")
    add(
        "--diagnostics", type=Path, help="folder of a report about this model (default: diagnostics in the run folder)"
    )
    add(
        "--widget_data", type=Path, help="LLaVA JSON whose first pictures become examples with the model's own answers"
    )
    add("--dtype", choices=["bfloat16", "float16"], help="cast all weights except the norm's (default: no cast)")
    add("--text_model", help="Hub id of the language model, if it was loaded from a folder")
    add("--vision_model", help="Hub id of the vision encoder, if it was loaded from a folder")
    add("--license", help="licence of parts that were trained from scratch")
    add("--base_licence_file", type=Path, help="the base model's licence text, if a copy is needed")
    add = commands.add_parser("check", help="list all findings").add_argument
    add("stage", type=Path, help="stage folder")
    command = commands.add_parser("push", help="one commit and a tag; private unless --public")
    command.add_argument("stage", type=Path, help="stage folder without findings")
    visibility = command.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="keep the repository private, the default")
    visibility.add_argument(
        "--public", action="store_true", help="make the repository public once everything is there"
    )
    command.add_argument("--dry_run", action="store_true", help="show what would change and stop")
    add = commands.add_parser("verify", help="fresh download, compared with the stage folder").add_argument
    add("repo_id", help="owner/name")
    add("--revision", required=True, help="tag to verify")
    add("--stage", type=Path, help="stage folder that was pushed; without it, files are compared with their manifest")
    return parser.parse_args()


def run_build(args: argparse.Namespace) -> None:
    """Stage a run's folder."""
    diagnostics: Path | None = args.diagnostics
    if diagnostics is None and (args.run / "diagnostics" / "report.json").exists():
        diagnostics = args.run / "diagnostics"
    folder = build(
        args.run,
        args.output_dir or args.run / "release",
        args.repo_id,
        args.prose or find_prose(args.run),
        revision=args.revision,
        diagnostics=diagnostics,
        widget_data=args.widget_data,
        text_model=args.text_model,
        vision_model=args.vision_model,
        own_licence=args.license,
        base_licence_file=args.base_licence_file,
        dtype=args.dtype,
    )
    logger.info("Staged in %s; now: python -m hub_cards check %s", folder, folder)


def find_prose(run: Path) -> Path:
    """The prose next to the recipe that a run was started with. Raises `ValueError` if there is none."""
    recipe = Run.read(run).recipe if (run / RUN_FILE).exists() else None
    prose = None if recipe is None else Path(recipe).with_name("card.yaml")
    if prose is None or not prose.exists():
        lacks = f"No {RUN_FILE} names a recipe" if prose is None else f"{prose} is missing"
        raise ValueError(f"{lacks}: give the card's prose with --prose. training/recipes/*/card.yaml are examples.")
    return prose


def run_check(args: argparse.Namespace) -> None:
    """Print all findings."""
    findings = check(args.stage)
    for finding in findings:
        logger.info("%s", finding)
    if findings:
        raise SystemExit(f"{len(findings)} findings: nothing to publish yet.")
    logger.info("%s: no findings", args.stage)


def run_push(args: argparse.Namespace) -> None:
    """Show what would change, and unless it is a dry run, push it."""
    token = read_token()
    if token is None and not args.dry_run:
        raise SystemExit("HF_TOKEN is not set: a push needs a token with write access.")
    manifest = read_manifest(args.stage)
    api = HfApi(token=token or False)
    plan = plan_push(args.stage, manifest, api, args.public)
    logger.info("%s", plan.describe())
    if args.dry_run:
        if plan.state.head is None and token is None:
            logger.info("A private repository of this name would not be visible without HF_TOKEN.")
        logger.info("Dry run: nothing was changed.")
        return
    logger.info("Published: %s", push(args.stage, manifest, plan, api, args.public))


def run_verify(args: argparse.Namespace) -> None:
    """Print the verdict."""
    verdict = verify(args.repo_id, args.revision, args.stage, read_token())
    logger.info("%d files downloaded into an empty cache", verdict.files)
    if verdict.largest_difference is None:
        logger.info("logits and hidden states: not compared with a local model")
    else:
        logger.info("logits and hidden states: largest difference %g", verdict.largest_difference)
    if verdict.snippet is not None:
        logger.info("the card's snippet printed: %s", verdict.snippet.strip())
    for problem in verdict.problems:
        logger.info("%s", problem)
    if verdict.problems:
        raise SystemExit(f"NOT verified: {len(verdict.problems)} problems with {args.repo_id} at {args.revision}.")
    staged = "its manifest" if args.stage is None else "the stage folder"
    logger.info("Verified: %s at %s matches %s.", args.repo_id, args.revision, staged)


def read_token() -> str | None:
    """The token in the environment; an empty one counts as none."""
    return os.environ.get("HF_TOKEN") or None


COMMANDS = {"build": run_build, "check": run_check, "push": run_push, "verify": run_verify}


def main() -> None:
    """Run the command line."""
    logging.basicConfig(format="%(message)s")  # the Hub's client would log every request
    logger.setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    use_patient_client()
    args = parse_arguments()
    try:
        COMMANDS[args.command](args)
    except (ValueError, OSError, ReleaseError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt as interrupt:
        logger.info("%s", str(interrupt) or "Interrupted.")
        raise SystemExit(130) from interrupt  # as shells count it


if __name__ == "__main__":
    main()
