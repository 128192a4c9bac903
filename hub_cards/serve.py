"""`transformers serve` for a NormLlava: chat requests with pictures, as the OpenAI client sends them.

    python -m hub_cards serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

A client's `model` is the id as given here, or `<id>@<revision>`. A picture is a URL or base64. The server asks for no
key and fetches any URL, so it listens on the loopback interface only.
"""

import os
import socket
from inspect import signature
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_serve_available

from common.errors import UserError
from common.files import folder_or_id


# Extensions of `transformers serve`; the first can name pictures, which may be files of this machine.
REFUSED = ("chat_template_kwargs", "generation_config")
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/models", "/health")


def build_app(model: str, revision: str) -> Any:
    """Load the model at `revision`, its own code included, and return the app of `transformers serve`, less the routes
    that load any repository that a request names, with its code, or read any file that one names as audio."""
    # Here, since they need the extra "release".
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import BaseHandler, GenerationState

    # transformers serves only the model types that stand here, even with custom code.
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava"] = "NormLlavaForConditionalGeneration"
    keys = "NormLlavaKeyAdapterForConditionalGeneration"
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava_key_adapters"] = keys
    pinned = model if os.path.exists(model) else f"{model}@{revision}"
    manager, state = ModelManager(trust_remote_code=True, force_model=pinned), GenerationState()

    def read_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """What the processor gets: text, and pictures that are not files."""
        read = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        for part in (part for message in read for part in message["content"]):
            is_file = not str(part.get("url", "data:")).startswith(("data:", "http://", "https://"))
            if part["type"] not in ("text", "image") or is_file:
                raise UserError("messages: only text, and pictures as http(s) URL or base64; files are not read")
        return read

    def guarded(handler: Any) -> Any:
        handle = handler.handle_request

        async def ask(body: dict[str, Any], request_id: str) -> Any:
            if refused := [field for field in REFUSED if body.get(field) is not None]:
                raise HTTPException(400, f"{refused[0]}: not accepted")
            named = pinned if body.get("model") == model else body.get("model")
            try:
                return await handle({"stream": False, **body, "model": named}, request_id)  # OpenAI's default
            except (ValueError, OSError) as error:  # what the request holds can't be read
                raise HTTPException(400, str(error)) from error

        handler.handle_request, handler.get_processor_inputs_from_messages = ask, read_messages
        return handler

    # By name, since versions differ in them; the routes of those that are `None` go.
    handlers: dict[str, Any] = {name: None for name in signature(build_server).parameters if name.endswith("_handler")}
    handlers["chat_handler"] = guarded(ChatCompletionHandler(manager, state))
    handlers["response_handler"] = guarded(ResponseHandler(manager, state))
    app = build_server(manager, generation_state=state, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]

    @app.exception_handler(HTTPException)
    def refuse(request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)  # where OpenAI's client looks

    @app.get("/")
    def about() -> dict[str, str]:
        return {"model": model, "routes": ", ".join(ROUTES), "ask": "POST /v1/chat/completions, as in OpenAI's API"}

    return app


def serve(model: str, revision: str, port: int) -> None:
    """Serve until interrupted. Raises `UserError` or `OSError` if the model can't be loaded, or the server is not
    installed."""
    if not is_serve_available():
        raise UserError("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn

    try:  # before the model is loaded
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise UserError(f"--port {port} can't be used ({error}): choose another one.") from error
    uvicorn.run(build_app(folder_or_id(model), revision), host="127.0.0.1", port=port)
