"""The picture of the landing page: what a teacher and its student keep while a text is read. It is a sketch."""

from __future__ import annotations

LENGTHS = ("a page", "a chapter", "a book")  # that was read
CACHES, STATE = (22, 62, 150), 22  # heights of the bars
WIDTH, GROUND, STEP = 44, 178, 132


def draw_picture() -> str:
    """Draw bars of the teacher's cache and the student's state after three lengths of text."""
    bars = []
    for place, (length, cache) in enumerate(zip(LENGTHS, CACHES, strict=True)):
        left = 26 + place * STEP
        for x, height, kind in ((left, cache, "teacher"), (left + WIDTH + 6, STATE, "student")):
            bars.append(
                f'<rect class="lz-{kind}-bar" x="{x}" y="{GROUND - height}" width="{WIDTH}" height="{height}" rx="4"/>'
            )
        bars.append(f'<text x="{left + WIDTH + 3}" y="{GROUND + 20}" text-anchor="middle">{length}</text>')
    legend = (
        '<rect class="lz-teacher-bar" x="26" y="6" width="12" height="12" rx="3"/><text x="44" y="16">teacher: its '
        'cache grows</text><rect class="lz-student-bar" x="26" y="26" width="12" height="12" rx="3"/>'
        '<text x="44" y="36">student: its state stays</text>'
    )
    return (
        '<svg class="lz-picture" viewBox="0 0 420 204" role="img" aria-label="A sketch: the cache of the teacher grows '
        'with the text that it reads, and the state of the student stays the same.">'
        f'{legend}<line x1="16" x2="404" y1="{GROUND}" y2="{GROUND}"/>{"".join(bars)}</svg>'
    )


PICTURE = draw_picture()
