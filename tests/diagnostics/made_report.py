"""A report of random numbers: every part that there can be, with intervals as they come from as many pictures."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from diagnostics.loading import Question
from diagnostics.pictures import Pictures
from diagnostics.results import (
    Attention,
    Attractions,
    ByLayer,
    ComparedGaze,
    Curve,
    DynamicsPoint,
    Embeddings,
    Gaze,
    GradientNorms,
    Gradients,
    Interface,
    LargestGap,
    LayerGroup,
    Layers,
    Lens,
    LensToken,
    LongToken,
    Modalities,
    ModelReport,
    ProjectorNorm,
    Prompted,
    Report,
    Space,
    Turning,
)
from diagnostics.statistics import by_layer, estimate, ratio, ratio_by_layer, summarize


LAYERS = 12
THIRDS = {"first third": (0, 3), "middle third": (4, 7), "last third": (8, 11)}


class Maker:
    """Makes one model's results; `size` is how much longer visual tokens are."""

    def __init__(self, seed: int, size: float, num_pictures: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.size, self.num_pictures = size, num_pictures

    def noisy(self, means: Sequence[float] | np.ndarray, noise: float = 0.05) -> np.ndarray:
        """By picture and layer."""
        own = self.rng.normal(1, noise, (self.num_pictures, len(means)))
        return np.asarray(means) * own * self.rng.normal(1, noise, (self.num_pictures, 1))

    def curve(self, means: Sequence[float] | np.ndarray, noise: float = 0.05) -> ByLayer:
        return by_layer(self.noisy(means, noise))

    def model(self, name: str) -> ModelReport:
        layers = self.layers()
        return ModelReport(
            name=name,
            class_="LlavaForConditionalGeneration",
            dtype="bfloat16",
            num_layers=LAYERS,
            hidden_size=64,
            num_samples=2 * self.num_pictures,
            num_pictures=self.num_pictures,
            num_tokens={"visual": 64 * self.num_pictures, "text": 30 * self.num_pictures},
            excluded={"padding": 0, "special": 7 * self.num_pictures, "sink": 3},
            notes=[],
            interface=self.interface(),
            layers=layers,
            prompts=[
                Prompted(None, self.num_pictures, [group.gap for group in layers.groups]),
                *(
                    Prompted(question, self.num_pictures, [estimate(self.noisy([g], 0.4)[:, 0]) for g in gaps])
                    for question, gaps in (
                        ("Describe the picture.", (0.05, -0.1, 0.001)),
                        ("What is the largest thing in it?", (0.04, 0.08, 0.002)),
                    )
                ),
            ],
            projector_norm=ProjectorNorm(8.1, 0.99, 0.4, 0.04, 1.01, 0.3, 0.037, 8.12),
            embeddings=Embeddings(
                1.01,
                0.2,
                3.1,
                32000,
                64,
                [LongToken(i, repr(t), 3 - i / 10) for i, t in enumerate((" the", "\n", "|"))],
            ),
            attention=self.attention(),
            attraction=Attractions(*(self.curve(np.full(LAYERS, mean), 1) for mean in (0.05, 0.1, -0.02))),
            key_space=self.space(0.3),
            value_space=self.space(0.1),
            lens=Lens(
                [3, 7, 11],
                min(self.num_pictures, 4),
                [[LensToken(repr(t), 0.3 / (i + 1), 0.2) for i, t in enumerate((" red", " a", " circle"))]] * 3,
            ),
            gradients=Gradients(
                4,
                21,
                {"compensated": GradientNorms(1.2, 0.3, 0.2, 0.5, 0.1), "plain": GradientNorms(1.2, 0.1, 0.2, 0.4)},
            ),
        )

    def interface(self) -> Interface:
        def norms(mean: float, width: int = 64):  # noqa: ANN202
            samples = [
                torch.tensor(self.rng.normal(mean, mean / 10, 40)) * self.rng.normal(1, 0.05)
                for _ in range(self.num_pictures)
            ]
            return summarize(samples, np.arange(self.num_pictures), width)

        visual, text = norms(self.size), norms(1.0)
        over = ratio(np.array(visual.by_picture), np.array(text.by_picture))
        return Interface(
            encoder_output=norms(22, 32),
            projector_input=norms(20, 32),
            projector_output=visual,
            visual_at_decoder=visual,
            text_at_decoder=text,
            text_in_prompt=text,
            vocabulary=norms(1.01),
            ratio=over,
            ratio_to_vocabulary=over,
        )

    def layers(self) -> Layers:
        x = np.arange(LAYERS + 1)
        visual, text = self.noisy(self.size + 2 * x), self.noisy(1 + 2 * x)
        slow, fast = 0.02 + 0.015 * x[:-1], 0.2 - 0.01 * x[:-1]
        cosines = {"visual": 1 - self.noisy(slow, 0.2), "text": 1 - self.noisy(fast, 0.2)}
        gap = cosines["visual"] - cosines["text"]
        over = ratio_by_layer(visual, text)
        largest = int(np.abs(gap.mean(0)).argmax())

        def turning(norms: np.ndarray, cosine: np.ndarray) -> Turning:
            bands = dict(zip(("5%", "25%", "50%", "75%", "95%"), (0.6, 0.8, 1, 1.2, 1.8), strict=True))
            return Turning(
                norm=by_layer(norms),
                norm_quantiles={name: (norms.mean(0) * factor).tolist() for name, factor in bands.items()},
                cosine=by_layer(cosine),
                update_ratio=self.curve(1 / x[1:]),
                update_cosine=self.curve(0.3 - x[1:] / 30),
                update_rate=estimate((1 - cosine).mean(1)),
            )

        return Layers(
            visual=turning(visual, cosines["visual"]),
            text=turning(text, cosines["text"]),
            gap=by_layer(gap),
            norm_ratio=over,
            groups=[
                LayerGroup(
                    name,
                    first,
                    last,
                    estimate(gap[:, first : last + 1].mean(1)),
                    ratio(visual[:, first : last + 1].mean(1), text[:, first : last + 1].mean(1)),
                )
                for name, (first, last) in THIRDS.items()
            ],
            largest_gap=LargestGap(largest, estimate(gap[:, largest], 1 - 0.05 / LAYERS)),
        )

    def attention(self) -> Attention:
        x = np.arange(LAYERS)

        def compared(factor: float) -> ComparedGaze:
            even = Gaze(*(self.curve(np.full(LAYERS, mean * factor), 0.02) for mean in (0.6, 0.9, 0.33)))
            entropy = self.noisy(0.8 - x / 40)
            entropy[:, 5] = np.nan  # a window that doesn't reach the picture
            mass = self.curve(factor * (0.4 - x / 40), 0.1)
            return ComparedGaze(mass, by_layer(entropy), self.curve(0.3 + x / 50), evenly_spread=even)

        masses = self.rng.beta(1, 5, (LAYERS, 8))
        return Attention(list(range(LAYERS)), compared(0.8), compared(1), masses.tolist())

    def space(self, apart: float) -> Space:
        layers = [0, 2, 4, 7, 9, 11]
        x = np.array(layers)
        known = self.num_pictures > 1
        halves = self.num_pictures >= 4

        def pair(visual: float, text: float) -> Modalities:
            return Modalities(self.curve(visual + x / 20), self.curve(text + x / 10))

        smallest = 1 / 2 ** (self.num_pictures - 1)
        return Space(
            layers=layers,
            num_tokens=200,
            mmd=self.curve(apart - x / 60, 0.1),
            mmd_baseline=(np.full(6, 0.01) if halves else np.full(6, np.nan)).tolist(),
            p_value=[max(smallest, 1e-3)] * 6 if known else None,
            smallest_p=max(smallest, 1e-3) if known else None,
            mmd_by_head=self.rng.random((6, 4)).tolist(),
            js=Curve((apart + x / 60).tolist(), [None] * 6),
            js_baseline=(np.full(6, 0.04) if halves else np.full(6, np.nan)).tolist(),
            probe=Curve((np.full(6, 0.97) if known else np.full(6, np.nan)).tolist(), [None] * 6),
            norm=pair(3, 2),
            spread=pair(2, 2),
        )


def make_report(*names: str, num_pictures: int = 16, compare: str = "models") -> Report:
    """A report of as many models as there are names."""
    models = [Maker(seed, 6.0 / (1 + 4 * seed), num_pictures).model(name) for seed, name in enumerate(names)]
    versions = {"torch": "2.13", "transformers": "5.23"}
    return Report(
        "python -m diagnostics --model a b", versions, "pictures.json", 2 * num_pictures, num_pictures, 0, [], compare,
        models, None,
    )  # fmt: skip


def make_questions(count: int = 3) -> list[Question]:
    """Questions about pictures, one colour each."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is $x^2 <b> a | circle?"}]}]
    pictures = [Image.radial_gradient("L").rotate(30 * number).convert("RGB") for number in range(count)]
    return [
        Question(f"row {number}", f"{number:x}", [picture], messages, messages)
        for number, picture in enumerate(pictures)
    ]


def make_pictures(report: Report, keys: bool = True) -> list[Pictures]:
    """What is drawn of each model."""
    rng = np.random.default_rng(0)
    seen = [question.images[0] for question in make_questions()]
    return [
        Pictures(
            seen,
            [{layer: torch.tensor(rng.beta(1, 30, (8, 8)) / 6) for layer in (0, 2, 4, 7, 9, 11)} for _ in seen],
            (7, rng.normal(0, 1, (60, 2)), rng.normal(2, 1, (60, 2))) if keys else None,
        )
        for _ in report.models
    ]


def make_points(count: int = 6) -> list[DynamicsPoint]:
    """Checkpoints of a run."""
    models = [Maker(seed, 6.0 - seed, 8).model("run") for seed in range(count)]
    return [
        DynamicsPoint(100 * number, "questions", "float32", model.interface, model.layers, model.projector_norm)
        for number, model in enumerate(models)
    ]
