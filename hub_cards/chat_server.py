"""The app of `python -m hub_cards.serve`: one model, and `transformers serve`'s handlers for the OpenAI client.

Only its chat routes are used. The others load any repository that a request names, including its code, and read any
file that one names as audio or video.
"""

import copy
import uuid
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from huggingface_hub.utils import httpx  # the one that is installed with it
from jinja2 import TemplateError
from PIL import Image
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from hub_cards.assets.handler import GREEDY, MAX_BYTES, MAX_NEW_TOKENS, open_image, read_image


LIMITED = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Extensions of `transformers serve` that go around the limits: the first can name pictures, files of the server too.
REFUSED = ("chat_template_kwargs", "generation_config")


class OneModelHandler(BaseHandler):
    """The model's names are `<id>` and `<id>@<revision>`; messages hold text and pictures, but no local files."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        pinned = self.model_manager.force_model
        for field in REFUSED:
            if body.get(field) is not None:
                raise ValueError(f"{field}: not accepted")
        for field in LIMITED:
            value = body.get(field)
            if value is not None and not (type(value) is int and 0 < value <= MAX_NEW_TOKENS):
                raise ValueError(f"{field}: a whole number from 1 to {MAX_NEW_TOKENS}")
        if body.get("model") == pinned.rpartition("@")[0]:
            body["model"] = pinned
        return super()._resolve_model(body)

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, **options: Any) -> Any:
        if body.get("temperature") == 0:
            model_generation_config = copy.deepcopy(model_generation_config)
            model_generation_config.update(**GREEDY)
        return super()._build_generation_config(body, model_generation_config, **options)

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """The messages in the processor's form, pictures read. Raises `ValueError` with the message and the reason."""
        try:
            read = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"messages: not in the form of OpenAI's API ({type(error).__name__}: {error})") from error
        for number, message in enumerate(read):
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = read_picture(part.pop("url"), f"messages[{number}]")
                elif part["type"] != "text":
                    raise ValueError(f"messages[{number}]: only text and pictures are accepted, not {part['type']}")
        return read


class Chat(OneModelHandler, ChatCompletionHandler):
    """`/v1/chat/completions`."""


class Responses(OneModelHandler, ResponseHandler):
    """`/v1/responses`."""


def read_picture(url: Any, place: str) -> Image.Image:
    """A picture from the web, or in base64. Raises `ValueError` with the place and the reason; paths are refused."""
    if not str(url).startswith(("data:", "http://", "https://")):
        raise ValueError(f"{place}: a picture is an http(s) URL or `data:image/png;base64,...`; files are not read")
    if url.startswith("data:"):
        return read_image(url, place)
    try:
        with httpx.stream("GET", url, timeout=30, follow_redirects=True) as response:
            response.raise_for_status()
            content = b""
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_BYTES:
                    raise ValueError(f"{place}: the picture at {url} has more than {MAX_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"{place}: {url} can't be fetched ({error or type(error).__name__})") from error
    return open_image(content, place)


def refuse(request: Request, error: Exception) -> JSONResponse:
    """The error of a bad request, in OpenAI's format."""
    status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, status)


def build_app(model: str, revision: str) -> FastAPI:
    """Load the model at `revision`, its own code included, and return the app that serves it."""
    # transformers 5.23 serves only the model types that it lists, even with custom code.
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava"] = "NormLlavaForConditionalGeneration"
    keys = "NormLlavaKeyAdapterForConditionalGeneration"
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["normllava_key_adapters"] = keys
    manager = ModelManager(trust_remote_code=True, force_model=f"{model}@{revision}")
    state = GenerationState()
    chat, responses = Chat(manager, state), Responses(manager, state)

    app = FastAPI()
    for kind in (HTTPException, ValueError, TemplateError):
        app.add_exception_handler(kind, refuse)

    @app.post("/v1/chat/completions")
    async def ask_chat(body: dict[str, Any]) -> Response:
        if not body.get("messages"):
            raise ValueError("messages: missing or empty")
        return await chat.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")

    @app.post("/v1/responses")
    async def ask_responses(body: dict[str, Any]) -> Response:
        return await responses.handle_request({"stream": False, **body}, uuid.uuid4().hex)  # OpenAI's default

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        names = (model, manager.force_model)
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0} for name in names]}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
