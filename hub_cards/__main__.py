"""Publish a trained model.

python -m hub_cards build <run folder> --repo_id me/Llama-NormLlava-3B --prose card.yaml --output_dir stage/
python -m hub_cards check stage/
"""

import argparse
import logging
import os
from pathlib import Path

from huggingface_hub import HfApi
from transformers.utils import logging as transformers_logging

from hub_cards.build import build
from hub_cards.check import check
from hub_cards.release import ReleaseError, plan_push, push, read_manifest, verify


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
    add("--output_dir", type=Path, required=True, help="stage folder to make")
    add("--prose", type=Path, required=True, help="YAML with the card's prose")
    add("--revision", default="v1.0", help="tag that the card pins (default: v1.0)")
    add("--diagnostics", type=Path, help="folder of a diagnostics report about this model")
    add(
        "--widget_data", type=Path, help="LLaVA JSON whose first pictures become examples with the model's own answers"
    )
    add("--license", help="of a model whose parts are all its owner's")
    add("--base_licence_file", type=Path, help="the base model's licence text, where a copy has to come along")
    add = commands.add_parser("check", help="every finding, at once").add_argument
    add("stage", type=Path, help="stage folder")
    add = commands.add_parser("push", help="one commit and a tag; private unless --public").add_argument
    add("stage", type=Path, help="stage folder without findings")
    add("--public", action="store_true", help="make the repository public once all is there")
    add("--dry_run", action="store_true", help="show what would change and stop")
    add = commands.add_parser("verify", help="fresh download, compared with the stage folder").add_argument
    add("repo_id", help="owner/name")
    add("--revision", required=True, help="tag to verify")
    add("--stage", type=Path, required=True, help="stage folder that was pushed")
    return parser.parse_args()


def run_build(args: argparse.Namespace) -> None:
    """Stage a run's folder."""
    folder = build(
        args.run,
        args.output_dir,
        args.repo_id,
        args.prose,
        revision=args.revision,
        diagnostics=args.diagnostics,
        widget_data=args.widget_data,
        own_licence=args.license,
        base_licence_file=args.base_licence_file,
    )
    logger.info("Staged in %s; now: python -m hub_cards check %s", folder, folder)


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
    token = os.environ.get("HF_TOKEN")
    if token is None and not args.dry_run:
        raise SystemExit("HF_TOKEN is not set: a push needs a token that may write.")
    manifest = read_manifest(args.stage)
    api = HfApi(token=token or False)
    plan = plan_push(args.stage, api, manifest["repo_id"], manifest["revision"])
    logger.info("%s at %s\n%s", manifest["repo_id"], plan.head or "nothing yet", plan.describe())
    if args.dry_run:
        logger.info("Dry run: nothing was changed.")
        return
    commit = push(args.stage, api, args.public, plan)
    logger.info("Published %s as %s, commit %s", manifest["repo_id"], manifest["revision"], commit)


def run_verify(args: argparse.Namespace) -> None:
    """Print the verdict."""
    verdict = verify(args.repo_id, args.revision, args.stage, os.environ.get("HF_TOKEN"))
    logger.info("%d files downloaded into an empty cache", verdict.files)
    logger.info("logits and hidden states: largest difference %g", verdict.largest_difference)
    logger.info("the card's snippet printed: %s", verdict.snippet.strip())
    for problem in verdict.problems:
        logger.info("%s", problem)
    if verdict.problems:
        raise SystemExit(f"NOT verified: {len(verdict.problems)} problems with {args.repo_id} at {args.revision}.")
    logger.info("Verified: %s at %s is what was staged.", args.repo_id, args.revision)


COMMANDS = {"build": run_build, "check": run_check, "push": run_push, "verify": run_verify}


def main() -> None:
    """Run the command line."""
    logging.basicConfig(format="%(message)s")  # the Hub's client would log every request
    logger.setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    args = parse_arguments()
    try:
        COMMANDS[args.command](args)
    except (ValueError, OSError, ReleaseError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
