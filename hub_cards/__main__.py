"""Publish a trained model.

python -m hub_cards build <run folder> --repo_id me/Llama-NormLlava-3B
python -m hub_cards check <run folder>/release
python -m hub_cards push <run folder>/release --dry_run
python -m hub_cards verify me/Llama-NormLlava-3B --revision v1.0 --stage <run folder>/release
python -m hub_cards serve me/Llama-NormLlava-3B --revision v1.0
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import httpx  # the HTTP library that is installed with it

from common.console import command, parse
from hub_cards.build import build
from hub_cards.check import check
from hub_cards.push import ReleaseError, plan_push, push
from hub_cards.serve import serve
from hub_cards.verify import verify


logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
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
    add("--widget_data", type=Path, help="LLaVA JSON whose first pictures become examples, with the model's answers")
    add("--text_model", help="Hub id of the language model, if it was loaded from a folder")
    add("--vision_model", help="Hub id of the vision encoder, if it was loaded from a folder")
    add("--license", help="licence of parts that were trained from scratch")
    add("--base_licence_file", type=Path, help="the base model's licence text, if a copy is needed")
    add = commands.add_parser("check", help="list all findings").add_argument
    add("stage", type=Path, help="stage folder")
    add = commands.add_parser("push", help="one commit and a tag; private unless --public").add_argument
    add("stage", type=Path, help="stage folder without findings")
    add("--public", action="store_true", help="make the repository public once everything is there")
    add("--dry_run", action="store_true", help="show what would change and stop")
    add = commands.add_parser("verify", help="fresh download, as any user would load it").add_argument
    add("repo_id", help="owner/name")
    add("--revision", required=True, help="tag to verify")
    add("--stage", type=Path, help="stage folder that was pushed, to compare with")
    add = commands.add_parser("serve", help="transformers' server, on the loopback alone").add_argument
    add("model", help="folder or Hub id; its code is run")
    add("--revision", default="main", help="revision of a repository on the Hub (default: main)")
    add("--port", type=int, default=8000, help="loopback port (default: 8000)")
    return parser


def run_push(stage: Path, public: bool, dry_run: bool) -> None:
    """Push, or in a dry run say what would change."""
    if get_token() is None:
        raise ReleaseError("There is no token: hf auth login, or set HF_TOKEN to one with write access.")
    try:
        plan = plan_push(stage, HfApi()) if dry_run else push(stage, HfApi(), public)
    except (httpx.HTTPError, ConnectionError, RuntimeError) as error:  # as the client raises them
        stopped = "The Hub can't be asked" if dry_run else "The push stopped; push again to go on from there"
        raise ReleaseError(f"{stopped}: {error}") from error
    logger.info("%s\n%s", plan, "Dry run: nothing was changed." if dry_run else "Published.")


def run(command: str, options: dict[str, Any]) -> None:
    """One of the five commands. Raises `UserError` with all that was found wrong."""
    if command == "build":
        logger.info("Staged. Next: python -m hub_cards check %s", build(**options))
    elif command == "push":
        run_push(**options)
    elif command == "serve":
        serve(**options)
    elif command == "check":
        if findings := check(**options):
            raise ReleaseError("\n".join([*findings, f"{len(findings)} findings: nothing to publish yet."]))
        logger.info("No findings: now python -m hub_cards push %s", options["stage"])
    else:
        files, printed, problems = verify(**options)
        logger.info("%d files downloaded into an empty cache; the card's snippet printed: %s", files, printed)
        if problems:
            raise ReleaseError("\n".join([*problems, f"NOT verified: {options['repo_id']}"]))
        logger.info("Verified: %s at %s", options["repo_id"], options["revision"])


@command()
def main() -> None:
    """Run the command line."""
    options = vars(parse(build_parser()))
    try:
        run(options.pop("command"), options)
    except (ValueError, httpx.HTTPError) as error:  # of the Hub's client too
        raise ReleaseError(str(error)) from error


if __name__ == "__main__":
    main()
