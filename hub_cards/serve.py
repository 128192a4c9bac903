"""`transformers serve` for a NormLlava: chat requests with pictures, as the OpenAI client sends them.

    python -m hub_cards.serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

A client's `model` is the id as given here, or `<id>@<revision>`. A picture is a URL or base64. The server asks for no
key and fetches any URL, so it listens on the loopback interface only.
"""

import argparse

from transformers.utils.import_utils import is_serve_available


def main() -> None:
    """Run the command line until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id; its code is run")
    parser.add_argument("--revision", default="main", help="revision of a repository on the Hub (default: main)")
    parser.add_argument("--port", type=int, default=8000, help="loopback port (default: 8000)")
    args = parser.parse_args()
    if not is_serve_available():
        raise SystemExit("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn  # needs the extra "release", as does the next import

    from hub_cards.chat_server import build_app

    try:
        app = build_app(args.model, args.revision)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    uvicorn.run(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
