"""Point a composed model's visual tokens at the language model's own embeddings of the captions.

    python training/align.py --model_name_or_path runs/composed --dataset_name captions.json --output_dir runs/aligned

An optional start before stage 1 or 2. It takes minutes, since the language model does not run: the projector learns
that a picture's tokens point at the mean embedding of its own caption, and not at the other captions of the batch
(InfoNCE on cosines). Only directions count: the norm stays as it is, and without one the projector is scaled back, so
visual tokens keep the length that they had.

The paper (arXiv 2512.08374) has no such step. SEA (arXiv 2408.11813) and patch-aligned training (arXiv 2505.17316)
also supervise visual tokens by text embeddings, patch by patch with labels from CLIP or masks.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from tqdm import tqdm
from transformers import AutoProcessor, HfArgumentParser, LlavaProcessor, get_scheduler, set_seed

from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, row_turns
from diagnostics.hooks import InterfaceHooks
from modeling_normllava import NormLlavaForConditionalGeneration
from training.model_type import require_model_type


logger = logging.getLogger(__name__)

# What cosines are divided by, for the mean of a picture's tokens and for each token, and the weight of the latter.
PICTURE_TEMPERATURE, TOKEN_TEMPERATURE, TOKEN_WEIGHT = 0.05, 0.1, 0.3
ENCODER_BATCH = 64


@dataclass
class AlignArguments:
    """The command line."""

    model_name_or_path: str = field(metadata={"help": "A composed NormLlava: folder or Hub id."})
    dataset_name: str = field(metadata={"help": "Rows of one picture with its caption, as for stage 1."})
    output_dir: str = field(metadata={"help": "Folder to write; must be empty or not exist yet."})
    image_folder: str | None = field(default=None, metadata={"help": "Prefix of the image paths in a JSON file."})
    max_samples: int = field(default=8192, metadata={"help": "Rows to draw; their features are kept in memory."})
    max_steps: int = field(default=600, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=256, metadata={"help": "Pictures a step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "AdamW's, with a linear decay."})
    seed: int = field(default=42, metadata={"help": "Seed of the rows and their order."})


@torch.no_grad()
def encode_pictures(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset
) -> torch.Tensor:
    """What the projector gets for each row's picture: `(num_rows, num_patches, vision_hidden_size)`, float16.

    Raises:
        BadRowError: if a row has no picture or several, or one that can't be read.
    """
    features: dict[str, list[torch.Tensor]] = {}
    with InterfaceHooks(model, lambda place, states: features.setdefault(place, []).append(states.to("cpu").half())):
        for start in tqdm(range(0, len(rows), ENCODER_BATCH), desc="Encoding pictures"):
            pictures = []
            for row in rows.select(range(start, min(start + ENCODER_BATCH, len(rows)))):
                of_row = open_images(row)
                if len(of_row) != 1:
                    raise BadRowError(f"{row['source']}: {len(of_row)} pictures; aligning needs one with its caption.")
                pictures += of_row
            inputs = processor.image_processor(pictures, return_tensors="pt").to(model.device, model.dtype)
            model.model.get_image_features(inputs["pixel_values"])
    return torch.cat(features["projector_input"])


@torch.no_grad()
def embed_captions(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, captions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction for each caption, `(num_captions, hidden_size)`, and the vocabulary's mean, `(hidden_size,)`.

    A caption points where its content words do: the mean is taken off each token, and tokens are weighted by their
    inverse document frequency, so that those of many captions hardly count.
    """
    embed, device = model.get_input_embeddings(), model.device
    mean = embed(torch.arange(len(processor.tokenizer), device=device)).float().mean(dim=0)
    # After a space, as inside a sentence.
    tokens = [processor.tokenizer(f" {caption}", add_special_tokens=False).input_ids for caption in captions]
    counts = Counter(token for ids in tokens for token in set(ids))
    directions = []
    for ids in tokens:
        weights = torch.tensor([math.log((1 + len(captions)) / counts[token]) for token in ids], device=device)
        directions.append(weights @ (embed(torch.tensor(ids, device=device)).float() - mean))
    return nn.functional.normalize(torch.stack(directions), dim=-1), mean


@torch.no_grad()
def mean_length(projector: nn.Module, features: torch.Tensor, device: torch.device) -> float:
    """Mean L2 norm of the visual tokens of the first pictures."""
    return projector(features[:256].to(device).float()).norm(dim=-1).mean().item()


def align(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset, args: AlignArguments
) -> None:
    """Train the projector in place. Raises `BadRowError` as `encode_pictures` does."""
    features, device = encode_pictures(model.eval(), processor, rows), model.device
    of_row = [next(turn["value"].strip() for turn in row_turns(row) if turn["from"] == "gpt") for row in rows]
    captions = {caption: number for number, caption in enumerate(dict.fromkeys(of_row))}
    caption_ids = torch.tensor([captions[caption] for caption in of_row])
    directions, mean = embed_captions(model, processor, list(captions))
    projector = model.model.multi_modal_projector.float()
    projector.norm.requires_grad_(False)  # an AdamW step of 1e-3 is up to 7% of its gain
    parameters = [parameter for parameter in projector.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
    before = mean_length(projector, features, device)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=20, num_training_steps=args.max_steps)
    progress = tqdm(range(args.max_steps), desc="Aligning")
    for _ in progress:
        chosen = torch.randint(len(features), (args.batch_size,))
        # Rows with the same caption are no negatives of each other.
        present, target = (ids.to(device) for ids in caption_ids[chosen].unique(return_inverse=True))
        tokens = projector(features[chosen].to(device).float()) - mean  # [batch_size, num_patches, hidden_size]
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
        with torch.no_grad():
            for parameter in projector.linear_2.parameters():
                parameter *= before / mean_length(projector, features, device)
    projector.norm.requires_grad_(True)
    model.config.projector_aligned = True


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (args,) = HfArgumentParser(AlignArguments).parse_args_into_dataclasses()
    output_dir = Path(args.output_dir)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise SystemExit(f"--output_dir {output_dir} is not empty. Choose another folder, or empty it first.")
    require_model_type(args.model_name_or_path, "normllava")
    set_seed(args.seed)
    model = NormLlavaForConditionalGeneration.from_pretrained(args.model_name_or_path, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    processor = AutoProcessor.from_pretrained(args.model_name_or_path)
    rows: Any = load_rows(args.dataset_name, args.image_folder)
    rows = rows.shuffle(seed=args.seed).select(range(min(args.max_samples, len(rows))))
    align(model, processor, rows, args)
    model.to(model.config.dtype).save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    logger.info("Saved to %s. Go on with stage 1 or 2: give this folder as model_name_or_path.", output_dir)


if __name__ == "__main__":
    main()
