"""Publish a trained model on the Hub, and verify what was published.

python -m hub_cards push <run folder> --repo_id me/Llama-NormLlava-3B --dry_run
python -m hub_cards push <run folder> --repo_id me/Llama-NormLlava-3B --public
python -m hub_cards gguf <run folder>/release
python -m hub_cards verify me/Llama-NormLlava-3B --revision v1.0
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from normllava.command_line import command, parse

from huggingface_hub import HfApi, get_token

from hub_cards.build import BuildOptions, build_or_take
from hub_cards.check import require_no_faults
from hub_cards.hub_errors import hub_errors
from hub_cards.llama_cpp import export
from hub_cards.push import plan_push, push_release
from hub_cards.verify import verify_release
from normllava.errors import UserError


logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    push = commands.add_parser("push", help="build a run's release folder, check it and push it; private by default")
    push.add_argument("run", type=Path, help="output folder of the last stage")
    push.add_argument("--repo_id", required=True, help="owner/name of the repository")
    push.add_argument("--revision", default="v1.0", help="tag that the card pins, not a branch (default: v1.0)")
    push.add_argument("--public", action="store_true", help="make the repository public once everything is there")
    push.add_argument("--dry_run", action="store_true", help="build the folder, show what would change, and stop")
    push.add_argument("--output_dir", type=Path, help="release folder (default: release in the run folder)")
    push.add_argument(
        "--prose",
        type=Path,
        help="YAML with the card's prose (default: card.yaml beside the recipe or in the run)",
    )
    push.add_argument("--widget_data", type=Path, help="rows whose first pictures become examples, with answers")
    push.add_argument("--text_model", help="Hub id of the language model, if it was loaded from a folder")
    push.add_argument("--vision_model", help="Hub id of the vision encoder, if it was loaded from a folder")
    push.add_argument("--license", help="the model's licence, where the licence of a part is not known")
    push.add_argument("--base_licence_file", type=Path, help="file with the licence's text, if it isn't Apache's")

    gguf = commands.add_parser("gguf", help="write a plain Llava's files for llama.cpp, and compare its answers")
    gguf.add_argument("release", type=Path, help="release folder, or output folder of the last stage")
    gguf.add_argument("--output_dir", type=Path, help="where the files go (default: the release folder itself)")

    verify = commands.add_parser("verify", help="download a release afresh and load it, as any user would")
    verify.add_argument("repo_id", help="owner/name")
    verify.add_argument("--revision", required=True, help="tag to verify")
    verify.add_argument("--stage", type=Path, help="release folder that was pushed; the download is compared with it")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. The decorator ends it with one line if a `UserError` is raised."""
    args = parse(build_parser(), argv)
    if args.command == "push":
        run_push(args)
    elif args.command == "gguf":
        export(args.release, args.output_dir or args.release)
    else:
        run_verify(args)


def run_push(args: argparse.Namespace) -> None:
    """Build a run's release folder if it is missing, and check it. Then push it, or show what a push would change."""
    has_token = get_token() is not None
    if not has_token and not args.dry_run:
        raise UserError("There is no token: hf auth login, or set HF_TOKEN to one with write access.")

    options = BuildOptions(
        repo_id=args.repo_id,
        revision=args.revision,
        prose=args.prose,
        widget_data=args.widget_data,
        text_model=args.text_model,
        vision_model=args.vision_model,
        license=args.license,
        base_licence_file=args.base_licence_file,
    )
    folder = args.output_dir
    if folder is None:
        folder = args.run / "release"
    weights = build_or_take(args.run, folder, options)
    require_no_faults(folder, weights)

    if args.dry_run:
        show_changes(folder, has_token)
    else:
        publish_folder(folder, args.public)


def publish_folder(folder: Path, public: bool) -> None:
    """Push a release folder, and log what was changed on the Hub."""
    with hub_errors("The push stopped. Push again to go on, without the options of the build"):
        plan = push_release(folder, HfApi(), public)
    logger.info("%s", plan)
    logger.info("Published. Try it: python -m hub_cards verify %s --revision %s", plan.repo_id, plan.tag)


def show_changes(folder: Path, has_token: bool) -> None:
    """Log what a push of a release folder would change on the Hub. Without a token, the Hub is not asked."""
    if has_token:
        with hub_errors("The Hub can't be asked"):
            plan = plan_push(folder, HfApi())
        logger.info("%s", plan)
    else:
        logger.info("There is no token, so the Hub was not asked what it holds.")
    logger.info(
        "Dry run: nothing was pushed. Look at %s. To push it, give the same command without --dry_run and without "
        "options of the build, such as --license.",
        folder,
    )


def run_verify(args: argparse.Namespace) -> None:
    """Verify a published release, and log what was found.

    Raises:
        UserError: if the release has problems. The message lists all problems.
    """
    verdict = verify_release(args.repo_id, args.revision, args.stage)

    logger.info("%d files downloaded into an empty cache.", verdict.num_files)
    logger.info("The card's snippet printed: %s", verdict.printed)
    if verdict.problems:
        lines = [*verdict.problems, *verdict.left_out, f"NOT verified: {args.repo_id}"]
        raise UserError("\n".join(lines))
    logger.info("\n".join([f"Verified: {args.repo_id} at {args.revision}", *verdict.left_out]))


if __name__ == "__main__":
    main()
