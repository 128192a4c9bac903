"""The aligned start: image tokens learn to point at the language model's own embeddings of the captions.

The projector learns that a picture's tokens point at the mean embedding of its own caption, and not at the other
captions of the batch (InfoNCE on cosines). Only directions count: tokens are compared at the text's norm, the norm
stays as it is, and without one the projector is scaled back. The language model does not run, so this takes minutes.
The paper (arXiv 2512.08374) has no such step; docs/compose.md names what is near to it.
"""

import math
from collections import Counter

import torch
from datasets import Dataset
from PIL import Image
from torch import nn
from tqdm import tqdm
from transformers import LlavaProcessor, get_scheduler, set_seed

from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, row_turns
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import token_norms
from modeling_normllava import NormLlavaForConditionalGeneration


# Pictures whose features are kept: 36 tokens of 384 numbers take 27 kB a picture, SigLIP's 729 of 1,152 take 1.7 MB.
MAX_PICTURES = 8192
STEPS = 600
WARMUP_STEPS = 20
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
# What cosines are divided by, for the mean of a picture's tokens and for each token, and the weight of the latter.
PICTURE_TEMPERATURE = 0.05
TOKEN_TEMPERATURE = 0.1
TOKEN_WEIGHT = 0.3
# Pictures that the vision encoder takes at once.
ENCODER_BATCH = 64


def align(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset, seed: int, steps: int = STEPS
) -> None:
    """Train the projector in place, on `MAX_PICTURES` rows drawn at random.

    Raises:
        BadRowError: for a row without one picture and a caption.
    """
    set_seed(seed)
    dtype = model.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()

    rows = rows.shuffle(seed=seed).select(range(min(MAX_PICTURES, len(rows))))
    features = encode_pictures(model, processor, rows)
    captions = [first_answer(row) for row in rows]
    # Rows with the same caption share a number, so that they are no negatives of each other.
    numbers = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    caption_ids = torch.tensor([numbers[caption] for caption in captions])
    directions, mean = embed_captions(model, processor, list(numbers))

    projector = model.model.multi_modal_projector.float()
    some_features = features[:BATCH_SIZE].to(device).float()
    norm_before = mean_norm(projector, some_features)
    parameters = [*projector.linear_1.parameters(), *projector.linear_2.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP_STEPS, num_training_steps=steps)

    progress = tqdm(range(steps), desc="Aligning")
    for _ in progress:
        chosen = torch.randint(len(features), (BATCH_SIZE,))
        present, targets = caption_ids[chosen].unique(return_inverse=True)
        image_tokens = projector(features[chosen].to(device).float())
        loss = contrastive_loss(image_tokens, mean, directions[present.to(device)], targets.to(device))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.2f}")

    if model.config.projector_norm == "none":
        scale = norm_before / mean_norm(projector, some_features)
        for parameter in projector.linear_2.parameters():
            parameter.data *= scale
    model.config.projector_aligned = True
    model.to("cpu", dtype)


@torch.no_grad()
def encode_pictures(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset
) -> torch.Tensor:
    """What the projector gets for each row's picture: `(num_rows, num_patches, vision_hidden_size)`, float16.

    Raises:
        BadRowError: for a row without one readable picture and a caption.
    """
    batches: list[torch.Tensor] = []

    def keep_features(place: str, features: torch.Tensor) -> None:
        if place == "projector_input":
            batches.append(features.cpu().half())

    with InterfaceHooks(model, keep_features):
        for start in tqdm(range(0, len(rows), ENCODER_BATCH), desc="Encoding pictures"):
            end = min(start + ENCODER_BATCH, len(rows))
            pictures = [only_picture(row) for row in rows.select(range(start, end))]
            inputs = processor.image_processor(pictures, return_tensors="pt").to(model.device, model.dtype)
            model.model.get_image_features(inputs["pixel_values"])
    return torch.cat(batches)


def only_picture(row: Row) -> Image.Image:
    """The one picture of a row.

    Raises:
        BadRowError: if the row is a bad one, or has not one readable picture.
    """
    check_row(row)
    pictures = open_images(row)
    if len(pictures) != 1:
        raise BadRowError(row["source"], f"{len(pictures)} pictures; aligning needs one with its caption")
    return pictures[0]


def first_answer(row: Row) -> str:
    """The first thing that the assistant says in a row, without white space around it.

    Raises:
        BadRowError: if it says nothing.
    """
    for turn in row_turns(row):
        answer = turn["value"].strip()
        if turn["from"] == "gpt" and answer:
            return answer
    raise BadRowError(row["source"], "no caption; aligning needs an answer")


@torch.no_grad()
def embed_captions(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, captions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction for each caption, `(num_captions, hidden_size)`, and the vocabulary's mean, `(hidden_size,)`.

    A caption points where its content words do: the mean is taken off each token, and tokens are weighted by their
    inverse document frequency, so that those of many captions hardly count. The mean is in units of the text's norm.
    """
    embed = model.get_input_embeddings()
    device = model.device
    vocabulary = embed(torch.arange(len(processor.tokenizer), device=device)).float()
    mean = vocabulary.mean(dim=0)  # [hidden_size]

    # After a space, as inside a sentence.
    ids_of_captions = [processor.tokenizer(f" {caption}", add_special_tokens=False).input_ids for caption in captions]
    num_captions_with = Counter(token for ids in ids_of_captions for token in set(ids))

    directions = []
    for ids in ids_of_captions:
        weights = [math.log((1 + len(captions)) / num_captions_with[token]) for token in ids]
        embeddings = embed(torch.tensor(ids, device=device)).float()  # [num_tokens, hidden_size]
        directions.append(torch.tensor(weights, device=device) @ (embeddings - mean))
    return nn.functional.normalize(torch.stack(directions), dim=-1), mean / vocabulary.norm(dim=-1).mean()


def contrastive_loss(
    image_tokens: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """InfoNCE of pictures and captions on cosines: of each picture's mean token, and of each of its tokens.

    Args:
        image_tokens: `(num_pictures, num_patches, hidden_size)`.
        mean: The vocabulary's, in units of the text's norm, `(hidden_size,)`.
        directions: Of the batch's captions, `(num_captions, hidden_size)`.
        targets: Each picture's caption, `(num_pictures,)`.
    """
    tokens = nn.functional.normalize(image_tokens, dim=-1) - mean
    pictures = tokens.mean(dim=1)

    picture_cosines = nn.functional.normalize(pictures, dim=-1) @ directions.T  # [num_pictures, num_captions]
    picture_loss = nn.functional.cross_entropy(picture_cosines / PICTURE_TEMPERATURE, targets)

    token_cosines = nn.functional.normalize(tokens, dim=-1) @ directions.T  # [num_pictures, num_patches, num_captions]
    token_targets = targets.repeat_interleave(tokens.shape[1])
    token_loss = nn.functional.cross_entropy(token_cosines.flatten(0, 1) / TOKEN_TEMPERATURE, token_targets)
    return picture_loss + TOKEN_WEIGHT * token_loss


@torch.no_grad()
def mean_norm(projector: nn.Module, features: torch.Tensor) -> float:
    """Mean L2 norm of what the projector makes of features `(num_pictures, num_patches, vision_hidden_size)`."""
    return token_norms(projector(features)).mean().item()
