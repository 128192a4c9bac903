"""Which names count as right in the study, and a run's score."""

from examples.emoji.study.records import Record


# No model is trained on drawings by these artists. The primary artists' drawings decide the study. The results on the
# secondary artist's drawings are only reported.
PRIMARY = ("twemoji", "emojione")
SECONDARY = ("openmoji",)
# Names whose drawings are near copies of each other, found among the drawings to train on. A name on the left counts
# as the name on the right.
SAME_DRAWING = {
    "ram": "ewe",
    "two hump camel": "camel",
    "spouting whale": "whale",
    "nest with eggs": "empty nest",
    "front facing baby chick": "baby chick",
    "guide dog": "dog",
    "service dog": "dog",
}


def is_right(given: str, right: str) -> bool:
    """Whether a given name is right. By `SAME_DRAWING`, the name of a near copy is right too."""
    return SAME_DRAWING.get(given, given) == SAME_DRAWING.get(right, right)


def percent_right(record: Record, artist: str) -> float:
    """The percentage of an artist's drawings to which a run gave the right name."""
    hits = [is_right(given, right) for right, given, _margin in record["answers"][artist]]
    return 100 * sum(hits) / len(hits)


def primary_score(record: Record) -> float:
    """The outcome of a run: the percentage of right names, averaged over the two primary artists."""
    percentages = [percent_right(record, artist) for artist in PRIMARY]
    return sum(percentages) / len(percentages)
