"""A web page on which users ask the model about a picture. It also shows how the layers change the tokens.

`layers.py` and `pixels.py` lie beside this file on the Space.
"""

import os
from typing import Any

import gradio as gr
import torch
from layers import LayerMeans, draw_layers, measure_tokens
from PIL import Image
from pixels import to_rgb
from transformers import AutoModelForImageTextToText, AutoProcessor


MAX_NEW_TOKENS = 256
# Options of `generate` for a greedy answer. The model's generation config may set penalties, which these override.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# The text below the figure.
CAPTION = (
    "Means over the question's tokens, without special tokens and attention sinks. Norm: of each layer's input and, "
    "last, of the last layer's output. Turning: between a layer's input and output. "
    "Dashed: the same weights without the norm layer after the projector; this is not a model trained without it. "
    "To run this page yourself: MODEL=<folder or owner/name> REVISION=main python app.py"
)

if "MODEL" not in os.environ or "REVISION" not in os.environ:
    raise SystemExit("Set the Space's variables MODEL and REVISION: README.md explains them.")
MODEL = os.environ["MODEL"]
REVISION = os.environ["REVISION"]
# The name of the repository without its owner, or the name of the folder.
NAME = MODEL.rstrip("/").split("/")[-1]

# The model's own code is run, at this revision.
device_map = "auto" if torch.cuda.is_available() else None
model = AutoModelForImageTextToText.from_pretrained(
    MODEL,
    revision=REVISION,
    trust_remote_code=True,
    dtype="auto",
    device_map=device_map,
).eval()
processor = AutoProcessor.from_pretrained(MODEL, revision=REVISION, trust_remote_code=True)


@torch.no_grad()
def answer(picture: Image.Image | None, question: str) -> tuple[str, Any]:
    """The model's greedy answer to a question about a picture, and the figure of the question's tokens."""
    if picture is None or not question.strip():
        raise gr.Error("A picture and a question are needed.")
    try:
        inputs = prepare_inputs(model, processor, to_rgb(picture), question)
    except ValueError as error:  # the question contains the text of the image token, for example
        raise gr.Error(f"The question can't be asked: {error}") from error

    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    text = processor.decode(generated[0, num_prompt_tokens:], skip_special_tokens=True)

    means = measure_tokens(model, processor, inputs)
    means_without_norm_layer = measure_without_norm_layer(inputs)
    return text.strip(), draw_layers(means, means_without_norm_layer)


def prepare_inputs(model: Any, processor: Any, picture: Image.Image, question: str) -> Any:
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


def measure_without_norm_layer(inputs: Any) -> LayerMeans | None:
    """Measure the layers without the norm layer after the projector; `None` if the model has no such norm layer."""
    if model.config.projector_norm == "none":
        return None

    # As long as the `with` lasts, the hook replaces the norm layer's output by its input.
    norm_layer = model.base_model.multi_modal_projector.norm
    with norm_layer.register_forward_hook(lambda module, args, output: args[0]):
        return measure_tokens(model, processor, inputs)


with gr.Blocks(title=NAME) as demo:
    gr.Markdown(
        f"# {NAME}\nAsk [{MODEL}](https://huggingface.co/{MODEL}/tree/{REVISION}) about a picture. Below its answer: "
        "the norm of image and text tokens where they enter each layer, and how far the layer turns them."
    )
    with gr.Row():
        picture_input = gr.Image(label="Picture", type="pil", image_mode=None, height=320)
        with gr.Column():
            question_box = gr.Textbox(label="Question", max_lines=6, placeholder="What is in the picture?")
            ask_button = gr.Button("Ask", variant="primary")
            answer_box = gr.Textbox(label="Answer", lines=4)
    plot = gr.Plot(show_label=False)
    gr.Markdown(CAPTION)
    gr.on(
        triggers=[ask_button.click, question_box.submit],
        fn=answer,
        inputs=[picture_input, question_box],
        outputs=[answer_box, plot],
    )
demo.queue(max_size=20)

if __name__ == "__main__":
    demo.launch(max_file_size="20mb")
