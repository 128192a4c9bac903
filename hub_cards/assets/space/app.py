"""Ask the model about a picture, and see its tokens' norm and turning with and without the projector's norm."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import torch
from huggingface_hub import metadata_load
from layers import PANELS, Measured, draw, measure, to_svg
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import cached_file


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of the other formats, EPS starts a program
MAX_PIXELS, MAX_RATIO, MAX_NEW_TOKENS = 40_000_000, 100, 256
# Overrides the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
CAPTION = (
    "Means over the question's tokens, without special tokens and attention sinks. Norm: of each layer's input and, "
    "last, of the last layer's output. Turning: between a layer's input and output."
)
TAKEN_OUT = "the same weights with the norm after the projector removed; this is not a model trained without it"


def variable(name: str) -> str:
    """The value of one of the Space's variables."""
    if not os.environ.get(name):
        raise SystemExit(f"Set the Space's variable {name}: README.md explains its variables.")
    return os.environ[name]


def load(repository: str, revision: str) -> tuple[Any, Any]:
    """A model and its processor, whose own code is run at that revision."""
    device_map = "auto" if torch.cuda.is_available() else None
    model = AutoModelForImageTextToText.from_pretrained(
        repository, revision=revision, trust_remote_code=True, dtype="auto", device_map=device_map
    )
    return model.eval(), AutoProcessor.from_pretrained(repository, revision=revision, trust_remote_code=True)


MODEL, REVISION, BASELINE = variable("MODEL"), variable("REVISION"), os.environ.get("BASELINE")
NAME = MODEL.rstrip("/").split("/")[-1]
model, processor = load(MODEL, REVISION)
baseline = load(BASELINE, variable("BASELINE_REVISION")) if BASELINE else None
if baseline is not None and getattr(baseline[0].config, "projector_norm", "none") != "none":
    raise SystemExit(f"BASELINE={BASELINE} has a norm after its projector: use a model without one, or unset it.")


def read_examples() -> list[list[str]]:
    """Picture and question of each example on the model's card."""
    card = cached_file(MODEL, "README.md", revision=REVISION, _raise_exceptions_for_missing_entries=False)
    examples = []
    for widget in ((card and metadata_load(card)) or {}).get("widget", []):
        picture, text = widget["messages"][0]["content"]
        examples.append([cached_file(MODEL, picture["image_url"]["url"], revision=REVISION), text["text"]])
    return examples


def open_picture(path: str) -> Image.Image:
    """The picture in RGB, upright, read as in training."""
    try:
        picture = Image.open(BytesIO(Path(path).read_bytes()), formats=FORMATS)  # a path's TIFF would not be turned
        width, height = picture.size
        fits = width * height <= MAX_PIXELS and max(width, height) <= MAX_RATIO * min(width, height)
        if fits and picture.mode not in ("I", "F"):
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):  # unscaled, everything above 255 would become white
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except Exception as error:  # invalid pictures fail in many ways
        raise gr.Error(f"The picture is broken, or not one of {', '.join(FORMATS)}.") from error
    if fits:
        raise gr.Error(f"Pixels of mode {picture.mode} have no known range.")
    raise gr.Error(f"The picture has more than {MAX_PIXELS} pixels or an aspect ratio over {MAX_RATIO}.")


def prepare(model: Any, processor: Any, picture: Image.Image, question: str) -> Any:
    """A model's inputs."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    try:
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device, dtype=model.dtype)
    except ValueError as error:  # the question contains the image token
        raise gr.Error(f"The question can't be asked: {error}") from error
    asked = inputs["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # Mamba has none
    if limit is not None and asked + MAX_NEW_TOKENS > limit:
        raise gr.Error(
            f"The question is too long: {asked} tokens and {MAX_NEW_TOKENS} new ones are more than {limit}."
        )
    return inputs


def measure_without_norm(inputs: Any, picture: Image.Image, question: str) -> Measured | None:
    """Measures of the baseline; without one, of the model with its norm, if it has one, removed for one pass."""
    if baseline is not None:
        return measure(*baseline, prepare(*baseline, picture, question))
    if model.config.projector_norm == "none":
        return None
    norm = model.base_model.multi_modal_projector.norm
    with norm.register_forward_hook(lambda norm, args, output: args[0]):
        return measure(model, processor, inputs)


@torch.no_grad()
def answer(upload: dict[str, Any] | None, question: str) -> tuple[str, str]:
    """The model's greedy answer, and the figures as HTML."""
    if upload is None or not question.strip():
        raise gr.Error("A picture and a question are needed.")
    picture = open_picture(upload["path"])
    inputs = prepare(model, processor, picture, question)
    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    text = processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    measured, without_norm = measure(model, processor, inputs), measure_without_norm(inputs, picture, question)
    panels = "".join(to_svg(draw(panel, measured, without_norm)) for panel in PANELS)
    dashed = f" Dashed: {BASELINE or TAKEN_OUT}." if without_norm else ""
    return text.strip(), f'<figure class="figures">{panels}<figcaption>{CAPTION}{dashed}</figcaption></figure>'


with gr.Blocks(title=NAME) as demo:
    gr.Markdown(
        f"# {NAME}\nAsk [{MODEL}](https://huggingface.co/{MODEL}/tree/{REVISION}) about a picture. Below its answer: "
        "the norm of visual and text tokens where they enter each layer, and how far the layer turns them."
    )
    reply, figures = gr.Textbox(label="Answer", lines=4, render=False), gr.HTML(render=False)
    with gr.Row():
        with gr.Column():
            picture = gr.Image(label="Picture", height=320, elem_classes="picture")
            question = gr.Textbox(label="Question", max_lines=6, placeholder="What is in the picture?")
            ask = gr.Button("Ask", variant="primary")
        with gr.Column():
            examples = read_examples()
            shown = gr.Examples(examples, [picture, question], cache_examples=False) if examples else None
            reply.render()
    figures.render()
    # One at a time, as all use the same function. Not preprocessed: `answer` opens uploads, and reports errors.
    asked = {"fn": answer, "inputs": [picture, question], "outputs": [reply, figures], "preprocess": False}
    gr.on([ask.click, question.submit], **asked)
    if shown is not None:
        shown.load_input_event.then(**asked)
demo.queue(max_size=20)

if __name__ == "__main__":
    theme = gr.themes.Default(primary_hue="blue", font=("system-ui", "sans-serif"))
    demo.launch(max_file_size="20mb", theme=theme, css_paths=Path(__file__).with_name("style.css"))
