"""The data section of a run's config."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from alcoda.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from alcoda.data.vocabulary import Bpe, TokenizerConfig

DEFAULT_CORPUS = "pystdlib"


def _as_source(value: object) -> object:
    # A corpus by itself is a source of weight 1.
    return {"corpus": value} if isinstance(value, str) else value


class Ladder(NamedTuple):
    """Sources that follow one another: a step up when the one before is mastered."""

    sources: tuple[int, ...]
    """Indices into `DataConfig.sources`, the easiest first."""
    mastery: float
    """Share of its answers that a model is to give right before the next one begins."""


class Source(Config):
    """One corpus of a mix, or several that follow one another (``stages``)."""

    corpus: str
    """``pystdlib``, ``text:PATH``, ``jsonl:PATH``, ``parquet:PATH``, ``hf:NAME[:CONFIG]``, ``bin:PATH`` or
    ``hops[:OPTIONS]``, as in ``hops:nodes=9,hops=8,docs=20000`` (options: alcoda/data/hops.py)."""
    weight: PositiveFloat = 1.0
    """Share of the training tokens, relative to the weights of the other sources."""
    name: str | None = None
    """In tables and messages; by default made from the corpus."""
    max_bytes: PositiveInt | None = None
    """Bytes of its text that are used, from the beginning; by default those of the data config."""
    stages: tuple[str, ...] = ()
    """Harder corpora that take the place of ``corpus`` one after another, each once the one before is mastered."""
    mastery: Annotated[PositiveFloat, Field(le=1)] = 0.95
    """The share of a stage's answers that validation is to find right, at the model's n_loops, before the next."""

    def in_stages(self) -> tuple[Source, ...]:
        """A source for each stage, of the same share in all: the tokenizer is trained on all of them."""
        n = 1 + len(self.stages)
        return tuple(
            self.model_copy(
                update={
                    "corpus": corpus,
                    "stages": (),
                    "weight": self.weight / n,
                    "name": f"{self.name}-{number}" if self.name and n > 1 else self.name,
                }
            )
            for number, corpus in enumerate((self.corpus, *self.stages), 1)
        )


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

    @model_validator(mode="after")
    def _stages_are_measured(self) -> Self:
        if self.valid is not None and any(source.stages for source in self.mix):
            raise ValueError(
                f"valid ({self.valid!r}) with a source that has stages: whether a stage is mastered is measured on its "
                "own valid split, which a valid corpus takes away; leave valid out"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, of which ``corpus`` is one of weight 1, ``max_bytes`` filled in; stages one by one."""
        sources = self.mix or (Source(corpus=self.corpus or DEFAULT_CORPUS),)
        return tuple(
            stage if stage.max_bytes else stage.model_copy(update={"max_bytes": self.max_bytes})
            for source in sources
            for stage in source.in_stages()
        )

    @property
    def ladders(self) -> tuple[Ladder, ...]:
        """Which of the sources are stages of one."""
        found, first = [], 0
        for source in self.mix:
            n = 1 + len(source.stages)
            if n > 1:
                found.append(Ladder(tuple(range(first, first + n)), source.mastery))
            first += n
        return tuple(found)
