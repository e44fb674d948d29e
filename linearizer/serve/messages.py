"""The messages of a chat: texts, and pictures in data: URLs, as the server fetches nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from linearizer.teacher.picture_files import NO_URL, is_picture_url, read_picture_url


class TextPart(BaseModel):
    type: Literal["text"]
    text: str

    def plain(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class PictureUrl(BaseModel):
    url: str

    @field_validator("url")
    @classmethod
    def refuse_addresses(cls, url: str) -> str:
        if not is_picture_url(url):
            raise ValueError(NO_URL.format(url[:40]))
        return url


class PicturePart(BaseModel):
    type: Literal["image_url"]
    image_url: PictureUrl

    def plain(self) -> dict[str, Any]:
        return {"type": "image"}

    def read(self) -> Any:
        """Read the picture."""
        return read_picture_url(self.image_url.url)


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[TextPart | PicturePart, Field(discriminator="type")]] | None = None

    @model_validator(mode="after")
    def refuse_empty(self) -> Message:
        if self.content is None and self.role != "assistant":  # an assistant may have called a tool instead
            raise ValueError(f"a message of role {self.role!r} has no content: add a text")
        return self

    @property
    def pictures(self) -> list[PicturePart]:
        return [part for part in self.content or [] if isinstance(part, PicturePart)]

    def plain(self) -> dict[str, Any]:
        """Return the message in the form for chat templates: in parts, if it shows pictures."""
        content: Any = self.content or ""
        if not isinstance(content, str):
            parts = [part.plain() for part in content]
            content = parts if self.pictures else "".join(part["text"] for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}
