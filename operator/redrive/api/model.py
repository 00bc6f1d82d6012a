"""What all models of the API share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A part of a manifest as an immutable value; its keys are written in camelCase."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    def to_manifest(self) -> dict[str, Any]:
        """Write the value as it stands in a manifest; what is None is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ApiModel):
    """A status: written by operators only, maybe by a newer one, so unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")
