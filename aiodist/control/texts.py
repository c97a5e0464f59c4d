"""Texts about ranks: their names, and the differences between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_MOST_NAMED = 16
_MOST_SIDES = 16


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as words, runs joined; the first of many.

    >>> name_ranks([2]), name_ranks([1, 0]), name_ranks([7, 1, 3, 4, 5])
    ('rank 2', 'ranks 0, 1', 'ranks 1, 3-5, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [word for run in runs for word in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return f"rank{'s' * (sum(map(len, runs)) != 1)} {', '.join(words[:_MOST_NAMED])}{more}"


def sides(said: Mapping[int, str] | Sequence[str]) -> str:
    """Return the text of each rank, and equal texts once.

    >>> sides(["1.0", "2.0", "1.0"]), sides({3: "left"})
    ('ranks 0, 2: 1.0; rank 1: 2.0', 'rank 3: left')
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(said.items() if isinstance(said, Mapping) else enumerate(said)):
        ranks.setdefault(text, []).append(rank)
    texts = [f"{name_ranks(having)}: {text}" for text, having in ranks.items()]
    if len(texts) > _MOST_SIDES:
        others = [rank for having in list(ranks.values())[_MOST_SIDES:] for rank in having]
        texts[_MOST_SIDES:] = [f"{name_ranks(others)}: others"]
    return "; ".join(texts)


def disagreement(what: str, said: Mapping[int, str] | Sequence[str]) -> str:
    """Return the text of a `MismatchError`: what the ranks disagree on, and the text of each rank.

    >>> disagreement("lr", ["0.1", "0.2", "0.2"])
    'ranks disagree on lr: rank 0: 0.1; ranks 1, 2: 0.2'
    """
    return f"ranks disagree on {what}: {sides(said)}"
