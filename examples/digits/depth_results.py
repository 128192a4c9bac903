"""What the depth study has measured, by what is compared. A comparison is there once all of its seeds are."""

from depth_plan import ARMS, PAIR, VARIANTS, Case, Job, Plan, Record, Records, Study, lines, score, t_interval


BySeed = dict[int, float]

NOT_RUN = "not run yet"


class Results:
    """The runs of a study that are done.

    Attributes:
        pairs: Decoder and variant of each comparison of GWC and no norm, in the order of the protocol.
        arms: The cases at the main depth that are trained as in the recipes.
        shown: Those, the pairs' cases, and other arms at the other depths.
        missing: What is not run yet, in words.

    Raises:
        ValueError: if runs that are compared began with different backbones.
    """

    def __init__(self, study: Study, records: Records) -> None:
        self.study, self.records, self.plan = study, records, Plan(study, records)
        self.decided = all(job.key in records["runs"] for job in self.plan.deciding())
        cases = [case for line in lines(study) for case in line.cases]
        done = [case for case in cases if self.runs(case)]
        self.arms = [case for case in done if case[0] == study.main and case[2] == "plain"]
        pairs = dict.fromkeys((decoder, variant) for decoder, _, variant in done if variant != "exchanged")
        self.pairs = [pair for pair in pairs if all(case in done for case in pair_of(*pair))]
        others = [case for case in done if case[0] != study.main and case[1] not in PAIR]
        paired = [case for pair in self.pairs for case in pair_of(*pair)]
        self.shown = list(dict.fromkeys([*self.arms, *paired, *others]))
        titles = [
            f"{decoder} {(VARIANTS[variant] if arm in PAIR else ARMS[arm]).title}"
            for decoder, arm, variant in cases
            if (decoder, arm, variant) not in done
        ]
        self.missing = list(dict.fromkeys(titles))
        for case in self.shown:
            self.check_backbones(case)

    def runs(self, case: Case) -> list[Job]:
        """The runs of a case; none before its last one is done, nor before the comparison that decides is."""
        jobs = self.plan.runs(*case)
        return jobs if self.decided and all(job.key in self.records["runs"] for job in jobs) else []

    def record(self, job: Job) -> Record:
        """What a run recorded."""
        return self.records["runs"][job.key]

    def trained(self, case: Case) -> list[Record]:
        """The records of a case but for those that diverged, which hold nothing but a score."""
        return [record for record in map(self.record, self.runs(case)) if "diverged" not in record]

    def scores(self, case: Case, kind: str = "score", asked: str = "picture") -> BySeed:
        """Percent right about pictures or in words, of a kind; `"score"` is the mean about pictures."""
        return {
            job.seed: 100 * (score(self.records, job) if kind == "score" else self.record(job)[asked][kind])
            for job in self.runs(case)
        }

    def gains(self, decoder: str, variant: str = "plain", kind: str = "score", asked: str = "picture") -> BySeed:
        """GWC less no norm, in points."""
        return self.less_none((decoder, "gwc", variant), kind, asked)

    def less_none(self, case: Case, kind: str = "score", asked: str = "picture") -> BySeed:
        """An arm less no norm of the same decoder and variant, in points."""
        return less(self.scores(case, kind, asked), self.scores(without_norm(case), kind, asked))

    def check_backbones(self, case: Case) -> None:
        """Raise `ValueError` if a run began with other backbones than that of no norm and the same seed, as far as the
        records name them."""
        for job, other in zip(self.runs(case), self.runs(without_norm(case)), strict=False):  # seeds in one order
            for part in ("language_model", "vision"):
                if len({self.record(job).get(part), self.record(other).get(part)} - {None}) > 1:
                    raise ValueError(f"{job.key} began with another {part} than {other.key}.")


def pair_of(decoder: str, variant: str) -> list[Case]:
    """No norm and GWC."""
    return [(decoder, arm, variant) for arm in PAIR]


def without_norm(case: Case) -> Case:
    """No norm, trained as a case is."""
    decoder, _, variant = case
    return decoder, "none", variant


def less(one: BySeed, other: BySeed) -> BySeed:
    """The differences on the seeds that both have."""
    return {seed: value - other[seed] for seed, value in one.items() if seed in other}


def interval(values: BySeed) -> str:
    """Mean and 95% t interval over seeds."""
    if not values:
        return NOT_RUN
    center, low, high = t_interval(values.values())
    return f"{center:.1f} ({low:.1f} to {high:.1f})"


def side(values: BySeed) -> int:
    """Where the whole interval lies: 1 above 0, -1 below, else 0."""
    _, low, high = t_interval(values.values())
    return 1 if low > 0 else -1 if high < 0 else 0
