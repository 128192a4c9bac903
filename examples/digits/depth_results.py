"""What the depth study has measured, by what is compared. A comparison is there once all of its seeds are."""

from collections.abc import Sequence

from depth_plan import ARMS, PAIR, VARIANTS, Case, Job, Plan, Record, Records, Study, score, t_interval


class Results:
    """The runs of a study that are done.

    Attributes:
        pairs: Decoder and variant of each comparison of GWC and no norm, in the order of the protocol.
        arms: The cases at the main depth that are trained as in the recipes.
        missing: What is not run yet, in words.
    """

    def __init__(self, study: Study, records: Records) -> None:
        self.study, self.records, self.plan = study, records, Plan(study, records)
        main = study.main
        pairs = [
            (main, "plain"),
            *((decoder, "plain") for decoder in study.depths),
            (main, "doubled"),
            *((decoder, "plain") for decoder in study.wide),
            *((main, variant) for variant in VARIANTS if variant not in ("plain", "doubled", "exchanged")),
            *((decoder, "plain") for decoder in study.deepest),
        ]
        arms = [(main, arm, "plain") for arm in [*PAIR, *(arm for arm in ARMS if arm not in PAIR)]]
        done = [
            (decoder, variant)
            for decoder, variant in pairs
            if all(self.runs(case) for case in pair_of(decoder, variant))
        ]
        self.pairs, self.arms = done, [case for case in arms if self.runs(case)]
        self.missing = [
            f"{decoder} {VARIANTS[variant].title}" for decoder, variant in pairs if (decoder, variant) not in done
        ]
        self.missing += [f"{main} {ARMS[case[1]].title}" for case in arms[len(PAIR) :] if case not in self.arms]

    def runs(self, case: Case) -> list[Job]:
        """The runs of a case; none before its last one is done, nor before the comparison that decides is."""
        jobs = self.plan.runs(*case)
        done = all(job.key in self.records["runs"] for job in [*self.plan.deciding(), *jobs])
        return jobs if done else []

    def score(self, job: Job, kind: str = "score", asked: str = "picture") -> float:
        """Percent right about pictures or in words, of a kind; `"score"` is the mean about pictures."""
        return 100 * (score(self.records, job) if kind == "score" else self.record(job)[asked][kind])

    def scores(self, case: Case, kind: str = "score", asked: str = "picture") -> list[float]:
        """Of each run of a case."""
        return [self.score(job, kind, asked) for job in self.runs(case)]

    def record(self, job: Job) -> Record:
        """What a run recorded."""
        return self.records["runs"][job.key]

    def trained(self, case: Case) -> list[Record]:
        """The records of a case but for those that diverged, which hold nothing but a score."""
        return [record for record in map(self.record, self.runs(case)) if "diverged" not in record]

    def differences(self, one: Case, other: Case, kind: str = "score", asked: str = "picture") -> list[float]:
        """Points of the first case less those of the second, on the seeds that both have."""
        scores = zip(self.scores(one, kind, asked), self.scores(other, kind, asked), strict=False)
        return [a - b for a, b in scores]

    def gains(self, decoder: str, variant: str = "plain", kind: str = "score", asked: str = "picture") -> list[float]:
        """GWC less no norm by seed, in points."""
        none, gwc = pair_of(decoder, variant)
        return self.differences(gwc, none, kind, asked)


def pair_of(decoder: str, variant: str) -> list[Case]:
    """No norm and GWC."""
    return [(decoder, arm, variant) for arm in PAIR]


def interval(values: Sequence[float], digits: int = 1) -> str:
    """Mean and 95% t interval over seeds."""
    if not values:
        return "not run yet"
    center, low, high = t_interval(values)
    return f"{center:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def is_above(values: Sequence[float]) -> bool:
    """Whether the whole interval lies above 0."""
    return t_interval(values)[1] > 0
