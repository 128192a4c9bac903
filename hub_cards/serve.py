"""Serve a NormLlava with `transformers serve`, which answers as OpenAI's API does. Requests may contain pictures.

    python -m hub_cards serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

In a request, `model` is the folder or id that was given to this command, or `<id>@<revision>`. A picture is a URL or
base64. The server asks for no key and fetches any URL, so it listens on the loopback interface only.
"""

import socket
from inspect import signature
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_serve_available

from common.errors import UserError
from common.files import folder_or_id


HOST = "127.0.0.1"

# Fields that `transformers serve` adds to OpenAI's API. Requests with these fields are refused: `chat_template_kwargs`
# can name files of this machine as pictures, and `generation_config` replaces the model's settings of generation.
REFUSED_FIELDS = ("chat_template_kwargs", "generation_config")

# How the `url` of a picture begins. Any other `url` is refused as a path.
PICTURE_PREFIXES = ("data:", "http://", "https://")

# The routes of `transformers serve` that are kept. Through other routes, a request can make the server run the code of
# any repository, or read any file of this machine as audio.
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/models", "/health")

# transformers serves only model types that are in its own table, even if a model has its own code. These types and
# their classes are added to the table.
MODEL_TYPES = {
    "normllava": "NormLlavaForConditionalGeneration",
    "normllava_key_adapters": "NormLlavaKeyAdapterForConditionalGeneration",
}


def serve_model(model: str, revision: str, port: int) -> None:
    """Serve a model until interrupted.

    Args:
        model: Folder or Hub id.
        revision: Revision to load, if the model is on the Hub.
        port: Port to listen on.

    Raises:
        UserError: if the folder doesn't exist or holds no model that can be served, if the port is taken, or if the
            server is not installed.
        OSError: if a repository, a revision or a file of the model is missing.
    """
    if not is_serve_available():
        raise UserError("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn  # is installed by the extra "release"

    # Loading a model takes long, so the port is tried first.
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise UserError(f"--port {port} can't be used ({error}): choose another one.") from error
    app = build_app(folder_or_id(model), revision)
    uvicorn.run(app, host=HOST, port=port)


def build_app(model: str, revision: str) -> Any:
    """Load a model with its own code, and make an ASGI app that serves this model alone.

    Raises:
        UserError: if transformers refuses the model.
        OSError: if a repository, a revision or a file of the model is missing.
    """
    # What these modules need is installed by the extra "release".
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState

    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.update(MODEL_TYPES)
    pinned_model = model
    if not Path(model).exists():  # a Hub id, not a folder
        pinned_model = f"{model}@{revision}"
    try:
        manager = ModelManager(trust_remote_code=True, force_model=pinned_model)
    except ValueError as error:
        raise UserError(f"{pinned_model} can't be loaded: {error}") from error

    state = GenerationState()
    chat_handler = ChatCompletionHandler(manager, state)
    response_handler = ResponseHandler(manager, state)
    for handler in (chat_handler, response_handler):
        guard_handler(handler, model, pinned_model)

    # `build_server` takes a handler for each kind of request, such as `chat_handler`. Other versions of transformers
    # have other kinds. All handlers except the two above are `None`.
    handlers: dict[str, Any] = {}
    for name in signature(build_server).parameters:
        if name.endswith("_handler"):
            handlers[name] = None
    handlers["chat_handler"] = chat_handler
    handlers["response_handler"] = response_handler
    app = build_server(manager, generation_state=state, **handlers)

    # `build_server` adds the routes of all handlers, also of those that are `None`. Some routes have no `path`.
    kept_routes = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.router.routes[:] = kept_routes

    @app.exception_handler(HTTPException)
    def report_refusal(request: Any, error: HTTPException) -> JSONResponse:
        # OpenAI's client looks for the message in this place.
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)

    @app.get("/")
    def describe_server() -> dict[str, str]:
        return {"model": model, "routes": ", ".join(ROUTES), "ask": "POST /v1/chat/completions, as in OpenAI's API"}

    return app


def guard_handler(handler: Any, model: str, pinned_model: str) -> None:
    """Change one of transformers' handlers so that it refuses requests that name files of this machine.

    If a request can't be read, the changed handler answers with status 400. The unchanged one would answer with 500.

    Args:
        handler: The handler, which is changed in place.
        model: The name by which clients may ask for the model.
        pinned_model: The name by which transformers knows the model, with the revision of a Hub id.
    """
    from starlette.exceptions import HTTPException

    handle_unguarded = handler.handle_request

    async def handle_guarded(body: dict[str, Any], request_id: str) -> Any:
        for field in REFUSED_FIELDS:
            if body.get(field) is not None:
                raise HTTPException(400, f"{field}: not accepted")

        # If a request lacks "stream", OpenAI's API doesn't stream the answer, but transformers does at /v1/responses.
        request = {"stream": False, **body}
        if request.get("model") == model:
            request["model"] = pinned_model
        try:
            return await handle_unguarded(request, request_id)
        except (ValueError, OSError) as error:
            # `read_messages`, which the handler calls, refuses files with a UserError, a kind of ValueError. Pillow,
            # the HTTP client and transformers raise both types for pictures and text that they can't read.
            raise HTTPException(400, str(error)) from error

    handler.handle_request = handle_guarded
    handler.get_processor_inputs_from_messages = read_messages


def read_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
    """Turn a request's messages into messages for the processor, as transformers does, but refuse files.

    Args:
        messages: The messages in OpenAI's form.
        modality: transformers' name for the kind of model, such as a model of text and pictures.

    Raises:
        UserError: for a part that is neither text nor a picture, and for a picture that is named by a path.
    """
    from transformers.cli.serving.utils import BaseHandler

    # Each part of the result has a "type". A picture has a "url" with a URL, base64 text, a path, or any other JSON
    # value that a client sends.
    processor_messages = BaseHandler.get_processor_inputs_from_messages(messages, modality)
    for message in processor_messages:
        for part in message["content"]:
            is_text_or_picture = part["type"] in ("text", "image")
            is_path = "url" in part and not str(part["url"]).startswith(PICTURE_PREFIXES)
            if is_path or not is_text_or_picture:
                raise UserError("messages: only text, and pictures as http(s) URL or base64; files are not read")
    return processor_messages
