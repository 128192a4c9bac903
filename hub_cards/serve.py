"""`transformers serve` for a NormLlava: chat requests with pictures, as the OpenAI client sends them.

    python -m hub_cards.serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

A client's `model` is the id as given here, or `<id>@<revision>`. A picture is a URL or base64. The server asks for no
key and fetches any URL, so it listens on the loopback interface only.
"""

import argparse
import os
import uuid
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_serve_available


# Extensions of `transformers serve`; the first can name pictures, which may be files of this machine.
REFUSED = ("chat_template_kwargs", "generation_config")


def build_app(model: str, revision: str) -> Any:
    """Load the model at `revision`, its own code included, and return the app that serves it.

    Only the chat routes of `transformers serve` are offered. The others load any repository that a request names,
    with its code, and read any file that one names as audio.
    """
    # Here, since they need the extra "release".
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import BaseHandler, GenerationState

    # transformers serves only the model types that stand here, even with custom code.
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava"] = "NormLlavaForConditionalGeneration"
    keys = "NormLlavaKeyAdapterForConditionalGeneration"
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava_key_adapters"] = keys
    pinned = model if os.path.exists(model) else f"{model}@{revision}"
    manager, state, app = ModelManager(trust_remote_code=True, force_model=pinned), GenerationState(), FastAPI()

    def read_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """What the processor gets: text, and pictures that are not files."""
        read = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        for part in (part for message in read for part in message["content"]):
            is_file = not str(part.get("url", "data:")).startswith(("data:", "http://", "https://"))
            if part["type"] not in ("text", "image") or is_file:
                raise ValueError("messages: only text, and pictures as http(s) URL or base64; files are not read")
        return read

    async def ask(handler: Any, body: dict[str, Any]) -> Any:
        if refused := [field for field in REFUSED if body.get(field) is not None]:
            raise HTTPException(400, f"{refused[0]}: not accepted")
        body["model"] = pinned if body.get("model") == model else body.get("model")
        handler.get_processor_inputs_from_messages = read_messages
        try:
            return await handler.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")
        except (ValueError, OSError) as error:  # what the request holds can't be read
            raise HTTPException(400, str(error)) from error

    @app.exception_handler(HTTPException)
    def refuse(request: Request, error: HTTPException) -> JSONResponse:
        body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}  # OpenAI's form
        return JSONResponse({"error": body}, error.status_code)

    @app.post("/v1/chat/completions")
    async def ask_chat(body: dict[str, Any]) -> Any:
        return await ask(ChatCompletionHandler(manager, state), body)

    @app.post("/v1/responses")
    async def ask_responses(body: dict[str, Any]) -> Any:
        return await ask(ResponseHandler(manager, state), {"stream": False, **body})  # OpenAI's default

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": manager.list_models()}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main(arguments: list[str] | None = None) -> None:
    """Serve until interrupted. `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id; its code is run")
    parser.add_argument("--revision", default="main", help="revision of a repository on the Hub (default: main)")
    parser.add_argument("--port", type=int, default=8000, help="loopback port (default: 8000)")
    args = parser.parse_args(arguments)
    if not is_serve_available():
        raise SystemExit("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn

    try:
        app = build_app(args.model, args.revision)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    uvicorn.run(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
