"""What the depth study runs, in the order of its protocol (DEPTH.md), how a learning rate is chosen, and the records.

Nothing here needs torch, so that the plan can be read and tested by itself.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from depth_scenes import Sizes
from filelock import FileLock
from scipy.stats import t

from conversations.files import write_whole


Record = dict[str, Any]
Records = dict[str, dict[str, Record]]
"""What `depth.json` holds: `"data"`, `"language_models"` by decoder, `"runs"` by the key of the job."""

PAIR = ("none", "gwc")
VISION_SHARE = 0.2  # the vision encoder's learning rate in stage 2, of the common one
START_RATE = 2e-3  # of stage 1 while the rate of stage 2 is looked for, as in the quickstart's recipe


@dataclass(frozen=True)
class Arm:
    """How visual tokens come into the decoder.

    Attributes:
        norm: As `training/compose.py` has it.
        align: Whether the norm starts at T.
        dial: Factor on the norm's gain at the start.
        start: `"small"`: second layer scaled so that visual tokens start at T; `"scale"`: gain and bias without
            normalising, likewise.
        decay: Weight decay in stage 1.
    """

    title: str
    norm: Literal["none", "layernorm", "gwc"]
    align: bool = True
    dial: float = 1.0
    start: Literal["", "small", "scale"] = ""
    decay: float = 0.0

    @property
    def like(self) -> str:
        """The arm of the pair whose rate of stage 1 this one takes over: the one that normalises as it does."""
        return "none" if self.norm == "none" or self.start == "scale" else "gwc"


ARMS = {
    "none": Arm("no norm", "none"),
    "gwc": Arm("GWC at T", "gwc"),
    "layernorm": Arm("LayerNorm at T", "layernorm"),
    "gain1": Arm("LayerNorm, gain 1", "layernorm", align=False),
    "gwc-3t": Arm("GWC at 3 T", "gwc", dial=3.0),
    "gwc-10t": Arm("GWC at 10 T", "gwc", dial=10.0),
    "small-start": Arm("no norm, second layer small", "none", start="small"),
    "scale": Arm("scale for each channel, no norm", "layernorm", start="scale"),
    "decay": Arm("no norm, weight decay 1 in stage 1", "none", decay=1.0),
}


@dataclass(frozen=True)
class Variant:
    """How both stages differ from the recipes."""

    title: str
    epochs: int = 1  # factor
    both: tuple[tuple[str, Any], ...] = ()  # options of both stages
    stage2: tuple[tuple[str, Any], ...] = ()
    projector_alone: bool = False  # in stage 2
    exchanged: bool = False  # stage 2 at the rate of the other arm of the pair

    @property
    def shares_stage1(self) -> bool:
        """Whether stage 1 is that of the plain variant."""
        return self.epochs == 1 and not self.both


VARIANTS = {
    "plain": Variant("the recipes, rates searched"),
    "exchanged": Variant("stage 2 at the other's rate", exchanged=True),
    "doubled": Variant("twice the steps", epochs=2),
    "unclipped": Variant("no clipping", both=(("max_grad_norm", 0.0),)),
    "warmup": Variant("five times the warm-up", both=(("warmup_steps", 0.15),)),
    "adapters": Variant("adapters in stage 2", stage2=(("stage", "adapt"), ("lora_r", 8), ("lora_alpha", 16))),
    "projector": Variant("the projector alone in stage 2", projector_alone=True),
}
# Not of another kind of run: these are run at the rates that the plain variant was searched for.
AT_PLAIN_RATES = ("plain", "exchanged", "doubled", "unclipped", "warmup")


def size_of(decoder: str) -> tuple[int, int]:
    """Layers and width of a decoder, from its name."""
    layers, width = decoder.split("x")
    return int(layers), int(width)


@dataclass(frozen=True)
class Job:
    """One run: both stages and the evaluation. `decoder` is layers x width."""

    decoder: str
    arm: str
    variant: str
    rates: tuple[float, float]
    split: Literal["validation", "test"]
    seed: int

    @property
    def key(self) -> str:
        """Name of the record."""
        return "/".join((self.stage1, f"stage2-{self.rates[1]:g}", self.variant, self.split))

    @property
    def stage1(self) -> str:
        """Name of what can be shared with other jobs."""
        variant = "plain" if VARIANTS[self.variant].shares_stage1 else self.variant
        return f"{self.decoder}/{self.arm}/seed{self.seed}/{variant}/stage1-{self.rates[0]:g}"

    @property
    def cost(self) -> float:
        """Seconds on one idle core of the machine that this was written on, roughly."""
        layers, width = size_of(self.decoder)
        of_width = (width / 128) ** 1.6
        stages = (layers * 17 * of_width + 30) * VARIANTS[self.variant].epochs
        return stages + layers * of_width * (4 if self.split == "test" else 1.5)


@dataclass(frozen=True)
class Study:
    """How large the study is.

    Attributes:
        main: Decoder of the comparison that decides.
        depths, wide, deepest: Other decoders; the deepest come last.
        few: How many of `seeds` secondary comparisons take.
        extensions: How often a grid goes on beyond an end where the best rate lies.
        epochs: Of both stages.
        text_scenes: Scenes that are asked about in words and with the picture blanked.
        gate: Share of a kind of question that a language model must have right in words for the kind to count.
        text_steps: Factor on the steps of the language models.
        vision_steps: Of the vision encoder.
    """

    name: str = "depth"
    main: str = "12x128"
    depths: tuple[str, ...] = ("3x128", "6x128")
    wide: tuple[str, ...] = ("3x256",)
    deepest: tuple[str, ...] = ("24x128",)
    tuning_seeds: tuple[int, ...] = (42, 1)
    seeds: tuple[int, ...] = tuple(range(11, 19))
    few: int = 5
    stage1_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    stage2_rates: tuple[float, ...] = (2.5e-4, 5e-4, 1e-3, 2e-3)
    extensions: int = 2
    sizes: Sizes = field(default_factory=Sizes)
    epochs: tuple[float, float] = (4, 1)
    text_scenes: int = 100
    gate: float = 0.95
    text_steps: float = 1.0
    vision_steps: int = 500


QUICK = Study(
    name="depth-quick",
    main="3x128",
    depths=("2x128",),
    wide=(),
    deepest=(),
    tuning_seeds=(42,),
    seeds=(11, 12),
    few=2,
    stage1_rates=(2e-3,),
    stage2_rates=(1e-3,),
    extensions=0,
    sizes=Sizes(train=320, validation=20, test=40, text=2000),
    epochs=(2, 1),
    text_scenes=20,
    gate=0.0,
    text_steps=0.15,
    vision_steps=100,
)


def read_records(path: Path) -> Records:
    """All records; of a file that isn't there yet, none."""
    empty: Records = {"data": {}, "language_models": {}, "runs": {}}
    return empty | json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty


def add_record(path: Path, part: str, key: str, record: Record) -> None:
    """Add a record to the file, whole or not at all, whoever else is adding one."""
    with FileLock(path.with_suffix(".lock")):
        records = read_records(path)
        records[part] = dict(sorted({**records[part], key: record}.items()))
        write_whole(path, dump(records))


def dump(records: Records) -> str:
    """The records as JSON with a line for each, since curves are long."""
    parts = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key])}" for key in found)
        + "\n}"
        for part, found in records.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def answerable(records: Records, decoder: str) -> list[str]:
    """The kinds of question that a decoder's language model can answer in words."""
    return records["language_models"][decoder]["kinds"]


def score(records: Records, job: Job) -> float:
    """A finished run's share of exact matches about pictures, mean over the answerable kinds."""
    return mean(records["runs"][job.key]["picture"][kind] for kind in answerable(records, job.decoder))


def t_interval(values: Collection[float]) -> tuple[float, float, float]:
    """Mean and the ends of Student's 95% interval for it."""
    center = mean(values)
    spread = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    half = float(t.ppf(0.975, len(values) - 1)) * (spread / len(values)) ** 0.5
    return center, center - half, center + half


class Search:
    """The search for one learning rate of one arm, as far as it has come.

    Attributes:
        jobs: Its runs, those that an end of the grid calls for among them once it is known.
        rate: The best so far: the highest mean score over the tuning seeds, of equal ones the lowest rate. The middle
            of the grid before all is measured.
        scores: Mean score by rate; empty before all is measured.
    """

    def __init__(
        self, study: Study, records: Records, grid: Iterable[float], job_at: Callable[[float, int], Job]
    ) -> None:
        rates = sorted(grid)
        self.rate, self.scores = rates[len(rates) // 2], dict[float, float]()
        for extension in range(study.extensions + 1):
            # By seed, so that runs that share stage 1 follow each other.
            self.jobs = [job_at(rate, seed) for seed in study.tuning_seeds for rate in rates]
            self.complete = all(job.key in records["runs"] for job in self.jobs)
            if not self.complete:
                return
            self.scores = {
                rate: mean(score(records, job_at(rate, seed)) for seed in study.tuning_seeds) for rate in rates
            }
            self.rate = max(rates, key=lambda rate: (self.scores[rate], -rate))
            ends = {rates[0]: rates[0] / 2, rates[-1]: rates[-1] * 2}
            if self.rate not in ends or extension == study.extensions:
                return
            rates = sorted([*rates, ends[self.rate]])


class Plan:
    """The runs of a study, with the rates that the records so far lead to."""

    def __init__(self, study: Study, records: Records) -> None:
        self.study, self.records = study, records

    def stage2_search(self, decoder: str, arm: str, variant: str = "plain") -> Search:
        """The rate of stage 2."""
        rate1 = START_RATE if self.is_main(decoder, arm, variant) else self.stage1_search(ARMS[arm].like).rate

        def job_at(rate: float, seed: int) -> Job:
            return Job(decoder, arm, variant, (rate1, rate), "validation", seed)

        return Search(self.study, self.records, self.study.stage2_rates, job_at)

    def stage1_search(self, arm: str) -> Search:
        """The rate of stage 1 of an arm of the pair, which the other decoders and arms take over."""
        rate2 = self.stage2_search(self.study.main, arm).rate

        def job_at(rate: float, seed: int) -> Job:
            return Job(self.study.main, arm, "plain", (rate, rate2), "validation", seed)

        return Search(self.study, self.records, self.study.stage1_rates, job_at)

    def is_main(self, decoder: str, arm: str, variant: str) -> bool:
        """Whether both rates are searched for it."""
        return decoder == self.study.main and arm in PAIR and variant == "plain"

    def seeds(self, decoder: str, arm: str, variant: str) -> tuple[int, ...]:
        """All for the comparison that decides and its like at the other depths, few for the rest."""
        all_of_them = decoder in (self.study.main, *self.study.depths) and arm in PAIR and variant == "plain"
        return self.study.seeds if all_of_them else self.study.seeds[: self.study.few]

    def runs(self, decoder: str, arm: str, variant: str = "plain") -> list[Job]:
        """The runs that are compared."""
        searched = "plain" if variant in AT_PLAIN_RATES else variant
        tuned = PAIR[1 - PAIR.index(arm)] if VARIANTS[variant].exchanged else arm
        rates = self.stage1_search(ARMS[arm].like).rate, self.stage2_search(decoder, tuned, searched).rate
        return [Job(decoder, arm, variant, rates, "test", seed) for seed in self.seeds(decoder, arm, variant)]

    def deciding(self) -> list[Job]:
        """The comparison that decides, seed by seed."""
        return [job for jobs in zip(*(self.runs(self.study.main, arm) for arm in PAIR), strict=True) for job in jobs]


# Decoder, arm, variant.
Case = tuple[str, str, str]


@dataclass(frozen=True)
class Line:
    """A line of the protocol: language models that it needs, its runs as far as they are known, what it compares."""

    title: str
    jobs: Callable[[Plan], list[Job]]
    decoders: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()


def compared(title: str, cases: Sequence[Case]) -> Line:
    """A line of runs that are compared, seed by seed: a study that is stopped has whole pairs, of one machine."""

    def jobs(plan: Plan) -> list[Job]:
        return sorted((job for case in cases for job in plan.runs(*case)), key=lambda job: job.seed)

    return Line(title, jobs, cases=tuple(cases))


def searched(title: str, cases: Sequence[Case], decoders: tuple[str, ...] = ()) -> list[Line]:
    """The same, after a line of searches for the rate of stage 2."""
    search = Line(
        f"{title}, rates", lambda plan: [job for case in cases for job in plan.stage2_search(*case).jobs], decoders
    )
    return [search, compared(title, cases)]


def lines(study: Study) -> list[Line]:
    """The lines of the protocol in their order."""
    main = study.main

    def decoders(*names: str) -> list[Case]:
        return [(name, arm, "plain") for name in names for arm in PAIR]

    def variants(*names: str) -> list[Case]:
        return [(main, arm, name) for name in names for arm in PAIR]

    others = [(main, arm, "plain") for arm in ARMS if arm not in PAIR]
    return [
        Line("language model", lambda plan: [], (main,)),
        Line("rate of stage 2", lambda plan: [job for arm in PAIR for job in plan.stage2_search(main, arm).jobs]),
        Line("rate of stage 1", lambda plan: [job for arm in PAIR for job in plan.stage1_search(arm).jobs]),
        Line("the comparison that decides", Plan.deciding, cases=tuple(decoders(main))),
        compared("each other's rate", variants("exchanged")),
        *searched("depth", decoders(*study.depths), decoders=study.depths),
        compared("twice the steps", variants("doubled")),
        *searched("width", decoders(*study.wide), decoders=study.wide),
        compared("twice the steps, shallowest", [(study.depths[0], arm, "doubled") for arm in PAIR]),
        *searched("the dial and other starts", others),
        *searched("other starts, shallowest", [(study.depths[0], arm, "plain") for arm in ("small-start", "scale")]),
        compared("clipping and warm-up", variants("unclipped", "warmup")),
        *searched("what stage 2 trains", variants("adapters", "projector")),
        *searched("deepest", decoders(*study.deepest), decoders=study.deepest),
    ]


def options(job: Job) -> Record:
    """What a record says of its job."""
    return asdict(job) | {"rates": list(job.rates)}
