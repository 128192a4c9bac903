"""A page to ask the model about a picture. It also draws how the tokens change through the layers."""

import os
from typing import Any

import gradio as gr
import torch
from layers import Measured, draw, measure
from PIL import Image
from pixels import to_rgb
from transformers import AutoModelForImageTextToText, AutoProcessor


MAX_NEW_TOKENS = 256
# Options of a greedy answer. They override the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
CAPTION = (
    "Means over the question's tokens, without special tokens and attention sinks. Norm: of each layer's input and, "
    "last, of the last layer's output. Turning: between a layer's input and output. "
    "Dashed: the same weights with the norm after the projector removed; this is not a model trained without it. "
    "To run this page yourself: MODEL=<folder or owner/name> REVISION=main python app.py"
)

if "MODEL" not in os.environ or "REVISION" not in os.environ:
    raise SystemExit("Set the Space's variables MODEL and REVISION: README.md explains them.")
MODEL = os.environ["MODEL"]
REVISION = os.environ["REVISION"]
NAME = MODEL.rstrip("/").split("/")[-1]

# The model's own code is run, at this revision.
model = AutoModelForImageTextToText.from_pretrained(
    MODEL,
    revision=REVISION,
    trust_remote_code=True,
    dtype="auto",
    device_map="auto" if torch.cuda.is_available() else None,
).eval()
processor = AutoProcessor.from_pretrained(MODEL, revision=REVISION, trust_remote_code=True)


@torch.no_grad()
def answer(picture: Image.Image | None, question: str) -> tuple[str, Any]:
    """The model's greedy answer to a question, and the figure of its tokens."""
    if picture is None or not question.strip():
        raise gr.Error("A picture and a question are needed.")
    try:
        inputs = prepare(model, processor, to_rgb(picture), question)
    except ValueError as error:  # a question that contains the image token's text, for example
        raise gr.Error(f"The question can't be asked: {error}") from error

    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    text = processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    figure = draw(measure(model, processor, inputs), measure_without_norm(inputs))
    return text.strip(), figure


def prepare(model: Any, processor: Any, picture: Image.Image, question: str) -> Any:
    """A model's inputs for a picture and a question."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return inputs.to(model.device, dtype=model.dtype)


def measure_without_norm(inputs: Any) -> Measured | None:
    """Measure the model as it is without the norm after its projector; `None` if it has no such norm."""
    if model.config.projector_norm == "none":
        return None

    # The hook replaces the norm's output by its input, during this one pass.
    norm = model.base_model.multi_modal_projector.norm
    with norm.register_forward_hook(lambda norm, args, output: args[0]):
        return measure(model, processor, inputs)


with gr.Blocks(title=NAME) as demo:
    gr.Markdown(
        f"# {NAME}\nAsk [{MODEL}](https://huggingface.co/{MODEL}/tree/{REVISION}) about a picture. Below its answer: "
        "the norm of image and text tokens where they enter each layer, and how far the layer turns them."
    )
    with gr.Row():
        picture = gr.Image(label="Picture", type="pil", image_mode=None, height=320)
        with gr.Column():
            question = gr.Textbox(label="Question", max_lines=6, placeholder="What is in the picture?")
            ask = gr.Button("Ask", variant="primary")
            reply = gr.Textbox(label="Answer", lines=4)
    figure = gr.Plot(show_label=False)
    gr.Markdown(CAPTION)
    gr.on([ask.click, question.submit], answer, [picture, question], [reply, figure])
demo.queue(max_size=20)

if __name__ == "__main__":
    demo.launch(max_file_size="20mb")
