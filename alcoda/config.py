"""What every config of the project is made of: frozen, strict about keys and integers, and open to new choices.

A design is a point in a space of small choices (docs/design). Each axis of that space is a subclass of `Choice`, each
choice on it a subclass of the axis, told apart by ``kind``. Defining the subclass registers it:

    class Inject(Choice, axis="inject"): ...           # the axis

    class Add(Inject):                                 # a choice on it: ``inject: {kind: add}``, or ``inject: add``
        kind: Literal["add"] = "add"

A field annotated with the axis (``inject: Inject``) then takes any registered choice. It is pydantic's tagged union,
with the difference that a choice can be added from another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from alcoda.errors import UsageError, did_you_mean


def _not_bool(value: Any) -> Any:
    # YAML turns `yes` into True, and pydantic would turn that into 1.0.
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a number is needed, not a boolean")
    return value


Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Bool = Annotated[bool, Field(strict=True)]
Float = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(_not_bool), Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_not_bool), Field(ge=0, allow_inf_nan=False)]


T = TypeVar("T", bound="Config")


class Config(BaseModel):
    """A frozen set of named fields that refuses keys it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed, checked like any other config (pydantic's own copy checks nothing)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return validate(type(self), {**fields, **(update or {})})

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                text = f"unknown key {key!r}{did_you_mean(str(key), cls.model_fields)}"
                raise PydanticCustomError("unknown_key", "{text}", {"text": text})
        return data


class Choice(Config):
    """An axis of the design space (a direct subclass, named by ``axis=``) or a choice on one (a subclass of that)."""

    kind: str
    axis: ClassVar[str]
    choices: ClassVar[dict[str, type[Choice]]]

    def __init_subclass__(cls, axis: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

    @classmethod
    def __pydantic_init_subclass__(cls, axis: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if axis is not None:
            cls.axis, cls.choices = axis, {}
            return
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str):
            named = get_args(cls.model_fields["kind"].annotation)
            if named != (kind,):
                raise TypeError(
                    f"{cls.__qualname__}: kind is Literal{list(named)} and its default {kind!r}; both must say the same"
                )
            other = cls.choices.get(kind)
            if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(
                    f"{cls.axis}: {kind!r} is taken by {other.__module__}.{other.__qualname__}; name yours otherwise"
                )
            cls.choices[kind] = cls

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The choice that ``value`` names: a choice already, its ``kind``, or a mapping with ``kind`` and fields."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            allowed = ", ".join(sorted(cls.choices))
            raise PydanticCustomError("choice", "write a kind ({allowed}) or a mapping with one", {"allowed": allowed})
        kind = value["kind"]
        if kind not in cls.choices:
            text = (
                f"unknown {cls.axis} {kind!r}{did_you_mean(kind, cls.choices)} (a plugin's choice needs --plugin FILE)"
            )
            raise PydanticCustomError("choice", "{text}", {"text": text})
        return cast(Self, cls.choices[kind].model_validate(value))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if "choices" in cls.__dict__ or not hasattr(cls, "choices"):  # the axis itself: any choice on it
            return core_schema.no_info_plain_validator_function(
                lambda value: cls.parse(value),
                serialization=core_schema.plain_serializer_function_ser_schema(
                    lambda value, info: value.model_dump(mode=info.mode), info_arg=True
                ),
            )
        return handler(source)


def explain(error: ValidationError, what: str) -> UsageError:
    """One readable message of a pydantic error: each line names the field by its dotted path, and the trouble."""
    lines = []
    for item in error.errors(include_url=False):
        # Of a field that may be one of several types pydantic names the type too, as a schema's insides.
        path = ".".join(str(part) for part in item["loc"] if "[" not in str(part)) or what
        got = item.get("input")
        shown = (
            "" if isinstance(got, dict | BaseModel) or item["type"] in ("unknown_key", "choice") else f" (got {got!r})"
        )
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{path}: {message[:1].lower()}{message[1:]}{shown}")
    return UsageError(lines[0] if len(lines) == 1 else f"{what} has {len(lines)} errors:\n  " + "\n  ".join(lines))


def validate(cls: type[T], data: Any, what: str | None = None) -> T:
    """``cls.model_validate(data)``, with a `UsageError` in place of pydantic's own error."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise explain(error, what or cls.__name__) from None
