"""`transformers serve` for a NormLlava: chat requests with pictures, as the OpenAI client sends them.

    python -m hub_cards.serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

`transformers serve` 5.23 loads custom code only if its model type is among those that it lists, so one entry is added.
It listens on the loopback alone: a request can name any file or URL as its picture, and the server reads it.
"""

import argparse

from transformers.cli.serve import Serve
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_serve_available


def main() -> None:
    """Run the command line until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id; its code is run")
    parser.add_argument("--revision", default="main", help="of a repository on the Hub (default: main)")
    parser.add_argument("--port", type=int, default=8000, help="on the loopback (default: 8000)")
    args = parser.parse_args()
    if not is_serve_available():
        raise SystemExit("transformers' server is not installed: pip install -e '.[serve]'")
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava"] = "NormLlavaForConditionalGeneration"
    Serve(
        force_model=f"{args.model}@{args.revision}",
        trust_remote_code=True,
        host="127.0.0.1",
        port=args.port,
    )


if __name__ == "__main__":
    main()
