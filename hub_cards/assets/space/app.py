"""Ask the model about a picture, and see how long visual and text tokens are at each layer while it answers."""

import os
from typing import Any

import gradio as gr
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


REPOSITORY, REVISION = os.environ["MODEL"], os.environ["REVISION"]
model = AutoModelForImageTextToText.from_pretrained(
    REPOSITORY,
    revision=REVISION,
    trust_remote_code=True,
    dtype="auto",
    device_map="auto" if torch.cuda.is_available() else None,
).eval()
processor = AutoProcessor.from_pretrained(REPOSITORY, revision=REVISION, trust_remote_code=True)


@torch.no_grad()
def norms_by_layer(inputs: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Mean norm of visual and of text tokens that enter each layer of the decoder, special tokens left out."""
    ids = inputs["input_ids"][0]
    visual = ids == model.config.image_token_id
    special = torch.isin(ids, torch.tensor(processor.tokenizer.all_special_ids, device=ids.device))
    masks = {"visual": visual, "text": ~visual & ~special}
    norms: dict[str, list[float]] = {name: [] for name in masks}

    def see(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = (args[0] if args else kwargs["hidden_states"])[0].float().norm(dim=-1)
        for name, mask in masks.items():
            norms[name].append(states[mask].mean().item())

    hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in model.get_decoder().layers]
    try:
        model.base_model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return norms


def draw(norms: dict[str, list[float]]) -> Figure:
    """The plot beside the answer."""
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for name, colour in (("visual", "tab:orange"), ("text", "tab:blue")):
        axis.plot(norms[name], marker="o", color=colour, label=name)
    axis.set(yscale="log", xlabel="enters layer", ylabel="mean norm of tokens")
    axis.legend()
    plt.close(figure)
    return figure


@torch.no_grad()
def answer(picture: Image.Image | None, question: str) -> tuple[str, Figure | None]:
    """The answer and its plot."""
    if picture is None or not question.strip():
        return "A picture and a question are needed.", None
    content = [{"type": "image", "image": picture.convert("RGB")}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device, dtype=model.dtype)
    generated = model.generate(**inputs, max_new_tokens=256, do_sample=False)
    text = processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip(), draw(norms_by_layer(dict(inputs)))


demo = gr.Interface(
    answer,
    [gr.Image(type="pil", label="Picture"), gr.Textbox(label="Question")],
    [gr.Textbox(label="Answer"), gr.Plot(label="Norm of visual and text tokens")],
    title=REPOSITORY,
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
