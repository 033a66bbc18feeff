"""TOML tables as typed objects: a class of fields says which keys a table has, and which values they take."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ea_artifacts.command import UserError, hint


def first_fault(where: object, error: ValidationError) -> str:
    """The place of the first fault, behind `where`, and what it is."""
    fault = error.errors(include_url=False)[0]
    return f"{': '.join(map(str, (where, *fault['loc'])))}: {fault['msg']}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class Form(BaseModel):
    """A table of TOML. Its keys are the fields, with dashes in the place of underscores."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=_dashed)

    @classmethod
    def filled(cls, content: Any, where: str) -> Self:
        """The form with the values of a table.

        Raises:
            UserError: a key is unknown or missing, a value has another type, or a form's own check raised it; the
                message begins with `where`.
        """
        try:
            return cls.model_validate(content)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
        *places, name = map(str, fault["loc"])
        where = ": ".join([where, *places])
        if fault["type"] == "missing":
            raise UserError(f"{where}: {name} is missing")
        if fault["type"] == "extra_forbidden":
            schema = cls.model_json_schema()
            forms = [schema, *schema.get("$defs", {}).values()]
            known = dict.fromkeys(key for form in forms for key in form["properties"])
            raise UserError(f"{where}: {name}: there is no such key here; {hint(name, known)}")
        raise UserError(f"{where}: {name} = {fault['input']!r}: {fault['msg']}")
