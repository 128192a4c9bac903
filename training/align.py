"""The aligned start: visual tokens learn to point at the language model's own embeddings of the captions.

The projector learns that a picture's tokens point at the mean embedding of its own caption, and not at the other
captions of the batch (InfoNCE on cosines). Only directions count: tokens are compared at the text's norm, the norm
stays as it is, and without one the projector is scaled back. The language model does not run, so this takes minutes.
The paper (arXiv 2512.08374) has no such step; docs/compose.md names what is near to it.
"""

import math
from collections import Counter

import torch
from datasets import Dataset
from torch import nn
from tqdm import tqdm
from transformers import LlavaProcessor, get_scheduler, set_seed

from conversations.pictures import open_images
from conversations.rows import BadRowError, check_row, row_turns
from diagnostics.hooks import InterfaceHooks
from modeling_normllava import NormLlavaForConditionalGeneration


# Pictures whose features are kept: 36 tokens of 384 numbers take 27 kB a picture, SigLIP's 729 of 1,152 take 1.7 MB.
MAX_PICTURES = 8192
STEPS, BATCH_SIZE, LEARNING_RATE = 600, 256, 1e-3
# What cosines are divided by, for the mean of a picture's tokens and for each token, and the weight of the latter.
PICTURE_TEMPERATURE, TOKEN_TEMPERATURE, TOKEN_WEIGHT = 0.05, 0.1, 0.3
ENCODER_BATCH = 64


@torch.no_grad()
def encode_pictures(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset
) -> torch.Tensor:
    """What the projector gets for each row's picture: `(num_rows, num_patches, vision_hidden_size)`, float16. Raises
    `BadRowError` for a row without one readable picture and a caption."""
    found: list[torch.Tensor] = []
    with InterfaceHooks(model, lambda at, of: found.append(of.cpu().half()) if at == "projector_input" else None):
        for start in tqdm(range(0, len(rows), ENCODER_BATCH), desc="Encoding pictures"):
            pictures = []
            for row in rows.select(range(start, min(start + ENCODER_BATCH, len(rows)))):
                check_row(row)
                of_row = open_images(row)
                if len(of_row) != 1:
                    raise BadRowError(row["source"], f"{len(of_row)} pictures; aligning needs one with its caption")
                pictures += of_row
            inputs = processor.image_processor(pictures, return_tensors="pt").to(model.device, model.dtype)
            model.model.get_image_features(inputs["pixel_values"])
    return torch.cat(found)


@torch.no_grad()
def embed_captions(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, captions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction for each caption, `(num_captions, hidden_size)`, and the vocabulary's mean, `(hidden_size,)`.

    A caption points where its content words do: the mean is taken off each token, and tokens are weighted by their
    inverse document frequency, so that those of many captions hardly count. The mean is in units of the text's norm.
    """
    embed, device = model.get_input_embeddings(), model.device
    vocabulary = embed(torch.arange(len(processor.tokenizer), device=device)).float()
    mean = vocabulary.mean(dim=0)  # [hidden_size]
    # After a space, as inside a sentence.
    tokens = [processor.tokenizer(f" {caption}", add_special_tokens=False).input_ids for caption in captions]
    counts, directions = Counter(token for ids in tokens for token in set(ids)), []
    for ids in tokens:
        weights = torch.tensor([math.log((1 + len(captions)) / counts[token]) for token in ids], device=device)
        directions.append(weights @ (embed(torch.tensor(ids, device=device)).float() - mean))
    return nn.functional.normalize(torch.stack(directions), dim=-1), mean / vocabulary.norm(dim=-1).mean()


def align(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset, seed: int, steps: int = STEPS
) -> None:
    """Train the projector in place, on `MAX_PICTURES` rows drawn at random. Raises `BadRowError` for a row
    without one picture and a caption."""
    set_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    rows = rows.shuffle(seed=seed).select(range(min(MAX_PICTURES, len(rows))))
    features = encode_pictures(model, processor, rows)
    turns = (row_turns(row) for row in rows)
    of_row = [next(filter(None, (turn["value"].strip() for turn in of if turn["from"] == "gpt"))) for of in turns]
    captions = {caption: number for number, caption in enumerate(dict.fromkeys(of_row))}
    caption_ids = torch.tensor([captions[caption] for caption in of_row])
    directions, mean = embed_captions(model, processor, list(captions))
    projector = model.model.multi_modal_projector.float()
    parameters = [*projector.linear_1.parameters(), *projector.linear_2.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=20, num_training_steps=steps)

    @torch.no_grad()
    def length() -> float:
        return projector(features[:BATCH_SIZE].to(device).float()).norm(dim=-1).mean().item()

    before = length()
    progress = tqdm(range(steps), desc="Aligning")
    for _ in progress:
        chosen = torch.randint(len(features), (BATCH_SIZE,))
        # Rows with the same caption are no negatives of each other.
        present, target = (ids.to(device) for ids in caption_ids[chosen].unique(return_inverse=True))
        tokens = nn.functional.normalize(projector(features[chosen].to(device).float()), dim=-1) - mean
        of_picture = nn.functional.normalize(tokens.mean(dim=1), dim=-1) @ directions[present].T / PICTURE_TEMPERATURE
        of_token = nn.functional.normalize(tokens, dim=-1) @ directions[present].T / TOKEN_TEMPERATURE
        loss = nn.functional.cross_entropy(of_picture, target) + TOKEN_WEIGHT * nn.functional.cross_entropy(
            of_token.flatten(0, 1), target.repeat_interleave(of_token.shape[1])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.2f}")
    if model.config.projector_norm == "none":
        scale = before / length()
        for parameter in projector.linear_2.parameters():
            parameter.data *= scale
    model.config.projector_aligned = True
    model.to("cpu", model.config.dtype)
