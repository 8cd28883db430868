"""The parts of a message in OpenAI's words: chat's nest what responses' spread out."""

from msgspec import Raw, Struct

from headrace.gateway.asked import media
from headrace.gateway.asked.marks import Mark, Spans, is_empty
from headrace.gateway.asked.prompt import Prompt


class Link(Struct, gc=False):
    """Where something is, or what it is if that is a data URL."""

    url: str | None = None
    detail: str | None = None


class Sound(Struct, gc=False):
    """A sound."""

    data: str | None = None
    format: str | None = None


class File(Struct, gc=False):
    """A document."""

    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None


class Part(Struct):
    """A part of a message; an unknown kind counts by its text."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | Link | None = None
    detail: str | None = None
    input_audio: Sound | None = None
    audio_url: str | Link | None = None
    video_url: str | Link | None = None
    file: File | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    annotations: Raw = Raw()
    """What an earlier answer cites, in OpenAI's words; the next in Anthropic's."""
    citations: Raw = Raw()
    headrace: Mark | None = None

    @property
    def stays(self) -> bool:
        """Whether it has citations."""
        return not (is_empty(self.annotations) and is_empty(self.citations))


Content = str | list[str | Part] | None
"""What a message says."""


def add(prompt: Prompt, content: Content, spans: Spans | None = None) -> None:
    """Add what a message says to a prompt; `spans` notes its parts."""
    if content is None:
        return
    if isinstance(content, str):
        prompt.text(content)
        return
    for index, part in enumerate(content):
        if spans is not None:
            spans.part(index)
        if isinstance(part, str):
            prompt.text(part)
        else:
            add_part(prompt, part)


def add_part(prompt: Prompt, part: Part) -> None:
    """Add one part, by what it holds rather than by what it is called."""
    if part.text:
        prompt.text(part.text)
    if part.refusal:
        prompt.text(part.refusal)
    if part.image_url is not None:
        url, detail = _link(part.image_url)
        data = media.payload(url)
        prompt.media(data or url, media.tiled(data, part.detail or detail))
    if part.input_audio is not None:
        data = part.input_audio.data or ""
        prompt.media(data, media.sound(data, part.input_audio.format))
    _add_others(prompt, part)


def _link(link: str | Link) -> tuple[str, str | None]:
    return (link, None) if isinstance(link, str) else (link.url or "", link.detail)


def _add_others(prompt: Prompt, part: Part) -> None:
    if part.audio_url is not None:
        url = _link(part.audio_url)[0]
        data = media.payload(url)
        prompt.media(data or url, media.sound(data, _subtype(url)))
    if part.video_url is not None:
        url = _link(part.video_url)[0]
        data = media.payload(url)
        prompt.media(data or url, media.film(data))
    file = part.file or part
    if file.file_data:
        data = media.payload(file.file_data)
        data = file.file_data if data is None else data
        prompt.media(data, media.document(data))
    elif file.file_url or file.file_id:
        is_image = part.type == "input_image"
        weight = media.tiled(None, part.detail) if is_image else media.LINKED_DOCUMENT
        prompt.media(file.file_url or file.file_id or "", weight)


def _subtype(url: str) -> str | None:
    """Return `wav` of `data:audio/wav;base64,`."""
    kind = url[:64].partition(",")[0].partition(";")[0].partition("/")[2]
    return kind.removeprefix("x-") or None
