"""Publish a trained model.

python -m hub_cards build <run folder> --repo_id me/Llama-NormLlava-3B --prose card.yaml --output_dir stage/
python -m hub_cards check stage/
"""

import argparse
import logging
from pathlib import Path

from transformers.utils import logging as transformers_logging

from hub_cards.build import build
from hub_cards.check import check


logger = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = (made := commands.add_parser("build", help="stage folder and card")).add_argument
    made.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add("run", type=Path, help="output folder of the last stage")
    add("--repo_id", required=True, help="owner/name that the repository will have")
    add("--output_dir", type=Path, required=True, help="stage folder to make")
    add("--prose", type=Path, required=True, help="YAML with the card's prose")
    add("--revision", default="v1.0", help="tag that the card pins")
    add("--diagnostics", type=Path, help="folder of a diagnostics report about this model")
    add(
        "--widget_data", type=Path, help="LLaVA JSON whose first pictures become examples with the model's own answers"
    )
    add("--license", help="of a model whose parts are all its owner's")
    add("--base_licence_file", type=Path, help="the base model's licence text, where a copy has to come along")
    add = commands.add_parser("check", help="every finding, at once").add_argument
    add("stage", type=Path, help="stage folder")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.set_verbosity_error()
    args = parse_arguments()
    if args.command == "build":
        try:
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
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from error
        logger.info("Staged in %s; now: python -m hub_cards check %s", folder, folder)
        return
    findings = check(args.stage)
    for finding in findings:
        logger.info("%s", finding)
    if findings:
        raise SystemExit(f"{len(findings)} findings: nothing to publish yet.")
    logger.info("%s: no findings", args.stage)


if __name__ == "__main__":
    main()
