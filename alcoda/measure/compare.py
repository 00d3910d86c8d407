"""Ways to read one text, held against the first of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alcoda.measure.bootstrap import Interval, paired_gain, ratio_interval


@dataclass(frozen=True)
class Bits:
    """Bits per byte with their 95% interval, and how many more they are than those of the first way, paired over units
    (None of the first itself)."""

    bits_per_byte: float
    low: float
    high: float
    gap: float | None
    gap_low: float | None
    gap_high: float | None

    @classmethod
    def of(cls, nats_WU: np.ndarray, i: int, bytes_U: np.ndarray, seed: int) -> Bits:
        """Of way ``i``, from the nats of each unit by each way."""
        own = ratio_interval(nats_WU[i], bytes_U, seed=seed)
        gap: Interval | tuple[None, None, None] = (
            paired_gain(nats_WU[i], nats_WU[0], bytes_U, seed=seed) if i else (None, None, None)
        )
        return cls(*own, *gap)
