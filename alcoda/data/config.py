"""The data section of a run's config."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from alcoda.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from alcoda.data.vocabulary import Bpe, TokenizerConfig

DEFAULT_CORPUS = "pystdlib"


def _as_source(value: object) -> object:
    # A corpus by itself is a source of weight 1.
    return {"corpus": value} if isinstance(value, str) else value


class Source(Config):
    """One corpus of a mix."""

    corpus: str
    """``pystdlib``, ``text:PATH``, ``jsonl:PATH``, ``parquet:PATH``, ``hf:NAME[:CONFIG]``, ``bin:PATH`` or
    ``hops[:OPTIONS]``, as in ``hops:nodes=9,hops=8,docs=20000`` (options: alcoda/data/hops.py)."""
    weight: PositiveFloat = 1.0
    """Share of the training tokens, relative to the weights of the other sources."""
    name: str | None = None
    """In tables and messages; by default made from the corpus."""
    max_bytes: PositiveInt | None = None
    """Bytes of its text that are used, from the beginning; by default those of the data config."""


class Splits(Config):
    """Fractions of each corpus, by bytes of text, that are kept from training. Train gets the rest."""

    valid: PositiveFloat = 0.05
    """To measure on. Not used where ``valid`` of the data config names a corpus."""
    calib: PositiveFloat = 0.02
    """To fit the thresholds of exit rules on."""
    probe: PositiveFloat = 0.02
    """To train exit routers on."""

    @model_validator(mode="after")
    def _leave_some(self) -> Self:
        total = self.valid + self.calib + self.probe
        if total >= 1:
            raise ValueError(
                f"valid + calib + probe = {self.valid:g} + {self.calib:g} + {self.probe:g} = {total:g} leaves nothing "
                "to train on; their sum is to be less than 1"
            )
        return self


class DataConfig(Config):
    """What is trained and measured on."""

    corpus: str | None = None
    """The corpus; ``pystdlib`` where there is neither this nor a mix."""
    mix: tuple[Annotated[Source, BeforeValidator(_as_source)], ...] = ()
    """Several corpora with weights, in place of ``corpus``."""
    mix_unit: Literal["row", "document"] = "row"
    """Whether a row of a batch is of one source, or documents of all sources are packed into rows."""
    valid: str | None = None
    """A corpus to measure on that is never trained on; then ``corpus`` or the mix has no valid split of its own."""
    tokenizer: TokenizerConfig = Field(default_factory=Bpe)
    """``byte``, ``bpe`` (trained on the train split) or ``file``."""
    splits: Splits = Splits()
    max_bytes: PositiveInt | None = None
    """Bytes of text that are used of each corpus, from the beginning."""
    seed: NonNegativeInt = 0
    """Of the splits. A run's seed, which orders the batches, is another."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if self.corpus is not None and self.mix:
            raise ValueError(
                f"corpus ({self.corpus!r}) and mix exclude each other; make the corpus a source of the mix, or "
                "leave it out"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, of which ``corpus`` is one of weight 1, with their ``max_bytes`` filled in."""
        sources = self.mix or (Source(corpus=self.corpus or DEFAULT_CORPUS),)
        return tuple(
            source if source.max_bytes else source.model_copy(update={"max_bytes": self.max_bytes})
            for source in sources
        )
