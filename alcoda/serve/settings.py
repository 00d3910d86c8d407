"""What a server is told when it starts: where it listens, its limits, and the policy of depths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, StringConstraints, model_validator

from alcoda.config import Bool, Config, Float, NonNegativeInt, PositiveFloat, PositiveInt, validate
from alcoda.errors import UsageError

Key = Annotated[str, StringConstraints(min_length=1, pattern=r"^[\x21-\x7e]+$")]
ANY = "*"
"""Every origin."""
Share = Annotated[Float, Field(ge=0, le=1)]


def _origin(value: str) -> str:
    value = value.lower()
    # A browser compares to the letter: another form would never match, and nothing would say so.
    if value != ANY and not is_origin(value):
        raise ValueError(
            f"{value!r} is no origin: as a browser sends it, https://NAME or https://NAME:PORT (80 of http and 443 of "
            "https are left out); or *"
        )
    return value


def is_origin(value: str) -> bool:
    """Whether a browser sends an origin in this form."""
    if value == "null":
        return True
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", value):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and (parts.scheme, parts.port) not in (("http", 80), ("https", 443))
    except ValueError:  # what is no address, or no port
        return False


Origin = Annotated[str, AfterValidator(_origin)]


class KeyPolicy(Config):
    """One API key.

    Attributes:
        key: what a client sends.
        tier: of its requests that name none; null: the policy's.
    """

    key: Key
    tier: str | None = None


class Degrade(Config):
    """What is done with requests that name no depth while many wait.

    Attributes:
        above_waiting: completions that wait, above which it begins.
        to: the tier that they get then. One that is shallower already stays.
    """

    above_waiting: NonNegativeInt
    to: str


class Policy(Config):
    """Which depth a request gets that leaves it to the server.

    Attributes:
        default_tier: null: balanced where the run is calibrated, else all loops.
        keys: API keys, beside those of the command line.
        degrade: null: never.
    """

    default_tier: str | None = None
    keys: tuple[KeyPolicy, ...] = ()
    degrade: Degrade | None = None

    @model_validator(mode="after")
    def _once(self) -> Self:
        keys = [one.key for one in self.keys]
        if len(set(keys)) < len(keys):
            raise ValueError("keys: one of them is there twice; leave one of the two out")
        return self

    @classmethod
    def load(cls, path: Path) -> Policy:
        """A YAML (or JSON) file.

        Raises:
            UsageError: no such file, or it says what a policy cannot.
        """
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--policy {path}: it cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--policy {path}: it is no YAML: {error}") from None
        return validate(cls, {} if data is None else data, f"--policy {path}")

    def tiers(self) -> set[str]:
        """All that are named."""
        named = [self.default_tier, *(one.tier for one in self.keys)]
        named.append(None if self.degrade is None else self.degrade.to)
        return {name for name in named if name is not None}


class Settings(Config):
    """How a server works; docs/serving.md has the meaning for those who run one.

    Attributes:
        host, port: where it listens; port 0: a free one.
        name: of the model; null: of the run's folder.
        api_keys: that are let in; none, and the policy has none: everybody is.
        allow_origins: web pages of other places that may ask, or ``*``; where it listens at this machine only, the
            header Host may name them too.
        open_metrics: whether /metrics needs no key.
        max_waiting: completions that wait for a place.
        max_body_bytes: of a request.
        max_n: completions of a prompt.
        max_prompts: of a request.
        deadline_s: of a request, queue included; null: none.
        drain_s: how long requests may go on, and their answers be read, after the first signal to end.
        stall_s: of an engine with work that does not go on: then the server is not ready.
        audit: the share of finished requests that are rerun at full depth.
        loops: that a request may ask for; null: the model's own.
    """

    host: str = "127.0.0.1"
    port: Annotated[NonNegativeInt, Field(le=65535)] = 8000
    name: Annotated[str, StringConstraints(pattern=r"^[^:\s]+$")] | None = None
    api_keys: tuple[Key, ...] = ()
    allow_origins: tuple[Origin, ...] = ()
    open_metrics: Bool = False
    max_waiting: NonNegativeInt = 256
    max_body_bytes: PositiveInt = 4 << 20
    max_n: PositiveInt = 16
    max_prompts: PositiveInt = 64
    deadline_s: PositiveFloat | None = None
    drain_s: Annotated[Float, Field(ge=0)] = 30.0
    stall_s: PositiveFloat = 30.0
    audit: Share = 0.0
    loops: PositiveInt | None = None
    policy: Policy = Policy()

    def keys(self) -> dict[str, str | None]:
        """Every key that is let in, with the default tier of its requests."""
        return {**dict.fromkeys(self.api_keys), **{one.key: one.tier for one in self.policy.keys}}
