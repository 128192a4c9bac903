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


HOST = "127.0.0.1"

# Extensions of `transformers serve`; the first can name pictures, which may be files of this machine.
REFUSED_FIELDS = ("chat_template_kwargs", "generation_config")

# The other routes of `transformers serve` load any repository that a request names, with its code, or read any file
# that one names as audio.
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/models", "/health")

# transformers serves only model types that it knows by this table, even with custom code.
MODEL_TYPES = {
    "normllava": "NormLlavaForConditionalGeneration",
    "normllava_key_adapters": "NormLlavaKeyAdapterForConditionalGeneration",
}


def serve_model(model: str, revision: str, port: int) -> None:
    """Serve a model until interrupted.

    Args:
        model: Folder or Hub id.
        revision: Of a repository on the Hub.
        port: To listen on.

    Raises:
        UserError: if the model can't be loaded, the port is taken, or the server is not installed.
    """
    if not is_serve_available():
        raise UserError("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn

    try:  # before the model is loaded
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise UserError(f"--port {port} can't be used ({error}): choose another one.") from error
    uvicorn.run(build_app(folder_or_id(model), revision), host=HOST, port=port)


def build_app(model: str, revision: str) -> Any:
    """Load the model at `revision`, its own code included, and return the app that answers for it alone."""
    # Here, since they need the extra "release".
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState

    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.update(MODEL_TYPES)
    pinned = model if os.path.exists(model) else f"{model}@{revision}"
    try:
        manager = ModelManager(trust_remote_code=True, force_model=pinned)
    except ValueError as error:
        raise UserError(f"{pinned} can't be loaded: {error}") from error

    # By name, since versions differ in them; the routes of those that are `None` go.
    state = GenerationState()
    handlers: dict[str, Any] = {name: None for name in signature(build_server).parameters if name.endswith("_handler")}
    handlers["chat_handler"] = guard_handler(ChatCompletionHandler(manager, state), model, pinned)
    handlers["response_handler"] = guard_handler(ResponseHandler(manager, state), model, pinned)
    app = build_server(manager, generation_state=state, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]

    @app.exception_handler(HTTPException)
    def refuse(request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)  # where OpenAI's client looks

    @app.get("/")
    def about() -> dict[str, str]:
        return {"model": model, "routes": ", ".join(ROUTES), "ask": "POST /v1/chat/completions, as in OpenAI's API"}

    return app


def guard_handler(handler: Any, model: str, pinned: str) -> Any:
    """Make one of transformers' handlers refuse what reads files, and answer what it can't read with status 400.

    Args:
        handler: Answers the requests of a route.
        model: The name by which clients may ask for the model.
        pinned: The name by which transformers knows it.
    """
    from starlette.exceptions import HTTPException

    handle = handler.handle_request

    async def handle_guarded(body: dict[str, Any], request_id: str) -> Any:
        for field in REFUSED_FIELDS:
            if body.get(field) is not None:
                raise HTTPException(400, f"{field}: not accepted")

        request = {"stream": False, **body}  # OpenAI's default
        if request.get("model") == model:
            request["model"] = pinned
        try:
            return await handle(request, request_id)
        except (ValueError, OSError) as error:  # what the request holds can't be read
            raise HTTPException(400, str(error)) from error

    handler.handle_request = handle_guarded
    handler.get_processor_inputs_from_messages = read_messages
    return handler


def read_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
    """What the processor gets of a request: text, and pictures that are not files.

    Raises:
        UserError: for anything else, and for a picture that is named by a path.
    """
    from transformers.cli.serving.utils import BaseHandler

    read = BaseHandler.get_processor_inputs_from_messages(messages, modality)
    for message in read:
        for part in message["content"]:
            url = str(part.get("url", "data:"))
            is_file = not url.startswith(("data:", "http://", "https://"))
            if part["type"] not in ("text", "image") or is_file:
                raise UserError("messages: only text, and pictures as http(s) URL or base64; files are not read")
    return read
