"""Run `transformers serve` for a NormLlava. It answers chat requests with pictures, as the OpenAI client sends them.

    python -m hub_cards serve me/Llama-NormLlava-3B --revision v1.0 --port 8000

A client's `model` is the folder or id as given here, or `<id>@<revision>`. A picture is a URL or base64. The server
asks for no key and fetches any URL, so it listens on the loopback interface only.
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

# Fields that `transformers serve` adds to OpenAI's API. Requests with them are refused: `chat_template_kwargs` can
# name pictures that are files of this machine, and `generation_config` replaces the model's settings of generation.
REFUSED_FIELDS = ("chat_template_kwargs", "generation_config")

# The routes that are kept. Through other routes of `transformers serve`, a request can have the code of any repository
# run, or any file read as audio.
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/models", "/health")

# transformers serves only the model types in a table of its own, even if a model brings its code. These types are
# added to the table.
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
        UserError: if the folder doesn't exist or holds no model that can be served, the port is taken, or the server
            is not installed.
        OSError: if a repository, a revision or a file of the model is missing. The command prints it in one line.
    """
    if not is_serve_available():
        raise UserError("transformers' server is not installed: pip install -e '.[release]'")
    import uvicorn

    # Loading a model takes long, so try the port before.
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise UserError(f"--port {port} can't be used ({error}): choose another one.") from error
    uvicorn.run(build_app(folder_or_id(model), revision), host=HOST, port=port)


def build_app(model: str, revision: str) -> Any:
    """Load a model with its own code, and return an app that serves this model alone.

    Raises:
        UserError: if transformers refuses the model.
        OSError: if a repository, a revision or a file of the model is missing.
    """
    # These imports need the extra "release".
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

    # Versions of transformers have different handlers, so all of them are set to `None` and only two are added.
    state = GenerationState()
    handler_names = [name for name in signature(build_server).parameters if name.endswith("_handler")]
    handlers: dict[str, Any] = dict.fromkeys(handler_names)
    handlers["chat_handler"] = guard_handler(ChatCompletionHandler(manager, state), model, pinned)
    handlers["response_handler"] = guard_handler(ResponseHandler(manager, state), model, pinned)
    app = build_server(manager, generation_state=state, **handlers)

    # Take out the routes that are not in `ROUTES`. The routes of the handlers that are `None` are among them.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]

    @app.exception_handler(HTTPException)
    def report_refusal(request: Any, error: HTTPException) -> JSONResponse:
        # OpenAI's client looks for the message in this place.
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)

    @app.get("/")
    def describe_server() -> dict[str, str]:
        return {"model": model, "routes": ", ".join(ROUTES), "ask": "POST /v1/chat/completions, as in OpenAI's API"}

    return app


def guard_handler(handler: Any, model: str, pinned: str) -> Any:
    """Change one of transformers' handlers so that it reads no files of this machine.

    It refuses requests that name files, and answers requests that it can't read with status 400 instead of 500.

    Args:
        handler: The handler that answers the requests of a route.
        model: The name by which clients may ask for the model.
        pinned: The name by which transformers knows the model.
    """
    from starlette.exceptions import HTTPException

    handle = handler.handle_request

    async def handle_guarded(body: dict[str, Any], request_id: str) -> Any:
        for field in REFUSED_FIELDS:
            if body.get(field) is not None:
                raise HTTPException(400, f"{field}: not accepted")

        # If a request lacks the field, OpenAI's API doesn't stream. transformers does, at /v1/responses.
        request = {"stream": False, **body}
        if request.get("model") == model:
            request["model"] = pinned
        try:
            return await handle(request, request_id)
        except (ValueError, OSError) as error:
            # `read_messages` refuses files by a UserError, which is a ValueError. Pillow, the HTTP client and
            # transformers raise both types for pictures and text that they can't read.
            raise HTTPException(400, str(error)) from error

    handler.handle_request = handle_guarded
    handler.get_processor_inputs_from_messages = read_messages
    return handler


def read_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
    """Turn a request's messages into the processor's, as transformers does, and refuse files.

    Raises:
        UserError: for a part that is neither text nor a picture, and for a picture that is named by a path.
    """
    from transformers.cli.serving.utils import BaseHandler

    processor_messages = BaseHandler.get_processor_inputs_from_messages(messages, modality)
    for message in processor_messages:
        for part in message["content"]:
            is_known = part["type"] in ("text", "image")
            is_path = "url" in part and not str(part["url"]).startswith(("data:", "http://", "https://"))
            if is_path or not is_known:
                raise UserError("messages: only text, and pictures as http(s) URL or base64; files are not read")
    return processor_messages
