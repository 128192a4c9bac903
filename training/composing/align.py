"""Aligns a new projector: turns image tokens towards the language model's own embeddings of their captions.

A contrastive loss (InfoNCE on cosines) trains the projector. The loss turns the image tokens of a picture towards the
embeddings of the picture's caption, and away from the other captions of the batch. Only directions are trained: the
loss first scales each image token to the mean norm of text embeddings, and the projector's norm layer is frozen. A
projector without a norm layer is scaled afterwards so that image tokens have the norm that they had before. The
language model does not run, so that training takes minutes. The paper (arXiv 2512.08374) has no such step;
docs/compose.md names related work.
"""

import math
from collections import Counter

import torch
from datasets import Dataset
from PIL import Image
from torch import nn
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration, LlavaProcessor, get_scheduler, set_seed

from normllava.conversations.pictures import open_images
from normllava.conversations.rows import BadRowError, Row, check_row, row_turns
from normllava.conversations.tiles import tile_options
from normllava.hooks import InterfaceHooks
from normllava.norms import token_norms
from normllava.parts import find_projector_norm


# The most pictures to train on. The encoder's features of all pictures are kept in memory, in float16: a picture with
# 36 features of width 384 takes 27 kB, and a picture with SigLIP's 729 features of width 1,152 takes 1.7 MB.
MAX_PICTURES = 8192
STEPS = 600
WARMUP_STEPS = 20
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
# The loss is a sum of two terms: one for the mean of a picture's image tokens, one for single image tokens. Each term
# divides its cosines by a temperature of its own.
PICTURE_TEMPERATURE = 0.05
TOKEN_TEMPERATURE = 0.1
# The weight of the term for single tokens. The term for the mean has the weight 1.
TOKEN_WEIGHT = 0.3
# The number of pictures that the vision encoder takes at once.
ENCODER_BATCH = 64


def align(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset, seed: int, steps: int = STEPS
) -> None:
    """Train the projector in place, on up to `MAX_PICTURES` rows drawn at random.

    Raises:
        BadRowError: if a row has no caption, or not exactly one readable picture.
    """
    set_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()

    num_rows = min(MAX_PICTURES, len(rows))
    rows = rows.shuffle(seed=seed).select(range(num_rows))
    features = encode_pictures(model, processor, rows)
    captions = [first_answer(row) for row in rows]

    # Rows with the same caption share an id. Otherwise the loss would turn their pictures away from the other row's
    # caption, which is also their own.
    unique_captions = list(dict.fromkeys(captions))
    id_by_caption = {caption: number for number, caption in enumerate(unique_captions)}
    caption_ids = torch.tensor([id_by_caption[caption] for caption in captions])  # [num_rows]
    directions, vocabulary_mean = embed_captions(model, processor, unique_captions)

    # Only the projector is trained, in float32. Each of its parameters then gets its own dtype back.
    projector = model.model.multi_modal_projector
    dtypes = {parameter: parameter.dtype for parameter in projector.parameters()}
    projector.float()
    some_features = features[:BATCH_SIZE].to(device).float()
    # The norm of image tokens. Without a norm layer, they are scaled back to this norm after training.
    norm_before = mean_norm(projector, some_features)

    parameters = [*projector.linear_1.parameters(), *projector.linear_2.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP_STEPS, num_training_steps=steps)

    progress = tqdm(range(steps), desc="Aligning")
    for _ in progress:
        row_indices = torch.randint(len(features), (BATCH_SIZE,))
        image_tokens = projector(features[row_indices].to(device).float())

        # The ids of the batch's different captions, and for each row the index of its caption's id among these ids.
        batch_caption_ids, targets = caption_ids[row_indices].unique(return_inverse=True)
        batch_directions = directions[batch_caption_ids.to(device)]
        loss = contrastive_loss(image_tokens, vocabulary_mean, batch_directions, targets.to(device))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.2f}")

    if find_projector_norm(model) is None:
        scale = norm_before / mean_norm(projector, some_features)
        # Without a norm layer, the projector ends with linear_2, so that its weight and its bias scale the output.
        for parameter in projector.linear_2.parameters():
            parameter.data *= scale
    for parameter, dtype in dtypes.items():
        parameter.data = parameter.data.to(dtype)
    model.to("cpu")


@torch.no_grad()
def encode_pictures(model: LlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset) -> torch.Tensor:
    """The projector's input for the picture of each row: `(num_rows, num_patches, vision_hidden_size)`, float16.

    Raises:
        BadRowError: if a row is malformed, or has not exactly one readable picture.
    """
    batches: list[torch.Tensor] = []

    # The hooks call this function at several places of the model.
    def keep_features(place: str, features: torch.Tensor) -> None:
        if place == "projector_input":
            batches.append(features.cpu().half())

    # A caption describes a whole picture, so pictures aren't cut into tiles here.
    uncut = tile_options(processor.image_processor, max_tiles=1)
    with InterfaceHooks(model, keep_features):
        for start in tqdm(range(0, len(rows), ENCODER_BATCH), desc="Encoding pictures"):
            end = min(start + ENCODER_BATCH, len(rows))
            pictures = [only_picture(row) for row in rows.select(range(start, end))]
            pixel_values = processor.image_processor(pictures, return_tensors="pt", **uncut)["pixel_values"]
            model.model.get_image_features(pixel_values.to(model.device, model.dtype))
    return torch.cat(batches)


def only_picture(row: Row) -> Image.Image:
    """The one picture of a row.

    Raises:
        BadRowError: if the row is malformed, or has not exactly one readable picture.
    """
    check_row(row)
    pictures = open_images(row)
    if len(pictures) != 1:
        raise BadRowError(row["source"], f"{len(pictures)} pictures; aligning needs one with its caption")
    return pictures[0]


def first_answer(row: Row) -> str:
    """The first answer of the assistant that isn't blank, without the white space around it.

    Raises:
        BadRowError: if the row has no such answer.
    """
    for turn in row_turns(row):
        answer = turn["value"].strip()
        if turn["from"] == "gpt" and answer:
            return answer
    raise BadRowError(row["source"], "no caption; aligning needs an answer")


@torch.no_grad()
def embed_captions(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, captions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction for each caption, and the mean embedding of the vocabulary.

    The vocabulary's mean embedding is subtracted from the embedding of each of a caption's tokens. The caption's
    direction is that of a weighted sum of these differences. The weights are inverse document frequencies: a token
    that most captions have hardly counts, so that content words decide the direction.

    Returns:
        The directions as vectors of L2 norm 1, `(num_captions, hidden_size)`, and the vocabulary's mean embedding in
        units of the mean L2 norm of the vocabulary's embeddings, `(hidden_size,)`.
    """
    embed = model.get_input_embeddings()
    device = model.device
    all_ids = torch.arange(len(processor.tokenizer), device=device)
    vocabulary = embed(all_ids).float()  # [vocabulary_size, hidden_size]
    vocabulary_mean = vocabulary.mean(dim=0)  # [hidden_size]

    # The space makes the tokenizer treat a caption's first word like a word inside a sentence.
    texts = [f" {caption}" for caption in captions]
    tokens_by_caption = processor.tokenizer(texts, add_special_tokens=False).input_ids
    num_captions_with: Counter[int] = Counter()  # for each token, the number of captions that have it
    for tokens in tokens_by_caption:
        num_captions_with.update(set(tokens))

    sums = []
    for tokens in tokens_by_caption:
        # With the added 1, even a token that all captions have gets a weight above 0.
        weights = [math.log((1 + len(captions)) / num_captions_with[token]) for token in tokens]  # [num_tokens]
        embeddings = embed(torch.tensor(tokens, device=device)).float()  # [num_tokens, hidden_size]
        differences = embeddings - vocabulary_mean
        sums.append(torch.tensor(weights, device=device) @ differences)  # [hidden_size]
    directions = nn.functional.normalize(torch.stack(sums), dim=-1)  # [num_captions, hidden_size]

    mean_of_norms = vocabulary.norm(dim=-1).mean()
    return directions, vocabulary_mean / mean_of_norms


def contrastive_loss(
    image_tokens: torch.Tensor, vocabulary_mean: torch.Tensor, directions: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The InfoNCE loss of pictures and captions, on cosines.

    The loss is a sum of two terms: one compares the mean of a picture's tokens with the captions, the other compares
    each single token with the captions.

    Args:
        image_tokens: `(num_pictures, num_patches, hidden_size)`.
        vocabulary_mean: The vocabulary's mean embedding, as [`embed_captions`] returns it, `(hidden_size,)`.
        directions: The directions of the batch's captions, `(num_captions, hidden_size)`.
        targets: The index of each picture's caption in `directions`, `(num_pictures,)`.
    """
    # Image tokens are scaled to the mean norm of text embeddings, which is 1 in the units of `vocabulary_mean`. Then
    # this mean is subtracted, as `embed_captions` subtracts it from the captions' tokens.
    tokens = nn.functional.normalize(image_tokens, dim=-1) - vocabulary_mean
    pictures = tokens.mean(dim=1)  # [num_pictures, hidden_size]

    picture_cosines = nn.functional.normalize(pictures, dim=-1) @ directions.T  # [num_pictures, num_captions]
    picture_loss = nn.functional.cross_entropy(picture_cosines / PICTURE_TEMPERATURE, targets)

    token_cosines = nn.functional.normalize(tokens, dim=-1) @ directions.T  # [num_pictures, num_patches, num_captions]
    token_targets = targets.repeat_interleave(tokens.shape[1])  # [num_pictures * num_patches]
    token_loss = nn.functional.cross_entropy(token_cosines.flatten(0, 1) / TOKEN_TEMPERATURE, token_targets)
    return picture_loss + TOKEN_WEIGHT * token_loss


@torch.no_grad()
def mean_norm(projector: nn.Module, features: torch.Tensor) -> float:
    """Mean L2 norm of the projector's output for features `(num_pictures, num_patches, vision_hidden_size)`."""
    return token_norms(projector(features)).mean().item()
