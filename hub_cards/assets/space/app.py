"""A web page on which users ask the model about a picture, and see how sure the model is of each word of its answer.

`words.py` and `pixels.py` lie beside this file on the Space, and with a release that has examples `examples.json`.
"""

import json
import os
from pathlib import Path
from typing import Any


try:
    # On ZeroGPU, a GPU is lent to the functions that `spaces.GPU` decorates. `spaces` has to be imported before torch.
    import spaces
except ImportError:  # not on ZeroGPU
    spaces = None

import gradio as gr
import torch
from PIL import Image
from pixels import to_rgb
from transformers import AutoModelForImageTextToText, AutoProcessor
from words import Word, draw_words, score_words


MAX_NEW_TOKENS = 256
# Options of a greedy answer. They override the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# The text below the figure.
CAPTION = (
    "How sure the model is of each word of its answer, with your picture and with a grey one in its place. Where the "
    "bars are alike, the model says the word of a grey picture too."
)

if "MODEL" not in os.environ or "REVISION" not in os.environ:
    raise SystemExit("Set the Space's variables MODEL and REVISION: README.md explains them.")
MODEL = os.environ["MODEL"]
REVISION = os.environ["REVISION"]
# The release's examples, if it has some: a picture's file and a question each.
EXAMPLES = Path(__file__).with_name("examples.json")
# The name of the repository without its owner, or the name of the model's folder.
NAME = MODEL.rstrip("/").split("/")[-1]

# `trust_remote_code` runs the model's own code, at this revision. A plain Llava has no code.
model = AutoModelForImageTextToText.from_pretrained(
    MODEL,
    revision=REVISION,
    trust_remote_code=True,
    dtype="auto",
).eval()
processor = AutoProcessor.from_pretrained(MODEL, revision=REVISION, trust_remote_code=True)

# ZeroGPU wants the model on "cuda" from the start, before a GPU is lent.
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)


def answer(picture: Image.Image | None, question: str) -> tuple[str, Any]:
    """The model's greedy answer to a question about a picture, and the figure of the answer's words.

    What can't be asked gets a text that says so, and no figure.
    """
    if picture is None or not question.strip():
        return "Give a picture and a question.", None
    try:
        picture = to_rgb(picture)
    except OSError as error:  # the values of its pixels have no known range, for example
        return f"The picture can't be read: {error}", None

    grey_picture = Image.new("RGB", picture.size, (128, 128, 128))
    try:
        inputs = encode_question(picture, question)
        grey_inputs = encode_question(grey_picture, question)
    except ValueError as error:  # the question contains the text of the image token, for example
        return f"The question can't be asked: {error}", None

    text, words = run_model(inputs, grey_inputs)
    return text, draw_words(words)


def encode_question(picture: Image.Image, question: str) -> Any:
    """The model's inputs for a question about a picture, not yet on the model's device."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


@torch.no_grad()
def run_model(inputs: Any, grey_inputs: Any) -> tuple[str, list[Word]]:
    """The model's greedy answer, and the answer's words. All work of the GPU is done here."""
    inputs = inputs.to(device, dtype=model.dtype)
    grey_inputs = grey_inputs.to(device, dtype=model.dtype)
    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    answer_ids = generated[0, num_prompt_tokens:]

    text = processor.decode(answer_ids, skip_special_tokens=True)
    words = score_words(model, processor.tokenizer, inputs, grey_inputs, answer_ids)
    return text.strip(), words


if spaces is not None:
    run_model = spaces.GPU(run_model)


with gr.Blocks(title=NAME) as demo:
    gr.Markdown(f"# {NAME}\nAsk [{MODEL}](https://huggingface.co/{MODEL}/tree/{REVISION}) about a picture.")
    with gr.Row():
        # `image_mode=None` keeps transparency, which `to_rgb` makes white.
        picture_input = gr.Image(label="Picture", type="pil", image_mode=None, height=320)
        with gr.Column():
            question_box = gr.Textbox(label="Question", max_lines=6, placeholder="What is in the picture?")
            ask_button = gr.Button("Ask", variant="primary")
            answer_box = gr.Textbox(label="Answer", lines=4)
    plot = gr.Plot(show_label=False)
    gr.Markdown(CAPTION)
    if EXAMPLES.exists():
        rows = json.loads(EXAMPLES.read_text(encoding="utf-8"))
        examples = [[str(EXAMPLES.parent / row["picture"]), row["question"]] for row in rows]
        gr.Examples(examples, inputs=[picture_input, question_box])
    gr.on(
        triggers=[ask_button.click, question_box.submit],
        fn=answer,
        inputs=[picture_input, question_box],
        outputs=[answer_box, plot],
    )
demo.queue(max_size=20)  # at most 20 questions wait

if __name__ == "__main__":
    demo.launch(max_file_size="20mb")
